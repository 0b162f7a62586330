"""SLOs of requests, spelled as in `vllm bench serve --goodput`: ttft:500 tpot:50, in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from common.errors import ConfigError
from loadgen.samples import Sample

# From the time at which the request was due: what waits in the load generator counts, too.
_MEASURES: Mapping[str, Callable[[Sample], float]] = {
    "ttft": lambda sample: sample.delay_s + sample.ttft_s,
    "tpot": lambda sample: sample.tpot_s or 0.0,
    "itl": lambda sample: max(sample.gaps_s, default=0.0),
    "e2el": lambda sample: sample.delay_s + sample.e2e_s,
}
Slo = Mapping[str, float]  # seconds, by name of the measure


def parse_slo(texts: Sequence[str]) -> Slo:
    """Returns the limits in texts like "ttft:500". Raises ConfigError."""
    slo: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit_s = float(value) / 1e3
        except ValueError:
            limit_s = math.nan
        if name not in _MEASURES or not 0 < limit_s < math.inf:
            names = ", ".join(_MEASURES)
            raise ConfigError(
                f"--goodput: expected NAME:MILLISECONDS with one of {names}, got {text!r}", param="goodput"
            )
        if name in slo:
            raise ConfigError(f"--goodput: {name} is given twice", param="goodput")
        slo[name] = limit_s
    return slo


def keeps(sample: Sample, slo: Slo) -> bool:
    """Whether a request keeps all limits; one that failed keeps none."""
    return sample.failure is None and all(_MEASURES[name](sample) <= limit_s for name, limit_s in slo.items())


def describe(slo: Slo) -> str:
    """Returns "ttft:500 itl:50"."""
    return " ".join(f"{name}:{1e3 * limit_s:g}" for name, limit_s in slo.items())
