"""A plan: how many pods a load needs, why, and how far each step of scale reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import ConfigError
from planning.search import Measured, Planner, Size, Slo

STEPS = (0.5, 1.0, 1.5, 2.0)  # times the rate that was asked for


class ScaleStep(NamedTuple):
    """The fewest pods for one rate, and the highest rate at which they keep the SLOs."""

    rate: float
    size: Size
    measured: Measured
    most_rate: float

    @property
    def headroom(self) -> float:
        """How much more may come, as a share of the rate."""
        return self.most_rate / self.rate - 1


class Plan(NamedTuple):
    """The answer for the rate that was asked for, and the steps around it."""

    rate: float
    slo: Slo
    size: Size
    reasons: tuple[tuple[str, str], ...]  # of each number, and what serving without prefill pods would take
    steps: tuple[ScaleStep, ...]

    @property
    def asked(self) -> ScaleStep:
        """The step for the rate that was asked for."""
        return next(step for step in self.steps if step.rate == self.rate)


def make_plan(planner: Planner, *, colocated: bool = False, scales: Sequence[float] = STEPS) -> Plan:
    """Searches. `colocated`: for pods that do both. Raises ConfigError if the SLOs cannot be kept."""
    planner.check_possible()
    fewest = planner.fewest_colocated if colocated else planner.fewest
    size = fewest()
    reasons = _reasons(planner, size, colocated=colocated)
    most: dict[Size, float] = {}
    steps = []
    for scale in sorted({*scales, 1.0}):
        step_size = size if scale == 1.0 else fewest(scale)
        if step_size not in most:
            most[step_size] = planner.most_scale(step_size, scale)
        rate, most_rate = planner.rate(scale), planner.rate(max(most[step_size], scale))
        steps.append(ScaleStep(rate, step_size, planner.measure(step_size, scale), most_rate))
    return Plan(planner.rate(1.0), planner.slo, size, reasons, tuple(steps))


def _reasons(planner: Planner, size: Size, *, colocated: bool) -> tuple[tuple[str, str], ...]:
    prefill, decode = size
    if colocated:
        return (("colocated", _without(planner, decode, Size(0, decode - 1))),)
    return (
        ("prefill", _without(planner, prefill, Size(prefill - 1, decode))),
        ("decode", _without(planner, decode, Size(prefill, decode - 1))),
        ("colocated", _next_to_colocated(planner, size)),
    )


def _without(planner: Planner, number: int, smaller: Size) -> str:
    """Says which SLO breaks with one pod fewer."""
    if number == 1:
        return "one is the least"
    measured = planner.measure(smaller)
    broken = broken_slos(measured, planner.slo)
    if not broken:
        return f"with {number - 1} the SLOs would just hold, with no room for the next step"
    busy = f"prefill pods busy {measured.prefill_busy:.0%}, decode pods {measured.decode_busy:.0%}"
    if not smaller.num_prefill:
        busy = f"pods busy {measured.decode_busy:.0%}"
    preempted = f", {measured.num_preemptions} preemptions for lack of KV blocks" if measured.num_preemptions else ""
    return f"with {number - 1} {' and '.join(broken)}; {busy}{preempted}"


def broken_slos(measured: Measured, slo: Slo) -> list[str]:
    """Returns by how much each SLO that does not hold is missed."""
    pairs = (("TTFT", measured.ttft_s, slo.ttft_s), ("ITL", measured.itl_s, slo.itl_s))
    return [
        f"the {name} is {in_words(seconds)}, {seconds / limit_s:.1f} times its SLO"
        for name, seconds, limit_s in pairs
        if seconds > limit_s
    ]


def _next_to_colocated(planner: Planner, size: Size) -> str:
    try:
        alone = planner.fewest_colocated().num_decode
    except ConfigError:
        return "no number of pods that do both keeps the SLOs"
    if alone < size.total:
        return f"{alone} pods that do both would be fewer than {size.total}: see --colocated"
    comparison = "as many" if alone == size.total else f"{alone - size.total} more"
    return f"without prefill pods {alone} would be needed, {comparison}"


def in_words(seconds: float) -> str:
    """Returns "12 s", "1.25 s" or "340 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
