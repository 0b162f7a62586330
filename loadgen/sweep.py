"""The highest rate that keeps the SLOs: doubled until they break, then halved on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from loadgen.endpoint import Endpoint
from loadgen.load import run_load
from loadgen.slo import Slo, keeps
from loadgen.workload import Conversation

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
    alone: float | None = None  # share of requests sent one at a time that kept the SLOs, if that was too small

    @property
    def summary(self) -> str:
        """In words."""
        if self.alone is not None:
            return (
                f"no rate keeps the SLOs: of requests sent one at a time {self.alone:.1%} kept them, and a lower rate "
                "cannot do better"
            )
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
    measure_alone: Callable[[], Awaitable[float]],
    *,
    start: float,
    attainment: float,
    precision: float,
    on_try: Callable[[Try], None],
) -> Found:
    """Searches from `start` on. `measure` returns the share of requests that keep the SLOs at a rate, `measure_alone`
    of those sent one at a time; `attainment` is the share that has to. Ends when kept and broken rates are no further
    apart than `precision`, as a share, or if requests sent one at a time break the SLOs as well as those at `start`."""
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
            if high is None and low is None and (alone := await measure_alone()) < attainment:
                return Found(None, rate, tries, alone)
            high, rate = rate, rate / 2
        if (low is None and rate < start * _LEAST_SHARE) or (high is None and rate > _MOST_RATE):
            return Found(low, high, tries)
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if await holds(middle) else (low, middle)
    return Found(low, high, tries)


async def attainment_alone(
    conversations: Sequence[Conversation], endpoint: Endpoint, slo: Slo, *, attainment: float
) -> float:
    """Sends conversations one after the other, until the share of requests that keep the SLOs must end up below
    `attainment`. Returns the share of those that were sent."""
    num_requests = sum(len(each.turns) for each in conversations)
    num_sent = num_kept = 0
    for conversation in conversations:
        run = await run_load([conversation], endpoint)
        num_sent += len(run.samples)
        num_kept += sum(keeps(sample, slo) for sample in run.samples)
        if (num_kept + num_requests - num_sent) / num_requests < attainment:
            break
    return num_kept / num_sent
