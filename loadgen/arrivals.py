"""Arrival times of an open loop: requests are sent then, whatever became of those before them."""

from __future__ import annotations

import itertools
import random

from common.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns the times, in seconds, of `count` requests at `rate` per second.

    Gaps are gamma distributed with `burstiness` as their shape: 1 is a Poisson process, less comes in bursts, more is
    evener. They are scaled so that the last request comes at count / rate, and a run has exactly the rate it was asked
    for, as in `vllm bench serve`.
    """
    choices = random.Random(f"{seed} arrivals")
    times = list(itertools.accumulate(choices.gammavariate(burstiness, 1.0) for _ in range(count)))
    scale = count / rate / times[-1]
    return [scale * each for each in times]


def parse_rate(text: str) -> float | None:
    """Returns requests per second; None for "inf": all at once. Raises ConfigError."""
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not rate > 0:
        raise ConfigError(f"--request-rate: must be a number above 0, or inf, got {text!r}", param="request_rate")
    return None if rate == float("inf") else rate
