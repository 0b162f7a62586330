"""A simulated cluster: the router's real decisions over simulated pods."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from common.engine.messages import EngineStats
from common.pb import pods_pb2
from common.types import hash_prompt, root_hash
from planning.simulator.admission import SimulatedGate
from planning.simulator.clock import Clock
from planning.simulator.pod import Listener, PodRequest, SimulatedPod
from planning.simulator.router import Setting, SimulatedRouter
from planning.simulator.trace import Session, Trace, Turn
from router.pods.load import PodClaim

_REPORT_S = 0.05  # least time between two reports of a pod


class Served(NamedTuple):
    """Who took a request, and how much of its prompt needed no computing."""

    session: str
    turn: int  # in the session
    router: int
    num_prompt_tokens: int
    num_cached_tokens: int


def hit_rate(served: Sequence[Served]) -> float:
    """Share of the prompts' tokens that whoever computed them had cached."""
    totals = [(each.num_cached_tokens, each.num_prompt_tokens) for each in served]
    return sum(cached for cached, _ in totals) / max(1, sum(count for _, count in totals))


class Outcome(NamedTuple):
    """The users' latencies, and the work behind them. Times in seconds."""

    ttft_s: np.ndarray  # one per request
    tpot_s: np.ndarray  # mean gap of each request
    gaps_s: np.ndarray  # all gaps, and below how often each
    gap_counts: np.ndarray
    duration_s: float
    hit_rate: float  # prompt tokens that whoever computed the prompt had cached
    local_share: float  # prompts that decode pods computed
    num_preemptions: int
    prefill_busy: float  # share of the time, of the pods that compute prompts
    decode_busy: float  # the same of those that decode
    num_decisions: int
    served: tuple[Served, ...]  # one per request

    def ttft(self, percentile: float) -> float:
        """Returns a percentile of the requests' TTFTs."""
        return float(np.percentile(self.ttft_s, percentile))

    def itl(self, percentile: float) -> float:
        """Returns a percentile of all gaps between tokens."""
        order = np.argsort(self.gaps_s)
        totals = np.cumsum(self.gap_counts[order])
        return float(self.gaps_s[order][np.searchsorted(totals, percentile / 100 * totals[-1])])

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Requests per second that met both targets."""
        return float(((self.ttft_s <= ttft_s) & (self.tpot_s <= tpot_s)).sum() / self.duration_s)


class SimulatedCluster:
    """Serves one trace. Each request comes to any of the routers by lot."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.clock = Clock()
        num_pods = setting.num_prefill + setting.num_decode
        self._pods = [SimulatedPod(setting.hardware, self.clock, self._on_change) for _ in range(num_pods)]
        self._numbers = {id(pod): number for number, pod in enumerate(self._pods)}
        self._figures = [pod.stats for pod in self._pods]  # as of the end of each pod's last step
        self._reported_at = [-math.inf] * num_pods
        self._reports_due: set[int] = set()  # numbers of pods
        self.routers = [SimulatedRouter(setting, self.clock, self._pods, seed) for seed in range(setting.num_routers)]
        for pod in self._pods:
            self._on_change(pod)
        self._gates = {
            id(router): SimulatedGate(router, self.clock, setting.admission, setting.limits)
            for router in self.routers
            if setting.admission is not None
        }
        self._lots = random.Random(0)
        self.requests: list[_Request] = []
        self.gaps: dict[float, int] = {}

    def serve(self, trace: Trace) -> Outcome:
        """Run the whole trace, to its last token."""
        for session in trace.sessions:
            self.clock.at(session.start_s, partial(self._begin, session))
        self.clock.run()
        requests = self.requests
        assert len(requests) == trace.num_requests
        assert all(request.is_done for request in requests), "a prompt does not fit a pod"
        served = tuple(request.served(self.routers.index(request.router)) for request in requests)
        computing = self._pods[: self.setting.num_prefill] or self._pods
        judged = [request for request in requests if request.arrived_at >= self.setting.warm_up_s]
        gaps = np.array(list(self.gaps)), np.array(list(self.gaps.values()))
        return Outcome(
            ttft_s=np.array([request.ttft_s for request in judged]),
            tpot_s=np.array([request.tpot_s for request in judged]),
            gaps_s=gaps[0],
            gap_counts=gaps[1],
            duration_s=self.clock.now,
            hit_rate=hit_rate(served),
            local_share=sum(request.is_local for request in requests) / len(requests),
            num_preemptions=sum(pod.stats.num_preemptions for pod in self._pods),
            prefill_busy=self._busy(computing),
            decode_busy=self._busy(self._pods[self.setting.num_prefill :]),
            num_decisions=len(requests),
            served=served,
        )

    def note_gap(self, seconds: float) -> None:
        """A gap between tokens has just ended."""
        if self.clock.now >= self.setting.warm_up_s:
            seconds = round(seconds, 6)
            self.gaps[seconds] = self.gaps.get(seconds, 0) + 1

    def _busy(self, pods: Sequence[SimulatedPod]) -> float:
        return sum(pod.busy_s for pod in pods) / self.clock.now / len(pods)

    def any_router(self) -> SimulatedRouter:
        """Returns the router of the next request."""
        return self._lots.choice(self.routers)

    def gate_of(self, router: SimulatedRouter) -> SimulatedGate | None:
        """None: all that comes is sent at once."""
        return self._gates.get(id(router))

    def check(self) -> list[str]:
        """Returns a line for each thing that should be gone; none: all is well."""
        problems = [problem for router in self.routers for problem in router.check()]
        return problems + [f"pod {number}: {each}" for number, pod in enumerate(self._pods) for each in pod.check()]

    def check_index(self) -> list[str]:
        """Returns a line for each entry in which an index is wrong about a pod. Looks up every prompt on every pod."""
        prompts = [request.hashes for request in self.requests]
        return [problem for router in self.routers for prompt in prompts for problem in router.check_index(prompt)]

    def _begin(self, session: Session) -> None:
        _Request(self, session, 0).arrive()

    def _on_change(self, pod: SimulatedPod) -> None:
        """Has it reported now, or once _REPORT_S have passed since its last report."""
        number = self._numbers[id(pod)]
        self._figures[number] = pod.stats
        due = self._reported_at[number] + _REPORT_S
        if due <= self.clock.now:
            self._report(number)
        elif number not in self._reports_due:
            self._reports_due.add(number)
            self.clock.at(due, lambda: self._report(number))

    def _report(self, number: int) -> None:
        self._reports_due.discard(number)
        self._reported_at[number] = self.clock.now
        pod = self._pods[number]
        figures, change = _figures(self._figures[number]), pod.take_cache_change()
        for router in self.routers:
            report = partial(router.on_report, number, figures, change)
            self.clock.after(pod.hardware.message_s, report)


def _figures(stats: EngineStats) -> pods_pb2.PodStats:
    """Returns the part of a report that routers go by."""
    return pods_pb2.PodStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_for_remote_kv=stats.num_waiting_for_remote_kv,
        num_free_blocks=stats.num_free_blocks,
        num_blocks=stats.num_blocks,
        num_queued_tokens=stats.num_queued_tokens,
        last_step_s=stats.last_step_s,
        last_step_tokens=stats.last_step_tokens,
    )


class _Request:
    """One turn under way, and what its user sees."""

    def __init__(self, cluster: SimulatedCluster, session: Session, number: int) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self.session = session
        self._number = number
        self.turn: Turn = session.turns[number]
        block_size = cluster.setting.hardware.block_size
        self.token_ids = self.turn.token_ids(block_size)  # of prompt and answer, until the end
        self.hashes = hash_prompt(self.token_ids[: self.turn.num_prompt_tokens], block_size, root_hash())
        self.num_prompt_tokens = self.turn.num_prompt_tokens
        self.num_cached_tokens = 0
        self.router = cluster.any_router()
        self.is_local = False  # a decode pod computes the prompt
        self.is_done = False
        self.is_refused = False
        self.retry_after_s = 0.0
        self.ttft_s = 0.0
        self.tpot_s = 0.0
        self.arrived_at = 0.0
        self._last = 0.0  # when the last token was seen
        self._decode_claim: PodClaim | None = None

    def arrive(self) -> None:
        """The user has asked."""
        self.arrived_at = self._clock.now
        self._cluster.requests.append(self)
        self._query = self.router.query(self.num_prompt_tokens, self.hashes, self.session.name)
        if (gate := self._cluster.gate_of(self.router)) is None:
            self.send()
        else:
            gate.offer(self, self._query)

    def refuse(self, retry_after_s: float) -> None:
        """The user is told to come back later, and does not."""
        self.is_done = self.is_refused = True
        self.retry_after_s = retry_after_s
        self.ttft_s = math.inf

    def send(self) -> None:
        """To the pods."""
        decode, prefill = self.router.route(self._query)
        hardware = self._cluster.setting.hardware
        delay_s = hardware.request_s + hardware.message_s
        self._decode_claim = decode.claim
        self.is_local = prefill is None
        if prefill is None:
            request = self.leg(self)
            self._clock.after(delay_s, lambda: decode.pod.submit(request))
        else:
            leg = _PrefillLeg(self, self._clock, decode.pod, prefill.claim)
            request = self.leg(leg, "producer")
            self._clock.after(delay_s, lambda: prefill.pod.submit(request))

    def leg(self, listener: Listener, role: Literal["producer", "consumer"] | None = None) -> PodRequest:
        """Returns the request for one pod."""
        return PodRequest(
            self.token_ids, self.num_prompt_tokens, self.turn.num_output_tokens, role=role, listener=listener
        )

    def handed_over(self, decode: SimulatedPod, consumer: PodRequest, computed_s: float) -> None:
        """The prompt is computed: the first token goes to the user, the KV to the decode pod.

        `computed_s`: seconds in which KV was computed, and moved meanwhile.
        """
        self.on_tokens()
        hardware = self._cluster.setting.hardware
        num_held = decode.num_cached_blocks(self.hashes) * hardware.block_size
        num_moved = self.num_prompt_tokens - num_held
        moving_s = num_moved * hardware.handoff_token_s
        last_chunk_s = min(num_moved, hardware.max_num_batched_tokens) * hardware.handoff_token_s
        handoff_s = hardware.handoff_s + max(moving_s - computed_s, last_chunk_s)
        self.router.learn(handoff=(handoff_s, num_moved))
        self._clock.after(handoff_s, lambda: decode.deliver(consumer))

    def on_scheduled(self, num_cached_tokens: int) -> None:
        """See Listener."""
        if self.is_local:
            self.num_cached_tokens = num_cached_tokens

    def on_tokens(self) -> None:
        """See Listener."""
        now = self._clock.now + self._cluster.setting.hardware.message_s
        if not self.ttft_s:
            self.ttft_s = now - self.arrived_at
            assert self._decode_claim is not None
            self._decode_claim.prefilled(now)
        else:
            self._cluster.note_gap(now - self._last)
        self._last = now

    def on_end(self) -> None:
        """See Listener."""
        self.is_done = True
        self.token_ids = []
        num_output_tokens = self.turn.num_output_tokens
        if num_output_tokens > 1:
            self.tpot_s = (self._last - self.arrived_at - self.ttft_s) / (num_output_tokens - 1)
        assert self._decode_claim is not None
        self._decode_claim.release(self._clock.now)
        self.router.learn(answer=num_output_tokens)
        if (gate := self._cluster.gate_of(self.router)) is not None:
            gate.ended()
        if self._number + 1 < len(self.session.turns):
            following = _Request(self._cluster, self.session, self._number + 1)
            self._clock.after(following.turn.wait_s, following.arrive)

    def served(self, router: int) -> Served:
        """Returns the record of a request that was served."""
        return Served(self.session.name, self._number, router, self.num_prompt_tokens, self.num_cached_tokens)


class _PrefillLeg:
    """The leg of a request on a prefill pod."""

    def __init__(self, request: _Request, clock: Clock, decode: SimulatedPod, claim: PodClaim) -> None:
        self._request = request
        self._clock = clock
        self._decode = decode
        self._claim = claim
        self._consumer = request.leg(request, "consumer")
        self._scheduled_at = 0.0

    def on_scheduled(self, num_cached_tokens: int) -> None:
        """See Listener."""
        self._scheduled_at = self._clock.now
        self._clock.after(self._decode.hardware.message_s, lambda: self._decode.submit(self._consumer))
        self._request.num_cached_tokens = num_cached_tokens

    def on_tokens(self) -> None:
        """See Listener."""
        self._claim.prefilled(self._clock.now)
        self._request.handed_over(self._decode, self._consumer, self._clock.now - self._scheduled_at)

    def on_end(self) -> None:
        """See Listener."""
        self._claim.release(self._clock.now)
