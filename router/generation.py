"""One request under way: its two legs, its output, and what happens when a leg breaks.

All state changes in callbacks on the event loop (`on_delta`, `on_lost`, the end of the prefill call, the deadline
timer), none of which blocks. The front takes the output by iterating; what came since the last time is one merged
delta, so a slow client holds up nobody and memory is bounded by `max_tokens`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from common.errors import BatonError, DeadlineExceededError, ErrorCode, OverloadedError, UnavailableError
from common.pb import common_pb2, pods_pb2
from common.rpc.convert import sampling_to_pb
from common.rpc.errors import error_from_pb
from common.types import FinishReason
from router.pods import DecodeSession, Pod, PodClaim
from router.request import GenerationRequest

if TYPE_CHECKING:
    from router.dispatch import Dispatcher

logger = logging.getLogger(__name__)

_RETRIABLE = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED})
_KV_FAILURE_PARAM = "kv_failure_policy"  # in a pod's error: the KV did not come and may not be computed instead
_KV_FAILURE_POLICIES = {
    "recompute": common_pb2.KV_FAILURE_POLICY_RECOMPUTE,
    "fail": common_pb2.KV_FAILURE_POLICY_FAIL,
}
_POD_DEADLINE_SLACK_S = 5.0  # the router's deadline comes first; the pod's is for a router that is gone


class OutputDelta(NamedTuple):
    """What a request gained since the front last looked."""

    start_index: int  # output index of token_ids[0]
    token_ids: list[int]
    logprobs: list[common_pb2.PositionLogprobs]  # one per token if asked for, else empty
    finish_reason: FinishReason | None


class _DecodeLeg(NamedTuple):
    pod: Pod
    session: DecodeSession
    request_id: str  # on the pod
    claim: PodClaim


class _Loss(NamedTuple):
    error: BatonError  # why the decode leg broke
    pod: Pod | None


class Generation:
    """Iterate over it for OutputDelta; leave its context to end both legs, whatever their state.

    Iteration raises a BatonError if the request failed; deltas that came before are delivered first.
    """

    def __init__(self, request: GenerationRequest, dispatcher: Dispatcher, transfer_id: str) -> None:
        self.request = request
        self.num_cached_tokens = 0  # prompt tokens that a pod found in its prefix cache
        self._dispatcher = dispatcher
        self._metrics = dispatcher.metrics
        self._transfer_id = transfer_id

        self._attempt = 0  # dispatches so far; the epoch of the current transfer
        self._decode: _DecodeLeg | None = None
        self._prefill: asyncio.Task[None] | None = None
        self._loss: _Loss | None = None  # the decode leg broke; the next iteration re-dispatches

        self._token_ids: list[int] = []  # accepted, each index once
        self._logprobs: list[common_pb2.PositionLogprobs] = []  # of the tokens not taken yet
        self._num_taken = 0  # by the front
        self._finish_reason: FinishReason | None = None
        self._error: BatonError | None = None
        self._ended = False  # the front knows the end

        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._reported = False

    # --- for the front ---

    def __enter__(self) -> Self:
        """Dispatch. Raises UnavailableError if there is no pod for it."""
        timeout_s = self.request.deadline - time.monotonic()
        self._deadline = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self._on_deadline)
        try:
            self._dispatch()
        except BaseException:
            self._deadline.cancel()
            raise
        self._metrics.inflight.inc()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()
        self._metrics.inflight.dec()
        if self._finish_reason is None and self._error is None:
            self._metrics.errors.labels(ErrorCode.CANCELLED.label).inc()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        while True:
            if self._num_taken < len(self._token_ids):
                return self._take()
            if self._error is not None:
                raise self._error
            if self._finish_reason is not None:
                if self._ended:
                    raise StopAsyncIteration
                return self._take()
            if self._loss is not None:
                await self._redispatch(self._loss)
            else:
                await self._wait()

    def finish(self, reason: FinishReason) -> None:
        """The front needs no more: a stop string was found, or the client aborted."""
        if self._finish_reason is None and self._error is None:
            self._finish(reason, time.monotonic())

    def fail(self, error: BatonError) -> None:
        """End it with an error, unless it has ended."""
        if self._finish_reason is None and self._error is None:
            self._error = error
            level = logging.WARNING if error.code.value.http_status >= 500 else logging.INFO
            logger.log(level, "%s: failed: %s: %s", self._transfer_id, error.code.label, error.message)
            self._close()
            self._wake()

    # --- decode leg (DeltaSink) ---

    def on_delta(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        """See DeltaSink."""
        if not self._reported and delta.HasField("report"):
            self._note(delta.report)
        if delta.token_ids and (conflict := self._accept(delta.start_index, delta.token_ids, delta.logprobs, now)):
            self._lose(BatonError(f"decode pod {self._decode_address} disagrees: {conflict}"), "disagreement")
            return
        if delta.finish_reason:
            self._on_decode_end(delta, now)
        else:
            self._wake()

    def on_lost(self, error: BatonError) -> None:
        """See DeltaSink."""
        self._lose(UnavailableError(f"decode pod {self._decode_address} was lost: {error.message}"), "pod_lost")

    def _on_decode_end(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        reason = FinishReason(delta.finish_reason)
        if reason is FinishReason.ERROR:
            error = error_from_pb(delta.error)
            if error.code in _RETRIABLE and error.param != _KV_FAILURE_PARAM:
                self._lose(error, error.code.label)
            else:
                self.fail(error)
        elif reason is FinishReason.ABORT:  # not by us: an aborted request has no sink any more
            self._lose(UnavailableError(f"decode pod {self._decode_address} ended the request"), "pod_aborted")
        else:
            self._finish(reason, now)

    def _note(self, report: pods_pb2.DecodeReport) -> None:
        self._reported = True
        metrics = self._metrics
        self.num_cached_tokens = max(self.num_cached_tokens, report.num_cached_tokens)
        metrics.cached_tokens.inc(report.num_cached_tokens)
        metrics.external_tokens.inc(report.num_external_tokens)
        metrics.first_token_phase.labels("decode_queue").observe(report.queue_s)
        if report.num_external_tokens:
            self._dispatcher.estimates.handed_over(report.handoff_s, report.num_external_tokens)
            metrics.first_token_phase.labels("handoff").observe(report.handoff_s)
        if report.recompute_reason:
            metrics.recomputed.labels(report.recompute_reason).inc()
            logger.info("%s: the prompt was recomputed: %s", self._transfer_id, report.recompute_reason)

    # --- prefill leg ---

    async def _run_prefill(self, pod: Pod, request: pods_pb2.PrefillRequest, claim: PodClaim) -> None:
        try:
            response = await pod.prefill(request, self.request.deadline - time.monotonic())
        except BatonError as error:
            self._on_prefill_failed(pod, request.epoch, error)
        else:
            claim.prefilled(time.monotonic())
            self._on_prefill_response(pod, response)

    def _on_prefill_failed(self, pod: Pod, epoch: int, error: BatonError) -> None:
        self._metrics.prefill_failures.labels(error.code.label).inc()
        logger.warning("%s: prefill pod %s failed: %s", self._transfer_id, pod.address, error.message)
        if self._decode is not None:
            self._decode.session.prefill_failed(self._decode.request_id, epoch, error.code)

    def _on_prefill_response(self, pod: Pod, response: pods_pb2.PrefillResponse) -> None:
        now = time.monotonic()
        self.num_cached_tokens = max(self.num_cached_tokens, response.num_cached_tokens)
        self._metrics.cached_tokens.inc(response.num_cached_tokens)
        self._metrics.first_token_phase.labels("queue").observe(response.timing.queue_s)
        self._metrics.first_token_phase.labels("prefill").observe(response.timing.compute_s)
        logprobs = [response.logprobs] if response.HasField("logprobs") else []
        if conflict := self._accept(0, [response.first_token_id], logprobs, now):
            # Decode was first and goes on from its own token: the answer is consistent, the pods are not.
            self._metrics.token_mismatches.inc()
            logger.error("%s: prefill pod %s disagrees: %s", self._transfer_id, pod.address, conflict)
        elif response.finish_reason:
            self._finish(FinishReason(response.finish_reason), now)
        self._wake()

    def _on_prefill_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: the prefill leg failed unforeseen", self._transfer_id, exc_info=error)
            self.fail(BatonError("internal error; the router's log has the details"))

    # --- output ---

    def _accept(
        self,
        start: int,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        now: float,
    ) -> str:
        """Take tokens from output index `start` on, each index once. Returns what is wrong with them, or ""."""
        num_known = len(self._token_ids) - start  # of them, already accepted
        if num_known < 0:
            return f"it skipped from index {len(self._token_ids)} to {start}"
        if num_known:
            for index, token_id in enumerate(token_ids[:num_known], start):
                if token_id != self._token_ids[index]:
                    return f"token {token_id} at index {index}, accepted was {self._token_ids[index]}"
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
            if not token_ids:
                return ""
        if self._token_ids:
            self._metrics.inter_token_latency.observe(now - self._last_token_at)
        else:
            self._on_first_token(now)
        self._last_token_at = now
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        return ""

    def _on_first_token(self, now: float) -> None:
        self._first_token_at = now
        self._metrics.time_to_first_token.observe(now - self.request.arrived_at)
        if self._decode is not None:
            self._decode.claim.prefilled(now)

    def _take(self) -> OutputDelta:
        start, self._num_taken = self._num_taken, len(self._token_ids)
        logprobs, self._logprobs = self._logprobs, []
        self._ended = self._finish_reason is not None
        return OutputDelta(start, self._token_ids[start:], logprobs, self._finish_reason)

    def _finish(self, reason: FinishReason, now: float) -> None:
        self._finish_reason = reason
        self._close()
        metrics, num_tokens = self._metrics, len(self._token_ids)
        metrics.success.labels(reason.label).inc()
        metrics.generation_tokens.inc(num_tokens)
        metrics.output_length.observe(num_tokens)
        self._dispatcher.estimates.answered(num_tokens)
        metrics.e2e_latency.observe(now - self.request.arrived_at)
        if num_tokens > 1:
            metrics.time_per_output_token.observe((now - self._first_token_at) / (num_tokens - 1))
        self._wake()

    # --- dispatching ---

    def _dispatch(self, avoid: Pod | None = None) -> None:
        """Open both legs at once."""
        request = self.request
        route = self._dispatcher.route(request, resumed=bool(self._token_ids), avoid=avoid)
        self._attempt += 1
        leg_id = f"{self._transfer_id}.{self._attempt}"  # a pod may still be aborting the attempt before
        engine_request = common_pb2.EngineRequest(
            request_id=leg_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self._token_ids,
            sampling=sampling_to_pb(request.sampling),
            block_hashes=request.block_hashes,
            hash_block_size=request.hash_block_size,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        remote_prefill = None
        if route.prefill is not None:
            remote_prefill = pods_pb2.RemotePrefill(
                transfer_id=self._transfer_id, epoch=self._attempt, prefill_address=route.prefill.address
            )
        timeout_s = request.deadline - time.monotonic() + _POD_DEADLINE_SLACK_S
        submit = pods_pb2.Submit(
            request=engine_request,
            remote_prefill=remote_prefill,
            timeout_s=timeout_s,
            kv_failure_policy=_KV_FAILURE_POLICIES[request.kv_failure_policy],
        )
        session = route.decode.session
        try:
            if session is None:
                raise UnavailableError(f"decode pod {route.decode.address} is not connected")
            session.submit(submit, self)
        except BaseException:
            route.release(time.monotonic())
            raise
        self._decode = _DecodeLeg(route.decode, session, leg_id, route.decode_claim)
        if route.prefill is not None and route.prefill_claim is not None:
            prefill = pods_pb2.PrefillRequest(
                request=engine_request, transfer_id=self._transfer_id, epoch=self._attempt
            )
            claim = route.prefill_claim
            self._prefill = asyncio.create_task(self._run_prefill(route.prefill, prefill, claim))
            self._prefill.add_done_callback(self._on_prefill_task_done)
            # Not in the task: one that is cancelled before its first step never runs.
            self._prefill.add_done_callback(lambda task: claim.release(time.monotonic()))

    def _lose(self, error: BatonError, reason: str) -> None:
        """Drop the decode leg, and prefill's with it; what to do about it is up to the next iteration."""
        if reason == "disagreement":
            self._metrics.token_mismatches.inc()
            logger.error("%s: %s", self._transfer_id, error.message)
        else:
            logger.info("%s: %s", self._transfer_id, error.message)
        self._metrics.redispatched.labels(reason).inc()
        self._loss = _Loss(error, self._decode.pod if self._decode is not None else None)
        self._close_legs()  # now: nothing more of it may be accepted
        self._wake()

    async def _redispatch(self, loss: _Loss) -> None:
        """Go on with prompt and output so far on another decode pod, or on the same one when it is back."""
        self._loss = None
        config, cluster = self._dispatcher.config, self._dispatcher.cluster
        others = [pod for pod in cluster.ready_decode() if pod is not loss.pod]
        if self._attempt >= config.max_attempts or (isinstance(loss.error, OverloadedError) and not others):
            self.fail(loss.error)
        elif not await cluster.wait_until_ready(min(config.pod_wait_s, self.request.deadline - time.monotonic())):
            self.fail(UnavailableError(f"{loss.error.message}; {cluster.explain()}"))
        elif self._error is None and self._finish_reason is None:  # the deadline may have passed meanwhile
            try:
                self._dispatch(avoid=loss.pod)
            except BatonError as error:
                self.fail(error)

    def _close_legs(self) -> None:
        """End both legs on their pods. Idempotent."""
        leg, self._decode = self._decode, None
        if leg is not None:
            leg.session.abort(leg.request_id)
            leg.claim.release(time.monotonic())
        prefill, self._prefill = self._prefill, None
        if prefill is not None and prefill is not asyncio.current_task():
            prefill.cancel()

    def _close(self) -> None:
        self._close_legs()
        if self._deadline is not None:
            self._deadline.cancel()

    def _on_deadline(self) -> None:
        timeout_s = self.request.deadline - self.request.arrived_at
        self.fail(DeadlineExceededError(f"the request was not finished within {timeout_s:g} s"))

    @property
    def _decode_address(self) -> str:
        return self._decode.pod.address if self._decode is not None else "(none)"

    # --- waking the front ---

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
