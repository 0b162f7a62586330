"""Sends requests to pods. The life of one request in the router:

1. A front (HTTP or gRPC) turns what the client sent into a Draft.                         gateway/
2. It is validated, tokenised once, its blocks are hashed once.                            requests/
3. It is dispatched, waits for its turn, or is refused with 429 or 503.                    serving/, admission/
4. A decode pod is chosen, and a prefill pod if a remote prefill pays and is possible.      Dispatcher.route
5. Both legs open at once: Submit on the decode pod's session, a Prefill call.             Generation
6. The first token to arrive, usually prefill's, goes to the client at once; decode brings the rest. Each index is
   accepted once, and a different token for it is never passed over in silence.
7. If prefill fails before there is a token, another prefill pod takes over. If there is none, the decode pod is told
   and computes the prompt itself, or ends the request with an error if its kv_failure_policy is fail: it alone knows
   what has come. If decode is lost, another decode pod gets the prompt and the output so far; seeds are positional,
   so the client sees no seam.                                                              Generation, Retries
8. Tokens become text; a stop string ends the request.                                     TextGeneration
9. The front streams; its going away ends both legs at once, as does the deadline.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

from common.errors import UnavailableError, quoted
from common.step_budget import prefill_work
from router.admission.limits import PREDICTION_MARGIN
from router.admission.room import NO_ROOM, Room, room_of
from router.admission.steering import within_limits
from router.dispatching.config import SurvivalConfig
from router.dispatching.migrations import MigrationLine
from router.metrics import GenerationMetrics, RouterMetrics
from router.placing.config import RoutingConfig
from router.placing.estimates import Estimates
from router.placing.planner import NO_PREFILL_POD, Placement, Plan, Planner, Query
from router.placing.policies import Leg
from router.pods.load import PodClaim, Share
from router.pods.model_pods import ModelFacts, ModelPods
from router.pods.pod import Pod
from router.requests.request import GenerationRequest

logger = logging.getLogger(__name__)


class Route(NamedTuple):
    """The pods of one dispatch, and the request's claims on them, which the owner of the route releases."""

    decode: Pod
    decode_claim: PodClaim
    prefill: Pod | None  # None: the decode pod prefills
    prefill_claim: PodClaim | None
    reason: str  # why it goes there
    decode_rank: int = 0  # of the pod's engines, the one that the request is for
    prefill_rank: int = 0

    def release(self, now: float) -> None:
        """Give both claims back."""
        self.decode_claim.release(now)
        if self.prefill_claim is not None:
            self.prefill_claim.release(now)


class Dispatcher:
    """Chooses the pods of each dispatch among those of a model, claims them, and gives each request its transfer id."""

    def __init__(
        self,
        pods: ModelPods,
        routing: RoutingConfig,
        survival: SurvivalConfig,
        metrics: GenerationMetrics,
        router_metrics: RouterMetrics,
    ) -> None:
        self.pods = pods
        self.survival = survival
        self.metrics = metrics
        self.estimates = Estimates()
        self.router_metrics = router_metrics
        self.migrations = MigrationLine(router_metrics.survival)
        self.planner = Planner(
            pods.prefill_table,
            pods.decode_table,
            pods.index,
            prefill_policy=routing.prefill_policy,
            decode_policy=routing.decode_policy,
            remote_prefill=routing.remote_prefill,
            min_remote_prefill_tokens=routing.min_remote_prefill_tokens,
            seed=secrets.randbits(32),
        )
        self._remote_wait_s = 0.0
        self._lacks_prefill = False  # whether the last plan that wanted a prefill pod found none
        self._router_id = secrets.token_hex(4)  # pods serve several routers
        self._numbers = count(1)

    @property
    def model_name(self) -> str:
        """The first name of the model."""
        return next(iter(self.pods.names), "")

    def name_of(self, request: GenerationRequest) -> str:
        """The name of the model in the request's timeline: its adapter's, if it has one."""
        return self.model_name if request.adapter is None else request.adapter.name

    @property
    def unavailable_reason(self) -> str:
        """Why no request can be dispatched now; empty: one can."""
        if not self.pods.can_serve:
            return self.pods.explain()
        return "" if self.planner.can_serve else NO_PREFILL_POD

    def room(self) -> Room:
        """Returns the room that the ready pods have now."""
        prefill, decode = self.pods.prefill_table.columns(), self.pods.decode_table.columns()
        if not self.planner.can_serve:
            return NO_ROOM
        computing = prefill if self.sends_prompts_away else decode
        return room_of(decode, computing)

    @property
    def sends_prompts_away(self) -> bool:
        """Whether there are prefill pods, and they are used."""
        return self.planner.remote_prefill != "never" and len(self.pods.prefill_table) > 0

    def new_transfer_id(self, request: GenerationRequest) -> str:
        """A name for the request on its pods, which no other request of any router has."""
        return f"{request.request_id}.{self._router_id}-{next(self._numbers)}"

    @contextmanager
    def expecting(self, remote_wait_s: float) -> Iterator[None]:
        """Lets plans that are made meanwhile expect so long a wait for a prefill pod, and none for a decode pod."""
        self._remote_wait_s = remote_wait_s
        try:
            yield
        finally:
            self._remote_wait_s = 0.0

    def plan(self, request: GenerationRequest, *, resumed: bool = False, avoid: Pod | None = None) -> Plan:
        """Plans the request's route as of now. Changes nothing.

        A resumed request has output already; `avoid` is used only if nothing else is ready. Raises UnavailableError if
        no decode pod is ready that has its adapter, or no prefill pod is and a remote prefill is a must.
        """
        model = self.pods.facts
        if model is None:
            raise UnavailableError(self.pods.explain())
        query = self._query(request, model, resumed=resumed, avoid=avoid)
        plan = self.planner.plan(query, time.monotonic())
        if plan is None:
            raise UnavailableError(self._explain(request))
        return within_limits(plan, request.terms, PREDICTION_MARGIN)

    def _explain(self, request: GenerationRequest) -> str:
        """Why there is no plan."""
        if not self.pods.can_serve:
            return self.pods.explain()
        if request.adapter is not None and not self.pods.can_compute(request.adapter.digest):
            return _no_adapter(request)
        return NO_PREFILL_POD

    def _query(self, request: GenerationRequest, model: ModelFacts, *, resumed: bool, avoid: Pod | None) -> Query:
        return Query(
            num_prompt_tokens=len(request.prompt_token_ids),
            block_hashes=request.block_hashes,
            block_size=model.block_size,
            expected_output_tokens=self.estimates.expected_output_tokens(request.sampling.max_tokens),
            handoff_token_s=self.estimates.handoff_token_s,
            session=request.terms.session,
            resumed=resumed,
            avoid="" if avoid is None else avoid.address,
            remote_wait_s=self._remote_wait_s,
            target_itl_s=request.terms.itl_slo_s or math.inf,
            adapter=request.adapter_digest,
        )

    def route(self, request: GenerationRequest, plan: Plan | None, *, resumed: bool, avoid: Pod | None) -> Route:
        """Claim the pods of `plan`, or make one. Raises as `plan` does."""
        return self._claim_both(plan or self.plan(request, resumed=resumed, avoid=avoid), request)

    @property
    def pooling_unavailable_reason(self) -> str:
        """Why no prompt can be pooled now; empty: one can."""
        return "" if self.pods.can_pool else self.pods.explain_pooling()

    def pooling_room(self) -> Room:
        """Returns the room that pods have for prompts that are pooled."""
        prefill = self.pods.prefill_table.columns()
        pods = prefill if len(prefill) else self.pods.decode_table.columns()
        return room_of(pods, pods)

    @property
    def pooled_tokens_at_once(self) -> int:
        """Tokens of one request's prompts that may be under way at once, of which pods keep room for others."""
        prefill = self.pods.prefill_table.columns()
        pods = prefill if len(prefill) else self.pods.decode_table.columns()
        return int(pods.max_num_batched_tokens.sum())

    def plan_pooling(self, request: GenerationRequest, failed: Collection[str] = ()) -> Plan:
        """Plans where the prompt is pooled as of now. Changes nothing. `failed`: see Planner. Raises UnavailableError
        if no pod takes it."""
        model = self.pods.facts
        if model is None:
            raise UnavailableError(self.pods.explain_pooling())
        query = self._query(request, model, resumed=False, avoid=None)
        plan = self.planner.plan_pooling(query, time.monotonic(), failed)
        if plan is None:
            lacks = request.adapter is not None and self.pods.can_pool
            raise UnavailableError(_no_adapter(request) if lacks else self.pods.explain_pooling())
        return plan

    def route_pooling(self, request: GenerationRequest, failed: Collection[str]) -> Route:
        """Plans, and claims the pod, which is the route's decode pod whatever its role. Raises as `plan_pooling`
        does."""
        plan = self.plan_pooling(request, failed)
        self.planner.note(plan)
        pod, claim = self._claim(plan.decode, request, computes=True)
        self.metrics.dispatched.labels("remote" if pod.role_name == "prefill" else "local", plan.reason).inc()
        return Route(pod, claim, None, None, plan.reason, plan.decode.facts.data_parallel_rank)

    def reroute(self, request: GenerationRequest, decode: Pod, failed: Collection[str]) -> Route | None:
        """Plan again, and claim the pods, with a prefill pod that is not among `failed` (addresses) and, if it is
        ready, with this decode pod. None: there is no other prefill pod."""
        model = self.pods.facts
        if model is None:
            return None
        query = self._query(request, model, resumed=False, avoid=None)
        plan = self.planner.plan_handoff(query, time.monotonic(), decode.address, failed)
        return None if plan is None else self._claim_both(plan, request)

    def has_room_besides(self, pod: Pod, num_tokens: int) -> bool:
        """Whether another decode pod has a slot, and blocks for so many tokens."""
        return any(
            other.info is not None
            and engine.load.current().num_requests < other.info.max_num_seqs
            and engine.load.current().free_blocks * other.info.block_size >= num_tokens
            for other in self.pods.ready_decode()
            for engine in other.engines
            if other is not pod
        )

    def _claim_both(self, plan: Plan, request: GenerationRequest) -> Route:
        self.planner.note(plan)
        self.metrics.dispatched.labels("local" if plan.prefill is None else "remote", plan.reason).inc()
        self._note_lack(plan)
        decode, decode_claim = self._claim(plan.decode, request, computes=plan.prefill is None)
        decode_rank = plan.decode.facts.data_parallel_rank
        if plan.prefill is None:
            return Route(decode, decode_claim, None, None, plan.reason, decode_rank)
        prefill, prefill_claim = self._claim(plan.prefill, request, computes=True)
        prefill_rank = plan.prefill.facts.data_parallel_rank
        return Route(decode, decode_claim, prefill, prefill_claim, plan.reason, decode_rank, prefill_rank)

    def _note_lack(self, plan: Plan) -> None:
        """Log changes only; requests are counted."""
        if plan.reason == "no_prefill_pod" and not self._lacks_prefill:
            self._lacks_prefill = True
            logger.info("no prefill pod is ready that fits a decode pod: decode pods compute the prompts")
        elif plan.prefill is not None and self._lacks_prefill:
            self._lacks_prefill = False
            logger.info("prompts go to prefill pods again")

    def _claim(self, placement: Placement, request: GenerationRequest, *, computes: bool) -> tuple[Pod, PodClaim]:
        now = time.monotonic()
        pods, facts = self.pods, placement.facts
        pod = pods.by_address[facts.address]
        num_prompt_tokens = len(request.prompt_token_ids)
        uncached = max(1.0, num_prompt_tokens - placement.cached_tokens)
        assert pods.facts is not None
        share = Share(
            tokens=num_prompt_tokens if computes else 0,
            work=float(prefill_work(uncached, placement.cached_tokens)) if computes else 0.0,
            blocks=-(-int(uncached) // pods.facts.block_size),
            context=0.0 if placement.candidates.leg is Leg.PREFILL else placement.candidates.context_tokens,
        )
        num_held = int(placement.cached_tokens) // pods.facts.block_size
        expectation = pods.index.expect(
            facts.slot, request.block_hashes, num_held, now, request.deadline - now, arrives=not computes
        )
        engine = pod.engines[facts.data_parallel_rank]
        return pod, PodClaim(engine.load, share, expectation, fed=engine.is_fed)


def _no_adapter(request: GenerationRequest) -> str:
    assert request.adapter is not None
    return f"no pod is ready that has the adapter {quoted(request.adapter.name)}"
