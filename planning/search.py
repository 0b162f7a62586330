"""How many pods a load needs: sizes are tried on the simulator, the fewest pods that keep the SLOs win.

A size is x prefill and y decode pods; 0 prefill pods are colocated serving. More pods of either kind do not hurt, so
that each number is found by doubling and halving:

1. n prefill and n decode pods, n doubled until the SLOs hold.
2. The fewest prefill pods beside so many decode pods.
3. From there on, one prefill pod more each time: the fewest decode pods beside them, as long as the total may fall.

All sizes serve the same requests, in the same order; another rate is the same arrivals, faster or slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from common.errors import ConfigError
from planning.profile import EngineProfile
from planning.simulator.cluster import SimulatedCluster
from planning.simulator.router import Setting
from planning.workload import Workload

MOST_PODS = 512  # of either kind
_POLICY, _REMOTE_PREFILL = "kv_aware", "auto"  # the router's defaults
_TARGET = 0.9  # of the ITL's limit, that steps beside prompts aim at
_RATE_PRECISION = 0.02
_MOST_RATE = 64.0  # times the load that was asked for: more headroom is not looked for
_IDLE = 1e-3  # times the rate: each request has the cluster to itself
_IDLE_REQUESTS = 100


class Slo(NamedTuple):
    """The SLOs that a plan keeps: `percentile` of the TTFTs, and of all gaps between tokens, in seconds."""

    ttft_s: float
    itl_s: float
    percentile: float = 99.0

    @property
    def target_itl_s(self) -> float:
        """The target_itl_ms that pods are given, in seconds."""
        return _TARGET * self.itl_s


class Size(NamedTuple):
    """A cluster."""

    num_prefill: int
    num_decode: int

    @property
    def total(self) -> int:
        """All pods."""
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"{self.num_prefill}P + {self.num_decode}D" if self.num_prefill else f"{self.num_decode} colocated"


class Measured(NamedTuple):
    """The simulator's figures for a size under a load."""

    ttft_s: float  # at the SLO's percentile, as is the next
    itl_s: float
    median_ttft_s: float
    median_itl_s: float
    prefill_busy: float  # share of the time, of the pods that compute prompts
    decode_busy: float
    num_preemptions: int

    def keeps(self, slo: Slo) -> bool:
        """Whether both SLOs hold."""
        return self.ttft_s <= slo.ttft_s and self.itl_s <= slo.itl_s


class Planner:
    """Tries sizes of one workload on one kind of pod. What was tried is kept."""

    def __init__(
        self,
        profile: EngineProfile,
        workload: Workload,
        slo: Slo,
        *,
        warm_up_s: float | None = None,
        on_try: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`warm_up_s`: what comes before does not count; None: until there are as many requests as usual. `on_try` is
        told the number of simulations so far. Raises ConfigError if a request fits no pod."""
        if workload.longest > profile.max_model_len:
            raise ConfigError(
                f"a request of {workload.longest:,} tokens does not fit the model's {profile.max_model_len:,}"
            )
        if workload.longest > profile.num_blocks * profile.block_size * 0.9:
            raise ConfigError(f"a request of {workload.longest:,} tokens does not fit the KV cache of a pod")
        self.workload = workload
        self.slo = slo
        self._hardware = profile.hardware(
            workload.mean_prompt_tokens + workload.mean_output_tokens, slo.target_itl_s, workload.drafts
        )
        self._warm_up_s = warm_up_s
        self._on_try = on_try
        self._tried: dict[tuple[Size, float], Measured] = {}

    def measure(self, size: Size, scale: float = 1.0) -> Measured:
        """Serves the workload `scale` times as fast."""
        key = (size, scale)
        if key not in self._tried:
            self._tried[key] = self._simulate(size, scale, self.workload)
            self._on_try(len(self._tried))
        return self._tried[key]

    def keeps(self, size: Size, scale: float = 1.0) -> bool:
        """Whether a size keeps the SLOs."""
        return self.measure(size, scale).keeps(self.slo)

    def check_possible(self) -> None:
        """Raises ConfigError if not even an idle cluster keeps the SLOs; it says what the least would be."""
        few = self.workload._replace(requests=self.workload.requests[:_IDLE_REQUESTS])
        least = [self._simulate(size, _IDLE, few) for size in (Size(1, 1), Size(0, 1))]
        ttft_s, itl_s = min(each.ttft_s for each in least), min(each.itl_s for each in least)
        for option, wanted_s, least_s in (("slo_ttft", self.slo.ttft_s, ttft_s), ("slo_itl", self.slo.itl_s, itl_s)):
            if wanted_s < least_s:
                name = option.removeprefix("slo_").upper()
                raise ConfigError(
                    f"--{option.replace('_', '-')}: no number of pods keeps {1e3 * wanted_s:.4g} ms: on an idle "
                    f"cluster the {name} is {1e3 * least_s:.4g} ms at the {self.slo.percentile:g}th percentile",
                    param=option,
                )

    def fewest(self, scale: float = 1.0) -> Size:
        """Returns the smallest size with prefill pods. Raises ConfigError if MOST_PODS of each kind are too few."""
        enough = self._doubled(lambda number: Size(number, number), scale)
        best = Size(enough, enough)
        start = _least(1, enough, lambda number: self.keeps(Size(number, enough), scale))
        least_decode = _least(1, enough, lambda number: self.keeps(Size(enough, number), scale))
        num_decode = enough
        for num_prefill in range(start, enough + 1):
            if num_prefill + least_decode >= best.total:
                break
            num_decode = self._fewest_decode(num_prefill, least_decode, num_decode, scale)
            best = min(best, Size(num_prefill, num_decode), key=lambda size: size.total)
        return best

    def fewest_colocated(self, scale: float = 1.0) -> Size:
        """The same of pods that do both. Raises ConfigError."""
        enough = self._doubled(lambda number: Size(0, number), scale)
        return Size(0, _least(1, enough, lambda number: self.keeps(Size(0, number), scale)))

    def most_scale(self, size: Size, scale: float) -> float:
        """Returns how many times as fast the workload may come, at least `scale`, with which the SLOs hold."""
        low, high = scale, 2 * scale
        while high < _MOST_RATE and self.keeps(size, high):
            low, high = high, 2 * high
        while high / low > 1 + _RATE_PRECISION:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.keeps(size, middle) else (low, middle)
        return low

    def _fewest_decode(self, num_prefill: int, low: int, high: int, scale: float) -> int:
        return _least(low, high, lambda number: self.keeps(Size(num_prefill, number), scale))

    def _doubled(self, size: Callable[[int], Size], scale: float) -> int:
        number = 1
        while not self.keeps(size(number), scale):
            number *= 2
            if number > MOST_PODS:
                raise ConfigError(
                    f"{MOST_PODS} pods of each kind do not keep the SLOs at {self.rate(scale):g} requests/s"
                )
        return number

    def rate(self, scale: float) -> float:
        """Requests per second."""
        return self.workload.rate * scale

    def _simulate(self, size: Size, scale: float, workload: Workload) -> Measured:
        trace = workload.trace(scale, self._hardware.block_size)
        warm_up_s = self._warm_up_s
        if warm_up_s is None:
            warm_up_s = min(self._stay_s(), trace.sessions[-1].start_s / 4)
        setting = Setting(
            self._hardware, size.num_prefill, size.num_decode, _POLICY, _REMOTE_PREFILL, warm_up_s=warm_up_s
        )
        outcome = SimulatedCluster(setting).serve(trace)
        percentile = self.slo.percentile
        return Measured(
            ttft_s=outcome.ttft(percentile),
            itl_s=outcome.itl(percentile) if len(outcome.gaps_s) else 0.0,
            median_ttft_s=outcome.ttft(50),
            median_itl_s=outcome.itl(50) if len(outcome.gaps_s) else 0.0,
            prefill_busy=outcome.prefill_busy,
            decode_busy=outcome.decode_busy,
            num_preemptions=outcome.num_preemptions,
        )

    def _stay_s(self) -> float:
        """Most seconds of a request that keeps the SLOs: so long it takes until as many end as begin."""
        return self.slo.ttft_s + self.workload.mean_output_tokens * self.slo.itl_s


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Returns the least number from `low` on for which it holds, as it does for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high
