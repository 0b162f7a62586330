"""Plans both legs of a request, without any connection. The simulator plans with it, too.

1. The prefix index says what every pod holds of the prompt. Of a request with a LoRA adapter only pods count that have
   it.
2. A decode pod is chosen to take the prompt over, and a prefill pod that fits it to compute the prompt.
3. A decode pod is chosen to do both.
4. `remote_prefill` auto: the prompt goes away, unless the first token would come from the decode pod in half the time,
   since it holds the conversation so far, or since the prefill pods are busy. Less is not worth it, as the pod that
   prefills keeps the prompt for the next one. And a decode pod on which others wait for tokens must keep its target
   ITL.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.placing.config import RemotePrefill
from router.placing.index import Held, PrefixIndex
from router.placing.policies import (
    Candidates,
    Judgement,
    Leg,
    PodColumns,
    PodFacts,
    PodTable,
    Policy,
    RequestFacts,
    create_policy,
)

NO_PREFILL_POD = "no prefill pod is ready that fits a decode pod, and remote_prefill is always"
_REMOTE_OVERHEAD_S = 0.002  # for one more pod to be asked
_CLEARLY_SOONER = 0.5  # of the time that it takes with a prefill pod
_CLEARLY_ABOVE = 1.01  # times a target, which a pod meets exactly where it can


class Query(NamedTuple):
    """The request's part of a decision, besides the pods."""

    num_prompt_tokens: int
    block_hashes: bytes
    block_size: int
    expected_output_tokens: float
    handoff_token_s: float
    session: str = ""
    resumed: bool = False  # it has output already: a prompt that is computed again
    avoid: str = ""  # address of a pod that is used only if nothing else is ready
    remote_wait_s: float = (
        0.0  # seconds in the router's queue before a prefill pod gets it, which a decode pod need not
    )
    target_itl_s: float = math.inf  # seconds between its tokens that prompts beside it must not exceed
    adapter: bytes = b""  # digest of the one that its pods must have; empty: none


class Placement(NamedTuple):
    """One leg: its candidates and which of them was chosen."""

    policy: Policy
    candidates: Candidates
    chosen: int  # its index

    @property
    def judgement(self) -> Judgement:
        """The policy's judgement of the candidates. For explanations: it is computed again."""
        return self.policy.judge(self.candidates)

    @property
    def facts(self) -> PodFacts:
        """The facts of the chosen pod."""
        return self.candidates.pods.facts[self.chosen]

    @property
    def cached_tokens(self) -> float:
        """Prompt tokens that it holds."""
        return float(self.candidates.cached_tokens[self.chosen])

    @property
    def ttft_s(self) -> float:
        """Predicted, of what happens on this pod."""
        return float(self.candidates.prediction.ttft_s[self.chosen])

    @property
    def itl_s(self) -> float:
        """Predicted, while prompts are computed there."""
        return float(self.candidates.prediction.itl_s[self.chosen])

    @property
    def num_requests(self) -> float:
        """The number of requests that the pod has already."""
        return float(self.candidates.pods.num_requests[self.chosen])


class Plan(NamedTuple):
    """A decision."""

    decode: Placement
    prefill: Placement | None  # None: the decode pod prefills
    reason: str  # metric label: why the prompt is computed there
    others: tuple[Placement, ...] = ()  # what was weighed against it


class Planner:
    """Owns the policies. `plan` changes nothing, so that it may be asked for an explanation; `note` what is done."""

    def __init__(
        self,
        prefill_table: PodTable,
        decode_table: PodTable,
        index: PrefixIndex,
        *,
        prefill_policy: str = "kv_aware",
        decode_policy: str = "kv_aware",
        remote_prefill: RemotePrefill = "auto",
        min_remote_prefill_tokens: int = 0,
        seed: int | None = None,
    ) -> None:
        """The tables and the index belong to the caller, who keeps them up to date. `seed` of the order in which equal
        pods take turns, see BestInTurn."""
        self._prefill_table = prefill_table
        self._decode_table = decode_table
        self._index = index
        self._prefill_policy = create_policy(prefill_policy, seed)
        self._decode_policy = create_policy(decode_policy, seed)
        self.remote_prefill = remote_prefill
        self._min_remote_prefill_tokens = min_remote_prefill_tokens

    @property
    def can_serve(self) -> bool:
        """Whether some pod, or pair of pods, can take a request."""
        decode = self._decode_table.columns()
        if self.remote_prefill != "always":
            return len(decode) > 0
        return bool(_with_partner(decode, self._prefill_table.columns()).any())

    def plan(self, query: Query, now: float) -> Plan | None:
        """None: no decode pod is ready that has the request's adapter, or no prefill pod is and a remote prefill is a
        must. `now`: of the index."""
        decode = self._decode_table.columns().for_adapter(query.adapter)
        if query.avoid:
            others = ~_among(decode, (query.avoid,))
            decode = decode.where(others) if others.any() else decode
        if not len(decode):
            return None
        held = self._index.match(query.block_hashes, now)
        if query.resumed:
            return self._local(query, decode, held, "resumed")
        if self.remote_prefill == "never":
            return self._local(query, decode, held, "colocated")
        remote = self._remote(query, decode, held, self._prefill_table.columns().for_adapter(query.adapter))
        if self.remote_prefill == "always":
            return remote
        if remote is None:
            return self._local(query, decode, held, "no_prefill_pod")
        if self.remote_prefill == "prefer":
            return remote
        return self._sooner(remote, self._local(query, decode, held, "lower_ttft"), query.remote_wait_s)

    def plan_handoff(self, query: Query, now: float, decode: str, failed: Collection[str]) -> Plan | None:
        """Plans for a request whose prefill pod failed: another one, which is not among `failed`, and the decode pod
        that the request has, if it is ready; all of them addresses. None: there is no other prefill pod."""
        pods = self._decode_table.columns().for_adapter(query.adapter)
        same = _among(pods, (decode,))
        prefill = self._prefill_table.columns().for_adapter(query.adapter)
        plan = self._remote(
            query,
            pods.where(same) if same.any() else pods,
            self._index.match(query.block_hashes, now),
            prefill.where(~_among(prefill, failed)),
        )
        return None if plan is None else plan._replace(reason="prefill_failed")

    def plan_pooling(self, query: Query, now: float, failed: Collection[str] = ()) -> Plan | None:
        """Plans for a prompt that is pooled: one pod, in the plan's place of the decode pod; a prefill pod, if one is
        ready. One of `failed`, addresses, only if there is no other. None: no pod takes such a prompt."""
        for policy, table in ((self._prefill_policy, self._prefill_table), (self._decode_policy, self._decode_table)):
            pods = table.columns().for_adapter(query.adapter)
            pods = pods.where(pods.max_model_len >= query.num_prompt_tokens)
            others = pods.where(~_among(pods, failed)) if failed and len(pods) else pods
            if len(others):
                placement = self._place(policy, query, Leg.PREFILL, others, self._index.match(query.block_hashes, now))
                assert placement is not None
                return Plan(placement, None, "pooling")
        return self.plan_pooling(query, now) if failed else None

    def note(self, plan: Plan) -> None:
        """The plan is being carried out."""
        plan.decode.policy.note(plan.decode.facts.slot)
        if plan.prefill is not None:
            plan.prefill.policy.note(plan.prefill.facts.slot)

    def _sooner(self, remote: Plan, local: Plan, remote_wait_s: float) -> Plan:
        """The better of the two."""
        here, there = local.decode, remote.prefill
        assert there is not None
        if here.candidates.request.num_prompt_tokens - here.cached_tokens < self._min_remote_prefill_tokens:
            return local._replace(reason="short_prompt", others=(remote.decode, there))
        if here.ttft_s > _CLEARLY_SOONER * (remote_wait_s + there.ttft_s + _REMOTE_OVERHEAD_S):
            return remote._replace(reason="lower_ttft", others=(here,))
        if here.itl_s > _CLEARLY_ABOVE * here.facts.target_itl_s and here.num_requests > 0:
            return remote._replace(reason="itl_target", others=(here,))
        return local._replace(others=(remote.decode, there))

    def _local(self, query: Query, decode: PodColumns, held: Held, reason: str) -> Plan:
        placement = self._place(self._decode_policy, query, Leg.WHOLE, decode, held)
        assert placement is not None
        return Plan(placement, None, reason)

    def _remote(self, query: Query, decode: PodColumns, held: Held, prefill: PodColumns) -> Plan | None:
        """None: no prefill pod can hand such a prompt over to a decode pod that is ready."""
        pods = prefill.where(prefill.max_model_len > query.num_prompt_tokens)
        taking = self._place(self._decode_policy, query, Leg.DECODE, decode.where(_with_partner(decode, pods)), held)
        if taking is None:
            return None
        connector = taking.candidates.pods.connectors[taking.chosen]
        giving = self._place(self._prefill_policy, query, Leg.PREFILL, pods.where(pods.connectors == connector), held)
        return None if giving is None else Plan(taking, giving, "planned")

    def _place(self, policy: Policy, query: Query, leg: Leg, pods: PodColumns, held: Held) -> Placement | None:
        if not len(pods):
            return None
        request = RequestFacts(
            num_prompt_tokens=query.num_prompt_tokens,
            block_size=query.block_size,
            expected_output_tokens=query.expected_output_tokens,
            handoff_token_s=query.handoff_token_s,
            session=query.session,
            target_itl_s=query.target_itl_s,
        )
        candidates = Candidates(request, leg, pods, held.arriving if leg is Leg.DECODE else held.computed)
        if len(pods) == 1:  # judging it would take a tenth of the time of a request
            return Placement(policy, candidates, 0)
        return Placement(policy, candidates, policy.pick(candidates, policy.judge(candidates)))


def _among(pods: PodColumns, addresses: Collection[str]) -> NDArray[np.bool_]:
    """Marks the pods that have one of the addresses."""
    return np.array([facts.address in addresses for facts in pods.facts], dtype=np.bool_)


def _with_partner(decode: PodColumns, prefill: PodColumns) -> NDArray[np.bool_]:
    """Marks the decode pods whose connector a prefill pod has; a pod without one has no partner."""
    offered = set(prefill.connectors.tolist()) - {0}
    if len(offered) == 1:  # as always but in a change from one to another
        same: NDArray[np.bool_] = decode.connectors == offered.pop()
        return same
    return np.isin(decode.connectors, list(offered))
