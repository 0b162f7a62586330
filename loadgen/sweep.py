"""The highest rate that keeps the SLOs: doubled until they break, then halved on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

_MOST_RATE = 1e5
_LEAST_SHARE = 1 / 64  # of the first rate


class Try(NamedTuple):
    """A rate that was tried."""

    rate: float
    attainment: float  # share of requests that kept the SLOs
    is_kept: bool


class Found(NamedTuple):
    """The highest rate that kept the SLOs, and the lowest above it that did not."""

    kept: float | None  # None: even the lowest that was tried breaks them
    broken: float | None  # None: even the highest keeps them
    tries: list[Try]

    @property
    def summary(self) -> str:
        """In words."""
        if self.kept is None:
            return f"no rate keeps the SLOs: {self.broken:.4g} requests/s was the lowest tried"
        if self.broken is None:
            return f"{self.kept:.4g} requests/s keep the SLOs; more was not tried"
        return (
            f"highest rate that keeps the SLOs: {self.kept:.4g} requests/s; {self.broken:.4g} break them "
            f"(within {self.broken / self.kept - 1:.1%})"
        )


async def highest_rate(
    measure: Callable[[float], Awaitable[float]],
    *,
    start: float,
    attainment: float,
    precision: float,
    on_try: Callable[[Try], None],
) -> Found:
    """Searches from `start` on. `measure` returns the share of requests that keep the SLOs at a rate; `attainment` is
    the share that has to. Ends when kept and broken rates are no further apart than `precision`, as a share."""
    tries: list[Try] = []

    async def holds(rate: float) -> bool:
        share = await measure(rate)
        tries.append(Try(rate, share, share >= attainment))
        on_try(tries[-1])
        return tries[-1].is_kept

    low: float | None = None
    high: float | None = None
    rate = start
    while low is None or high is None:
        if await holds(rate):
            low, rate = rate, 2 * rate
        else:
            high, rate = rate, rate / 2
        if (low is None and rate < start * _LEAST_SHARE) or (high is None and rate > _MOST_RATE):
            return Found(low, high, tries)
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if await holds(middle) else (low, middle)
    return Found(low, high, tries)
