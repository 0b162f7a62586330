"""The two legs of one attempt: what their pods are told, and how they are let go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from common.errors import ErrorCode, UnavailableError
from common.observability.tracing.context import Metadata
from common.pb import common_pb2, pods_pb2
from common.rpc.convert import sampling_to_pb
from common.types import SamplingParams
from router.dispatching.dispatcher import Route
from router.pods.load import PodClaim
from router.pods.pod import Pod
from router.pods.session import DecodeSession, DeltaSink
from router.requests.request import GenerationRequest
from router.tracing.spans import leg_context

_KV_FAILURE_POLICIES = {
    "recompute": common_pb2.KV_FAILURE_POLICY_RECOMPUTE,
    "fail": common_pb2.KV_FAILURE_POLICY_FAIL,
}
_POD_DEADLINE_SLACK_S = 5.0  # the router's deadline comes first; the pod's is for a router that is gone


class Known(NamedTuple):
    """The start of an attempt."""

    token_ids: Sequence[int]  # output tokens that need not be computed again
    sampling: SamplingParams  # of what is still wanted


class PrefillLeg(NamedTuple):
    """A Prefill call."""

    pod: Pod
    request: pods_pb2.PrefillRequest
    claim: PodClaim
    metadata: Metadata | None  # of the call


class DecodeLeg(NamedTuple):
    """A request on a decode pod's session."""

    pod: Pod
    session: DecodeSession
    request_id: str  # on the pod
    claim: PodClaim


class Legs:
    """The legs of one attempt. Opened together; closed together, unless they have ended."""

    def __init__(self, epoch: int, decode: DecodeLeg, prefill: PrefillLeg | None) -> None:
        self.epoch = epoch
        self.decode = decode
        self.prefill = prefill
        self.awaits_prefill = prefill is not None  # it has neither answered nor failed
        self._task: asyncio.Task[None] | None = None  # of the Prefill call

    def run_prefill(
        self,
        run: Callable[[Legs, PrefillLeg], Coroutine[Any, Any, None]],
        on_done: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """Have `run` make the Prefill call, if there is one to be made; `on_done` gets its task."""
        if (leg := self.prefill) is not None:
            self._task = asyncio.create_task(run(self, leg))
            self._task.add_done_callback(on_done)
            # Not in the task: one that is cancelled before its first step never runs.
            self._task.add_done_callback(lambda task: leg.claim.release(time.monotonic()))

    def tell_prefill_failed(self, code: ErrorCode) -> None:
        """Have the decode pod compute the prompt itself."""
        self.decode.session.prefill_failed(self.decode.request_id, self.epoch, code)

    def close(self) -> None:
        """End both on their pods. Idempotent; may be called by the prefill leg itself, which then goes on."""
        self.decode.session.abort(self.decode.request_id)
        self.decode.claim.release(time.monotonic())
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


def open_legs(
    request: GenerationRequest,
    known: Known,
    route: Route,
    transfer_id: str,
    epoch: int,
    sink: DeltaSink,
) -> Legs:
    """Submit to the decode pod, with what is known so far. The caller runs the prefill leg. Owns the route's claims:
    raises UnavailableError, with the claims released, if the decode pod was lost in this moment."""
    leg_id = f"{transfer_id}.{epoch}"  # a pod may still be aborting the attempt before
    engine_request = common_pb2.EngineRequest(
        request_id=leg_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=known.token_ids,
        sampling=sampling_to_pb(known.sampling),
        cache_salt=request.cache_salt,
        adapter=request.adapter_digest,
        extra_keys=[common_pb2.ExtraKey(**key._asdict()) for key in request.extra_keys],
        priority=request.priority,
        target_itl_ms=1000 * (request.terms.itl_slo_s or 0.0),
        tenant=request.terms.tenant.name,
        data_parallel_rank=route.decode_rank,
    )
    session = route.decode.session
    try:
        if session is None:
            raise UnavailableError("the decode pod was lost")
        session.submit(_submit(request, engine_request, route, transfer_id, epoch), sink)
    except BaseException:
        route.release(time.monotonic())
        raise
    decode = DecodeLeg(route.decode, session, leg_id, route.decode_claim)
    if route.prefill is None or route.prefill_claim is None:
        return Legs(epoch, decode, None)
    prefill = pods_pb2.PrefillRequest(request=engine_request, transfer_id=transfer_id, epoch=epoch)
    prefill.request.data_parallel_rank = route.prefill_rank
    trace = leg_context(request, epoch, "prefill")
    metadata = None if trace is None else trace.metadata
    return Legs(epoch, decode, PrefillLeg(route.prefill, prefill, route.prefill_claim, metadata))


def _submit(
    request: GenerationRequest, engine_request: common_pb2.EngineRequest, route: Route, transfer_id: str, epoch: int
) -> pods_pb2.Submit:
    remote_prefill = None
    if route.prefill is not None:
        remote_prefill = pods_pb2.RemotePrefill(
            transfer_id=transfer_id, epoch=epoch, prefill_address=route.prefill.address
        )
    trace = leg_context(request, epoch, "decode")
    return pods_pb2.Submit(
        request=engine_request,
        remote_prefill=remote_prefill,
        timeout_s=request.deadline - time.monotonic() + _POD_DEADLINE_SLACK_S,
        kv_failure_policy=_KV_FAILURE_POLICIES[request.kv_failure_policy],
        traceparent="" if trace is None else trace.traceparent,
        tracestate="" if trace is None else trace.state,
    )
