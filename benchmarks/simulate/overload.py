"""More requests than a cluster can serve in time, with and without admission."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.simulate.timing import H100_8B
from benchmarks.simulate.traces import TraceMaker
from planning.simulator.cluster import SimulatedCluster
from planning.simulator.router import Setting
from router.admission.config import AdmissionConfig
from router.admission.limits import Limits

TTFT_S, ITL_S = 1.0, 0.05
_SECONDS = 60.0
_TIMEOUT_S = 600.0
_RATE_PER_POD = 11.5  # of unshared prompts that a prefill pod computes, busy all the time

MODES = {
    "sent to the pods at once": (None, Limits(_TIMEOUT_S)),
    "queue": (AdmissionConfig(max_queued=10**6, max_inflight=10**6), Limits(_TIMEOUT_S)),
    "queue, limits named": (AdmissionConfig(), Limits(_TIMEOUT_S, TTFT_S, ITL_S)),
}


class Overload(NamedTuple):
    """One minute of one load."""

    load: float  # times what the pods can compute
    mode: str
    offered: float  # requests per second, as are the next two
    served: float  # while it lasted, and until all were served
    good: float  # within both limits
    refused: float  # share
    kept: float  # share of those served that were within both limits: "in time"
    ttft_p50_s: float  # of those served
    ttft_p99_s: float

    @property
    def cells(self) -> Iterator[str]:
        """Returns the row of the table."""
        yield from (f"{self.load:g}", self.mode)
        yield from (f"{rate:.1f}" for rate in (self.offered, self.served, self.good))
        yield from (f"{share:.0%}" for share in (self.refused, self.kept))
        yield from (f"{seconds * 1e3:.0f}" for seconds in (self.ttft_p50_s, self.ttft_p99_s))


LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)


def overload(load: float, mode: str, *, num_pods: int = 2, seconds: float = _SECONDS, seed: int = 1) -> Overload:
    """Serve `load` times the capacity of `num_pods` prefill pods (and as many decode pods)."""
    admission, limits = MODES[mode]
    setting = Setting(H100_8B, num_pods, num_pods, "kv_aware", "auto", admission=admission, limits=limits)
    rate = load * _RATE_PER_POD * num_pods
    trace = TraceMaker(H100_8B.block_size, seed=seed).unshared(round(rate * seconds), rate)
    cluster = SimulatedCluster(setting)
    outcome = cluster.serve(trace)
    assert not (problems := cluster.check()), problems
    refused = np.array([request.is_refused for request in cluster.requests])
    good = (outcome.ttft_s <= TTFT_S) & (outcome.tpot_s <= ITL_S)
    served_s = outcome.ttft_s[~refused]
    return Overload(
        load=load,
        mode=mode,
        offered=len(refused) / seconds,
        served=float((~refused).sum() / max(outcome.duration_s, seconds)),
        good=float(good.sum() / seconds),
        refused=float(refused.mean()),
        kept=float(good.sum() / max(1, len(served_s))),
        ttft_p50_s=float(np.percentile(served_s, 50)),
        ttft_p99_s=float(np.percentile(served_s, 99)),
    )


HEAD = (
    "Admission under overload, on a simulated cluster",
    f"""\
`python -m benchmarks.simulate --overload --markdown FILE`. One minute of prompts that share nothing (2,000 tokens in
the mean, log-normal; answers of 200) for 2 prefill and 2 decode pods with the timing of an H100 and an 8B model,
`remote_prefill: auto`. Load 1 is what the prefill pods can compute; decode pods compute some more when they are late.
Pods and time are simulated, queue, limits, predictions and routing are the router's own. Results depend on nothing but
the seed.

In time: first token within {TTFT_S * 1e3:g} ms and {ITL_S * 1e3:g} ms per further token. Served: per second until all
were served. Three ways: sent to the pods as they come, as if there were no admission; through the router's queue,
which is as long as it takes; and with the limits named in `x-slo-ttft-ms` and `x-slo-itl-ms`, with the default
settings. TTFT is of those served.""",
)
COLUMNS = "load |  | offered, 1/s | served, 1/s | goodput, 1/s | refused | in time | TTFT p50, ms | TTFT p99, ms"
