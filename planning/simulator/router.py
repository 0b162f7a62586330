"""A simulated router: real decisions, index and load accounting, over what simulated pods report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.engine.kv_cache import CacheChange
from common.pb import pods_pb2
from common.step_budget import MIN_PREFILL_TOKENS, prefill_work
from common.types import BlockHash
from planning.simulator.clock import Clock
from planning.simulator.hardware import Hardware
from planning.simulator.pod import SimulatedPod
from router.admission.config import AdmissionConfig
from router.admission.limits import PREDICTION_MARGIN, Limits
from router.admission.room import Room, room_of
from router.admission.steering import within_limits
from router.placing.estimates import Estimates
from router.placing.index import PrefixIndex
from router.placing.planner import Placement, Plan, Planner, Query
from router.placing.policies import Leg, PodFacts, PodTable
from router.pods.load import PodClaim, PodLoad, Share
from router.requests.terms import Terms

_NO_LIMIT_S = 3600.0
_MAX_INDEX_BLOCKS = 4_000_000


class Setting(NamedTuple):
    """How a cluster is set up."""

    hardware: Hardware
    num_prefill: int
    num_decode: int
    policy: str
    remote_prefill: str = "prefer"
    num_routers: int = 1
    admission: AdmissionConfig | None = None  # None: all that comes is sent to the pods at once
    limits: Limits = Limits(_NO_LIMIT_S)  # that each request names
    warm_up_s: float = 0.0  # requests that arrive before, and tokens that come before, are not in the outcome


class Sent(NamedTuple):
    """The pod of one leg of a request, and the leg's share of that pod's load."""

    pod: SimulatedPod
    claim: PodClaim


class Route(NamedTuple):
    """The pods of a request. Without a prefill leg the decode pod computes the prompt."""

    decode: Sent
    prefill: Sent | None


class _KnownPod:
    """The router's side of one simulated pod."""

    def __init__(self, pod: SimulatedPod, load: PodLoad, facts: PodFacts) -> None:
        self.pod = pod
        self.load = load
        self.facts = facts
        self.sequence = 1


class SimulatedRouter:
    """One of the routers that serve the same pods; it knows nothing of the others."""

    def __init__(self, setting: Setting, clock: Clock, pods: Sequence[SimulatedPod], seed: int) -> None:
        """`pods`: first those for prefill, then those for decode. `seed`: each router has its own."""
        self._hardware = setting.hardware
        self._clock = clock
        self._index = PrefixIndex(_MAX_INDEX_BLOCKS)
        self.estimates = Estimates()
        self._terms = Terms(ttft_slo_s=setting.limits.ttft_s, itl_slo_s=setting.limits.itl_s)
        prefill, decode = self._tables = PodTable(), PodTable()
        self.sends_prompts_away = setting.num_prefill > 0 and setting.remote_prefill != "never"
        self._pods_known = [self._seat(pod, prefill, f"p{n}") for n, pod in enumerate(pods[: setting.num_prefill])]
        self._pods_known += [self._seat(pod, decode, f"d{n}") for n, pod in enumerate(pods[setting.num_prefill :])]
        self._pod_at = {known.facts.address: known for known in self._pods_known}
        self._planner = Planner(
            prefill,
            decode,
            self._index,
            prefill_policy=setting.policy,
            decode_policy=setting.policy,
            remote_prefill=setting.remote_prefill if setting.num_prefill else "never",  # type: ignore[arg-type]
            seed=seed,
        )

    def query(self, num_prompt_tokens: int, hashes: Sequence[BlockHash], session: str) -> Query:
        """Returns the query for a prompt with these full blocks."""
        return Query(
            num_prompt_tokens=num_prompt_tokens,
            block_hashes=b"".join(hashes),
            block_size=self._hardware.block_size,
            expected_output_tokens=self.estimates.expected_output_tokens(4096),
            handoff_token_s=self.estimates.handoff_token_s,
            session=session,
        )

    def plan(self, query: Query) -> Plan:
        """Returns the plan for a query as of now."""
        plan = self._planner.plan(query, self._clock.now)
        assert plan is not None
        return within_limits(plan, self._terms, PREDICTION_MARGIN)

    def room(self) -> Room:
        """Returns the room that the pods have now."""
        prefill, decode = (table.columns() for table in self._tables)
        return room_of(decode, prefill if self.sends_prompts_away else decode)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when a pod's load changed."""
        for table in self._tables:
            table.on_change(listener)

    def route(self, query: Query) -> Route:
        """Decide and claim."""
        plan = self.plan(query)
        self._planner.note(plan)
        decode = self._claim(plan.decode, query, computes=plan.prefill is None)
        return Route(decode, None if plan.prefill is None else self._claim(plan.prefill, query, computes=True))

    def learn(self, *, answer: int = 0, handoff: tuple[float, int] | None = None) -> None:
        """Learns from a request that is over, or was handed over, as the router does."""
        if answer:
            self.estimates.answered(answer)
        if handoff is not None:
            self.estimates.handed_over(*handoff)

    def on_report(self, pod_number: int, stats: pods_pb2.PodStats, change: CacheChange) -> None:
        """Takes a pod's report on its load and its cache."""
        known = self._pods_known[pod_number]
        known.load.report(stats)
        if change.stored or change.removed:
            known.sequence += 1
            assert self._index.apply(known.facts.slot, known.sequence, change.stored, change.removed)

    def check(self) -> list[str]:
        """Returns a line for each thing that should be gone; none: all is well."""
        return self._index.check_integrity() + [
            f"claims on {known.facts.address} were not given back"
            for known in self._pods_known
            if (known.load.num_requests, known.load.num_tokens, known.load.work, known.load.num_blocks) != (0, 0, 0, 0)
        ]

    def check_index(self, prompt: Sequence[BlockHash]) -> list[str]:
        """Returns a line for each pod about which the index is wrong: how much of a prompt it holds."""
        indexed = self._index.match(b"".join(prompt), self._clock.now + _NO_LIMIT_S).computed
        return [
            f"{known.facts.address}: the index has {indexed[known.facts.slot]} blocks of a prompt"
            for known in self._pods_known
            if indexed[known.facts.slot] != known.pod.num_cached_blocks(prompt)
        ]

    def _claim(self, placement: Placement, query: Query, *, computes: bool) -> Sent:
        known = self._pod_at[placement.facts.address]
        uncached = max(1.0, query.num_prompt_tokens - placement.cached_tokens)
        share = Share(
            tokens=query.num_prompt_tokens if computes else 0,
            work=float(prefill_work(uncached, placement.cached_tokens)) if computes else 0.0,
            blocks=-(-int(uncached) // query.block_size),
            context=0.0 if placement.candidates.leg is Leg.PREFILL else placement.candidates.context_tokens,
        )
        num_held = int(placement.cached_tokens) // query.block_size
        expectation = self._index.expect(
            known.facts.slot, query.block_hashes, num_held, self._clock.now, _NO_LIMIT_S, arrives=not computes
        )
        return Sent(known.pod, PodClaim(known.load, share, expectation))

    def _seat(self, pod: SimulatedPod, table: PodTable, address: str) -> _KnownPod:
        hardware = self._hardware
        load = PodLoad(table.step_times)
        facts = PodFacts(
            address=address,
            slot=self._index.join(hardware.num_blocks),
            connector="simulated",
            num_blocks=hardware.num_blocks,
            max_num_seqs=hardware.max_num_seqs,
            max_num_batched_tokens=hardware.max_num_batched_tokens,
            max_model_len=2**30,
            target_itl_s=hardware.target_itl_s,
            min_prefill_tokens=MIN_PREFILL_TOKENS,
        )
        known = _KnownPod(pod, load, facts)
        self._index.apply(facts.slot, known.sequence, b"", b"", is_snapshot=True)
        load.row = table.add(facts, load.current())
        return known
