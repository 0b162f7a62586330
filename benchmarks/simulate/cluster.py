"""A simulated cluster: the router's real decisions over simulated pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.simulate.cache import split
from benchmarks.simulate.pod import Clock, Job, SimulatedPod
from benchmarks.simulate.timing import Hardware
from benchmarks.simulate.traces import Session, Trace, Turn
from common.pb import pods_pb2
from common.types import HASH_BYTES
from router.estimates import Estimates
from router.index import PrefixIndex
from router.pods import PodClaim, PodLoad, Share
from router.policies import Leg, PodFacts, PodTable, prefill_work
from router.routing import Placement, Planner, Query

_MESSAGE_S = 0.0005  # between router and pod
_REPORT_S = 0.05  # least time between two reports of a pod
_NO_LIMIT_S = 3600.0
_MAX_INDEX_BLOCKS = 4_000_000


class Setting(NamedTuple):
    """How a cluster is set up."""

    hardware: Hardware
    num_prefill: int
    num_decode: int
    policy: str
    remote_prefill: str = "prefer"
    target_itl_s: float = 0.05


class Outcome(NamedTuple):
    """What the users saw, and what it took. Times in seconds."""

    ttft_s: np.ndarray  # one per request
    tpot_s: np.ndarray  # mean gap of each request
    gaps_s: np.ndarray  # all gaps, and below how often each
    gap_counts: np.ndarray
    duration_s: float
    hit_rate: float  # prompt tokens that whoever computed the prompt had cached
    local_share: float  # prompts that decode pods computed
    num_preemptions: int
    prefill_busy: float  # share of the time, of the pods that compute prompts
    num_decisions: int

    def ttft(self, percentile: float) -> float:
        """Of requests."""
        return float(np.percentile(self.ttft_s, percentile))

    def itl(self, percentile: float) -> float:
        """Of all gaps between tokens."""
        order = np.argsort(self.gaps_s)
        totals = np.cumsum(self.gap_counts[order])
        return float(self.gaps_s[order][np.searchsorted(totals, percentile / 100 * totals[-1])])

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Requests per second that met both targets."""
        return float(((self.ttft_s <= ttft_s) & (self.tpot_s <= tpot_s)).sum() / self.duration_s)


class _PodSeat:
    """The router's side of one simulated pod."""

    def __init__(self, pod: SimulatedPod, load: PodLoad, facts: PodFacts) -> None:
        self.pod = pod
        self.load = load
        self.facts = facts
        self.sequence = 1
        self.report_due = False


class SimulatedCluster:
    """Serves one trace."""

    def __init__(self, setting: Setting, decision_clock: Callable[[], float] | None = None) -> None:
        self.setting = setting
        self.clock = Clock()
        self._index = PrefixIndex(_MAX_INDEX_BLOCKS)
        self._estimates = Estimates()
        self._seats: dict[str, _PodSeat] = {}
        self._seat_of: dict[int, _PodSeat] = {}  # by id of the pod
        tables = PodTable(), PodTable()
        for table, role, count in zip(tables, "pd", (setting.num_prefill, setting.num_decode), strict=True):
            for number in range(count):
                self._add_pod(f"{role}{number}", table)
        self._planner = Planner(
            *tables,
            self._index,
            prefill_policy=setting.policy,
            decode_policy=setting.policy,
            remote_prefill=setting.remote_prefill if setting.num_prefill else "never",  # type: ignore[arg-type]
            target_itl_s=setting.target_itl_s,
        )
        self.requests: list[_Request] = []
        self.gaps: dict[float, int] = {}
        self.num_local = 0

    def serve(self, trace: Trace) -> Outcome:
        """Run the whole trace, to its last token."""
        for session in trace.sessions:
            self.clock.at(session.start_s, lambda session=session: _Request(self, session, 0).arrive())
        self.clock.run()
        requests = self.requests
        assert len(requests) == trace.num_requests
        assert all(request.is_done for request in requests), "a prompt does not fit a pod"
        pods = [seat.pod for seat in self._seats.values()]
        computing = pods[: self.setting.num_prefill] or pods
        num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
        gaps = np.array(list(self.gaps)), np.array(list(self.gaps.values()))
        return Outcome(
            ttft_s=np.array([request.ttft_s for request in requests]),
            tpot_s=np.array([request.tpot_s for request in requests]),
            gaps_s=gaps[0],
            gap_counts=gaps[1],
            duration_s=self.clock.now,
            hit_rate=sum(request.num_cached_tokens for request in requests) / num_prompt_tokens,
            local_share=self.num_local / len(requests),
            num_preemptions=sum(pod.num_preemptions for pod in pods),
            prefill_busy=sum(pod.busy_s for pod in computing) / self.clock.now / len(computing),
            num_decisions=len(requests),
        )

    def check(self) -> list[str]:
        """What is left that should not be; empty: nothing."""
        problems = self._index.check_integrity()
        for name, seat in self._seats.items():
            pod, load = seat.pod, seat.load
            if pod.waiting or pod.running or pod.cache.num_free != pod.hardware.num_blocks:
                problems.append(f"{name} still holds something")
            if (load.num_requests, load.num_tokens, load.work, load.num_blocks) != (0, 0, 0, 0):
                problems.append(f"claims on {name} were not given back")
        return problems

    def check_index(self) -> list[str]:
        """Where the index is wrong about what a pod holds. Looks up every prompt on every pod."""
        problems = []
        for prompt in (request.turn.prompt for request in self.requests):
            indexed = self._index.match(prompt, self.clock.now + _NO_LIMIT_S).computed
            problems += [
                f"{seat.facts.address}: the index has {indexed[seat.facts.slot]} blocks of a prompt"
                for seat in self._seats.values()
                if indexed[seat.facts.slot] != seat.pod.cache.match(split(prompt))
            ]
        return problems

    def route(self, request: _Request) -> None:
        """Decide, claim, send."""
        hardware = self.setting.hardware
        query = Query(
            num_prompt_tokens=request.num_prompt_tokens,
            block_hashes=request.turn.prompt,
            block_size=hardware.block_size,
            expected_output_tokens=self._estimates.expected_output_tokens(4096),
            handoff_token_s=self._estimates.handoff_token_s,
            session=request.session.name,
        )
        plan = self._planner.plan(query, self.clock.now)
        assert plan is not None
        self._planner.note(plan)
        self.num_local += plan.prefill is None
        decode, decode_claim = self._claim(plan.decode, request, computes=plan.prefill is None)
        if plan.prefill is None:
            request.sent_to_one(decode, decode_claim)
        else:
            prefill, prefill_claim = self._claim(plan.prefill, request, computes=True)
            request.sent_to_two(decode, decode_claim, prefill, prefill_claim)

    def learn(self, *, answer: int = 0, handoff: tuple[float, int] | None = None) -> None:
        """As the router does when a request is over, or handed over."""
        if answer:
            self._estimates.answered(answer)
        if handoff is not None:
            self._estimates.handed_over(*handoff)

    def _claim(self, placement: Placement, request: _Request, *, computes: bool) -> tuple[SimulatedPod, PodClaim]:
        seat = self._seats[placement.facts.address]
        uncached = max(1.0, request.num_prompt_tokens - placement.cached_tokens)
        share = Share(
            tokens=request.num_prompt_tokens if computes else 0,
            work=float(prefill_work(uncached, placement.cached_tokens)) if computes else 0.0,
            blocks=int(uncached) // self.setting.hardware.block_size,
            context=0.0 if placement.candidates.leg is Leg.PREFILL else placement.candidates.context_tokens,
        )
        num_held = int(placement.cached_tokens) // self.setting.hardware.block_size
        expectation = self._index.expect(
            seat.facts.slot, request.turn.prompt, num_held, self.clock.now, _NO_LIMIT_S, arrives=not computes
        )
        return seat.pod, PodClaim(seat.load, share, expectation)

    def _add_pod(self, name: str, table: PodTable) -> None:
        hardware = self.setting.hardware
        pod = SimulatedPod(hardware, self.clock, self._on_change)
        load = PodLoad(table.step_times)
        facts = PodFacts(
            address=name,
            slot=self._index.join(hardware.num_blocks),
            connector="simulated",
            num_blocks=hardware.num_blocks,
            max_num_seqs=hardware.max_num_seqs,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            max_model_len=2**30,
        )
        seat = _PodSeat(pod, load, facts)
        self._seats[name] = self._seat_of[id(pod)] = seat
        self._index.apply(facts.slot, seat.sequence, b"", b"", is_snapshot=True)
        load.row = table.add(facts, load.current())
        self._report(seat)

    def _on_change(self, pod: SimulatedPod) -> None:
        seat = self._seat_of[id(pod)]
        if not seat.report_due:
            seat.report_due = True
            self.clock.after(_REPORT_S, lambda: self._report(seat))

    def _report(self, seat: _PodSeat) -> None:
        """What the pod says reaches the router a moment later; nothing of it changes meanwhile that matters."""
        seat.report_due = False
        pod = seat.pod
        stats = pods_pb2.PodStats(
            num_running=len(pod.running),
            num_waiting=len(pod.waiting),
            num_free_blocks=pod.cache.num_free,
            num_blocks=pod.hardware.num_blocks,
            num_queued_tokens=pod.num_queued_tokens,
            last_step_s=pod.last_step_s,
            last_step_tokens=pod.last_step_tokens,
        )
        stored, removed = pod.cache.take_events()
        self.clock.after(_MESSAGE_S, lambda: self._on_report(seat, stats, stored, removed))

    def _on_report(self, seat: _PodSeat, stats: pods_pb2.PodStats, stored: bytes, removed: bytes) -> None:
        seat.load.report(stats)
        if stored or removed:
            seat.sequence += 1
            assert self._index.apply(seat.facts.slot, seat.sequence, stored, removed)


class _Request:
    """One turn under way, and what its user sees."""

    def __init__(self, cluster: SimulatedCluster, session: Session, number: int) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self.session = session
        self._number = number
        self.turn: Turn = session.turns[number]
        self.num_prompt_tokens = len(self.turn.prompt) // HASH_BYTES * cluster.setting.hardware.block_size
        self.num_cached_tokens = 0
        self.is_done = False
        self.ttft_s = 0.0
        self.tpot_s = 0.0
        self._arrived = 0.0
        self._last = 0.0  # when the last token was seen
        self._decode_claim: PodClaim | None = None

    def arrive(self) -> None:
        """The user has asked."""
        self._arrived = self._clock.now
        self._cluster.requests.append(self)
        self._cluster.route(self)

    def sent_to_one(self, decode: SimulatedPod, claim: PodClaim) -> None:
        """A decode pod computes the prompt."""
        self._decode_claim = claim
        job = Job(self._whole, self.num_prompt_tokens, self.turn.num_output_tokens, handed_over=False, listener=self)
        self._clock.after(_MESSAGE_S, lambda: decode.submit(job))

    def sent_to_two(
        self, decode: SimulatedPod, decode_claim: PodClaim, prefill: SimulatedPod, prefill_claim: PodClaim
    ) -> None:
        """A prefill pod computes it."""
        self._decode_claim = decode_claim
        leg = _PrefillLeg(self, self._clock, decode, prefill_claim)
        job = Job(self._whole, self.num_prompt_tokens, 1, handed_over=False, listener=leg)
        self._clock.after(_MESSAGE_S, lambda: prefill.submit(job))

    def handed_over(self, decode: SimulatedPod, computed_s: float) -> None:
        """The prompt is computed: the first token goes to the user, the KV to the decode pod.

        `computed_s`: seconds in which KV was computed, and moved meanwhile.
        """
        self.on_tokens(1, 0.0)
        if self.turn.num_output_tokens == 1:
            self.on_end()
            return
        hardware, whole = self._cluster.setting.hardware, self._whole
        num_held = decode.cache.match(whole[: len(self.turn.prompt) // HASH_BYTES]) * hardware.block_size
        num_moved = self.num_prompt_tokens - num_held
        moving_s = num_moved * hardware.handoff_token_s
        last_chunk_s = min(num_moved, hardware.max_num_batched_tokens) * hardware.handoff_token_s
        handoff_s = hardware.handoff_s + max(moving_s - computed_s, last_chunk_s)
        self._cluster.learn(handoff=(handoff_s, num_moved))
        job = Job(whole, self.num_prompt_tokens, self.turn.num_output_tokens, handed_over=True, listener=self)
        self._clock.after(handoff_s, lambda: decode.submit(job))

    def on_scheduled(self, num_cached_tokens: int) -> None:
        """See Listener."""
        if not self.ttft_s:
            self.num_cached_tokens = num_cached_tokens

    def on_tokens(self, count: int, seconds_each: float) -> None:
        """See Listener."""
        now = self._clock.now + _MESSAGE_S
        gaps = self._cluster.gaps
        if not self.ttft_s:
            self.ttft_s = now - self._arrived
            assert self._decode_claim is not None
            self._decode_claim.prefilled(now)
        else:
            first = round(now - (count - 1) * seconds_each - self._last, 6)
            gaps[first] = gaps.get(first, 0) + 1
        if count > 1:
            each = round(seconds_each, 6)
            gaps[each] = gaps.get(each, 0) + count - 1
        self._last = now

    def on_end(self) -> None:
        """See Listener."""
        self.is_done = True
        num_output_tokens = self.turn.num_output_tokens
        if num_output_tokens > 1:
            self.tpot_s = (self._last - self._arrived - self.ttft_s) / (num_output_tokens - 1)
        assert self._decode_claim is not None
        self._decode_claim.release(self._clock.now)
        self._cluster.learn(answer=num_output_tokens)
        if self._number + 1 < len(self.session.turns):
            following = _Request(self._cluster, self.session, self._number + 1)
            self._clock.after(following.turn.wait_s, following.arrive)

    @property
    def _whole(self) -> list[bytes]:
        return split(self.turn.whole)


class _PrefillLeg:
    """What becomes of a prompt on a prefill pod."""

    def __init__(self, request: _Request, clock: Clock, decode: SimulatedPod, claim: PodClaim) -> None:
        self._request = request
        self._clock = clock
        self._decode = decode
        self._claim = claim
        self._scheduled_at = 0.0

    def on_scheduled(self, num_cached_tokens: int) -> None:
        """See Listener."""
        self._scheduled_at = self._clock.now
        self._request.num_cached_tokens = num_cached_tokens

    def on_tokens(self, count: int, seconds_each: float) -> None:
        """See Listener."""
        self._claim.prefilled(self._clock.now)
        self._request.handed_over(self._decode, self._clock.now - self._scheduled_at)

    def on_end(self) -> None:
        """See Listener."""
        self._claim.release(self._clock.now)
