"""One request under way: its two legs, its output, and what happens when a leg breaks.

All state changes in callbacks on the event loop (`on_delta`, `on_lost`, the end of the prefill call, the deadline
timer), none of which blocks. The front takes the output by iterating; what came since the last time is one merged
delta, so a slow client delays no other and memory is bounded by `max_tokens`.

What breaks, and what follows:

    the prefill leg, before any token      another prefill pod, if one is ready; else the decode pod is told to compute
    the KV did not come and must not be    the same, as long as there is no token; else the request fails
    computed on the decode pod
    the decode leg                         `_recover`, a task of its own: in line with others, prompt and output so far
                                           go to another decode pod
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from typing import Self

import msgspec

from common.errors import (
    BatonError,
    DeadlineExceededError,
    ErrorCode,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from common.observability.logging import fields
from common.pb import common_pb2, pods_pb2
from common.rpc.errors import error_from_pb
from common.types import FinishReason
from router.admission.goodput import Timing
from router.dispatching.attempts import Attempts, Backoff
from router.dispatching.dispatcher import Dispatcher, Route
from router.dispatching.kept import KnownChoice
from router.dispatching.legs import Known, Legs, PrefillLeg, open_legs
from router.dispatching.migrations import MigrationSlot
from router.dispatching.token_log import OutputDelta, TokenLog
from router.dispatching.validity import (
    checked_report,
    checked_seconds,
    invalid_drafts,
    invalid_end,
    invalid_prompt_logprobs,
    invalid_tokens,
)
from router.fairness.turns import others_turn
from router.placing.planner import Plan
from router.pods import Pod
from router.requests.request import STRUCTURED, GenerationRequest, SpeculationCounts
from router.timelines.timeline import Timeline

logger = logging.getLogger(__name__)

_AT_ONCE = 256  # log probabilities of a prompt's tokens that are checked; takes a few milliseconds
_RETRIABLE = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED})
_KV_FAILURE_PARAM = "kv_failure_policy"  # in a pod's error: the KV did not come and may not be computed instead


class Generation:
    """Iterate over it for OutputDelta; leave its context to end both legs, whatever their state.

    Iteration raises a BatonError if the request failed; deltas that came before are delivered first.
    """

    def __init__(self, request: GenerationRequest, dispatcher: Dispatcher) -> None:
        """Dispatched when its context is entered."""
        self.request = request
        self.plan: Plan | None = None  # of the first attempt, if it is made already
        self.num_cached_tokens = 0  # prompt tokens that a pod found in its prefix cache
        self._dispatcher = dispatcher
        self._metrics = dispatcher.metrics
        self._router_metrics = dispatcher.router_metrics
        self._transfer_id = dispatcher.new_transfer_id(request)
        self._fields = fields(request_id=request.request_id)  # of its log lines
        self.timeline = Timeline(request, dispatcher.model_name)

        self._attempts = Attempts(dispatcher.survival.max_attempts)
        self._backoff = Backoff()
        self._legs: Legs | None = None  # of the current attempt
        self._failed_prefill_pods: set[str] = set()  # addresses
        self._recovery: asyncio.Task[None] | None = None
        self._slot: MigrationSlot | None = None  # held from a migration's start to its first token
        self._was_admitted = False  # a pod had it, or a token of it is known: it must not be refused any more

        resumption = request.resumption
        self._output = TokenLog(resumption.known_token_ids if resumption is not None else ())
        self._num_known = len(self._output)  # before it began
        wants_prompt = request.sampling.prompt_logprobs is not None
        self._num_prompt_logprobs = len(request.prompt_token_ids) - 1 if wants_prompt else 0  # that must come first
        self.prompt_logprobs: list[common_pb2.PositionLogprobs] = []  # complete with the first output; not of token 0
        self._held_end: FinishReason | None = None  # it ended on its pods, and these have not come yet
        self._finish_reason: FinishReason | None = resumption.finish_reason if resumption is not None else None
        self._stopped_by_front = False
        self._error: BatonError | None = None
        self._was_cut = False  # there was more than the front took at once
        self._ended = False  # the front knows the end

        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._reported = False

    # --- for the front ---

    def __enter__(self) -> Self:
        """Dispatch, unless it is known to have ended. Raises UnavailableError if there is no pod for it."""
        timeout_s = self.request.deadline - time.monotonic()
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._on_deadline)
        try:
            if not self.is_over:
                self._dispatch()
        except BaseException:
            self._deadline.cancel()
            raise
        self._metrics.inflight.inc()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()
        self._metrics.inflight.dec()
        if not self.is_over:
            self._router_metrics.errors.labels(ErrorCode.CANCELLED.label).inc()
            self.timeline.end(time.monotonic(), error=ErrorCode.CANCELLED.label)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        while True:
            if self._output.has_news and not self._lacks_prompt:
                if self._was_cut:
                    await others_turn(self.request.terms.tenant)
                return self._take()
            if self._error is not None:
                raise self._error
            if self._finish_reason is not None:
                if self._ended:
                    raise StopAsyncIteration
                return self._take()
            await self._wait()

    @property
    def is_over(self) -> bool:
        """Finished or failed."""
        return self._finish_reason is not None or self._error is not None

    @property
    def timing(self) -> Timing:
        """What is known of it so far."""
        is_served = self._finish_reason is not None and self._finish_reason is not FinishReason.ABORT
        return Timing(
            self._first_token_at, self._last_token_at, len(self._output), is_served, is_failed=self._error is not None
        )

    @property
    def speculation(self) -> SpeculationCounts:
        """Of the answer so far, before it was resumed, too."""
        own, resumption = self.timeline.speculation, self.request.resumption
        return own if resumption is None else resumption.speculation.plus(*own)

    def known(self) -> KnownChoice:
        """All of it so far, for a client that resumes it."""
        reason = self._finish_reason
        if self._stopped_by_front:  # the text said so, and will again: to the pods, the last token was like any other
            reason = FinishReason.LENGTH
        return KnownChoice(array("I", self._output.token_ids), reason, self.speculation)

    def finish(self, reason: FinishReason) -> None:
        """The front needs no more: a stop string was found, or the client aborted."""
        if not self.is_over:
            self._stopped_by_front = True
            self._finish(reason, time.monotonic())

    def fail(self, error: BatonError) -> None:
        """End it with an error, unless it has ended."""
        if not self.is_over:
            self._error = error
            text = "%s: failed: %s: %s"
            logger.log(_level_of(error), text, self._transfer_id, error.code.label, error.message, extra=self._fields)
            self.timeline.end(time.monotonic(), error=error.code.label)
            self._close()
            self._wake()

    def leave(self, pod: Pod) -> None:
        """Its decode pod drains: if it has begun, it goes on elsewhere when it is its turn, and here until then."""
        is_there = self._legs is not None and self._legs.decode.pod is pod
        if is_there and len(self._output) and (self._recovery is None or self._recovery.done()):
            self._recovery = asyncio.create_task(self._move(pod))
            self._recovery.add_done_callback(self._on_task_done)

    # --- decode leg (DeltaSink) ---

    @property
    def cause(self) -> GenerationRequest:
        """See DeltaSink."""
        return self.request

    def on_delta(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        """See DeltaSink."""
        is_invalid = delta.start_index > len(self._output)
        if problem := self._problem_in(delta):
            self._on_disagreement(problem, is_invalid=True)
            return
        if delta.prompt_logprobs:
            self._take_prompt_logprobs(delta.prompt_start, delta.prompt_logprobs)
        if not self.timeline.has_report and delta.HasField("report"):
            self._note(checked_report(delta.report, len(self.request.prompt_token_ids)), now)
        if delta.token_ids and (conflict := self._accept(delta.start_index, delta.token_ids, delta.logprobs, now)):
            self._on_disagreement(conflict, is_invalid=is_invalid)
            return
        if delta.num_verified_drafts:
            self.timeline.verified(delta.num_verified_drafts, delta.num_accepted_drafts)
        if self._has_lost_prompt:
            self._lose_prompt()
        elif delta.finish_reason:
            self._on_decode_end(delta, now)
        else:
            self._wake()

    def on_lost(self, error: BatonError) -> None:
        """See DeltaSink."""
        self._lose(UnavailableError("the decode pod was lost"), "pod_lost", error.message)

    def _problem_in(self, delta: pods_pb2.TokenDelta) -> str:
        start, sampling = delta.start_index, self.request.sampling
        problem = ""
        if delta.prompt_logprobs:
            num_prompt_tokens = len(self.request.prompt_token_ids)
            problem = invalid_prompt_logprobs(
                delta.prompt_start, delta.prompt_logprobs, num_prompt_tokens, sampling, self._vocab_size
            )
            if delta.prompt_start > len(self.prompt_logprobs) + 1:
                problem = problem or f"log probabilities from token {delta.prompt_start} of the prompt on"
        if not problem and (delta.token_ids or delta.logprobs):
            problem = invalid_tokens(start, delta.token_ids, delta.logprobs, sampling, self._vocab_size)
        if not problem:
            problem = invalid_drafts(delta.num_verified_drafts, delta.num_accepted_drafts, len(delta.token_ids))
        if not problem and delta.finish_reason:
            num_tokens = max(len(self._output), start + len(delta.token_ids))
            problem = invalid_end(delta.finish_reason, num_tokens, sampling.max_tokens)
        return problem

    def _on_disagreement(self, conflict: str, *, is_invalid: bool) -> None:
        """The decode pod's tokens are not those that are known, or cannot be anybody's."""
        error = BatonError(f"the decode pod disagrees: {conflict}")
        if self._legs is not None and is_invalid:
            self._legs.decode.pod.note_invalid(error, self.request)
        elif self._legs is not None:
            self._legs.decode.pod.note_disagreement(error, self.request)
        self._lose(error, "disagreement")

    def _on_decode_end(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        reason = FinishReason(delta.finish_reason)
        if reason is FinishReason.ERROR:
            error = error_from_pb(delta.error)
            if error.code not in _RETRIABLE:
                self.fail(error)
            elif error.param == _KV_FAILURE_PARAM:
                self._on_kv_failed(error)
            else:
                self._lose(error, error.code.label)
        elif reason is FinishReason.ABORT:  # not by us: an aborted request has no sink any more
            self._lose(UnavailableError("the decode pod ended the request"), "pod_aborted")
        else:
            self._finish(reason, now)

    def _note(self, report: pods_pb2.DecodeReport, now: float) -> None:
        """Takes what the decode pod of this attempt reports. The first report of all is counted."""
        metrics = self._metrics
        if report.recompute_reason:
            report.recompute_reason = self._router_metrics.recompute_reasons.value_of(report.recompute_reason)
            self.timeline.event("recompute", report.recompute_reason, self._decode_address)
        self.timeline.reported(report, now)
        if self._reported:
            return
        self._reported = True
        self.num_cached_tokens = max(self.num_cached_tokens, report.num_cached_tokens)
        self.timeline.num_cached_tokens = self.num_cached_tokens
        metrics.cached_tokens.inc(report.num_cached_tokens)
        metrics.external_tokens.inc(report.num_external_tokens)
        metrics.first_token_phase.labels("decode_queue").observe(report.queue_s)
        if report.num_external_tokens:
            self._dispatcher.estimates.handed_over(report.handoff_s, report.num_external_tokens)
            metrics.first_token_phase.labels("handoff").observe(report.handoff_s)
        if report.recompute_reason:
            metrics.recomputed.labels(report.recompute_reason).inc()
            logger.info(
                "%s: the prompt was recomputed: %s", self._transfer_id, report.recompute_reason, extra=self._fields
            )

    # --- prefill leg ---

    async def _run_prefill(self, legs: Legs, leg: PrefillLeg) -> None:
        try:
            timeout_s = self.request.deadline - time.monotonic()
            response = await leg.pod.prefill(leg.request, timeout_s, self.request, leg.metadata)
            await self._check_prefill(leg.pod, response)
        except BatonError as error:
            legs.awaits_prefill = False
            self._on_prefill_failed(legs, leg, error)
        else:
            legs.awaits_prefill = False
            leg.claim.prefilled(time.monotonic())
            self._on_prefill_response(leg.pod, response)

    async def _check_prefill(self, pod: Pod, response: pods_pb2.PrefillResponse) -> None:
        """Raises UnavailableError for an invalid answer."""
        sampling = self.request.sampling
        logprobs = [response.logprobs] if response.HasField("logprobs") else []
        problem = invalid_tokens(0, [response.first_token_id], logprobs, sampling, self._vocab_size)
        problem = problem or invalid_end(response.finish_reason, 1, sampling.max_tokens)
        problem = problem or await self._problem_in_prompt(response.prompt_logprobs)
        if response.finish_reason in (common_pb2.FINISH_REASON_ABORT, common_pb2.FINISH_REASON_ERROR):
            problem = problem or f"finish reason {response.finish_reason} with a token"
        if problem:
            error = UnavailableError(f"prefill pod {pod.address} sent an invalid answer: {problem}")
            pod.note_invalid(error, self.request)
            raise error

    async def _problem_in_prompt(self, found: Sequence[common_pb2.PositionLogprobs]) -> str:
        """What is invalid about a prefill pod's log probabilities of the prompt, if they are wanted; empty: nothing.
        They may be very many, so others have their turn in between."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        if not self._lacks_prompt:
            return ""
        if len(found) != self._num_prompt_logprobs:
            return f"{len(found)} log probabilities of a prompt of {num_prompt_tokens} tokens"
        for start in range(0, len(found), _AT_ONCE):
            await others_turn(self.request.terms.tenant)
            part = found[start : start + _AT_ONCE]
            problem = invalid_prompt_logprobs(
                start + 1, part, num_prompt_tokens, self.request.sampling, self._vocab_size
            )
            if problem:
                return problem
        return ""

    def _on_prefill_failed(self, legs: Legs, leg: PrefillLeg, error: BatonError) -> None:
        self._router_metrics.prefill_failures.labels(error.code.label).inc()
        text = "%s: prefill pod %s failed: %s"
        logger.log(_level_of(error), text, self._transfer_id, leg.pod.address, error.message, extra=self._fields)
        self.timeline.event("prefill_failed", error.code.label, leg.pod.address)
        if legs is self._legs and isinstance(error, InvalidRequestError) and error.param == STRUCTURED:
            self.fail(error)  # the decode pod would find the same, after as long a time
            return
        if legs is self._legs and not (error.code in _RETRIABLE and self._retry_prefill(legs, error.code.label)):
            legs.tell_prefill_failed(error.code)
            if self._has_lost_prompt:
                self._lose_prompt()

    def _on_kv_failed(self, error: BatonError) -> None:
        """The decode pod may not compute what the handoff did not bring, and has given up."""
        if self._legs is None or not self._retry_prefill(self._legs, "kv_failed"):
            self.fail(error)

    def _retry_prefill(self, legs: Legs, reason: str) -> bool:
        """Begin a new attempt with another prefill pod. The decode pod stays the same if it can: what it has computed
        or got by now is in its prefix cache. False: nothing was changed; there is a token already, which prefill
        cannot give any more, or no pod, or no attempt left."""
        if legs.prefill is None or self._known.token_ids or self._attempts.exhausted:
            return False
        self._failed_prefill_pods.add(legs.prefill.pod.address)
        began = time.monotonic()
        route = self._dispatcher.reroute(self.request, legs.decode.pod, self._failed_prefill_pods)
        if route is None or route.prefill is None:
            return False
        self._router_metrics.survival.prefill_retries.labels(reason).inc()
        logger.info(
            "%s: goes to prefill pod %s instead: %s",
            self._transfer_id,
            route.prefill.address,
            reason,
            extra=self._fields,
        )
        self.timeline.event("prefill_retry", reason, route.prefill.address)
        self._close_legs()
        try:
            self._open(route, began)
        except UnavailableError as error:  # the decode pod was lost in this moment
            self._recover_from(error, None)
        return True

    def _on_prefill_response(self, pod: Pod, response: pods_pb2.PrefillResponse) -> None:
        now = time.monotonic()
        num_cached = min(response.num_cached_tokens, len(self.request.prompt_token_ids))
        self.num_cached_tokens = max(self.num_cached_tokens, num_cached)
        self.timeline.num_cached_tokens = self.num_cached_tokens
        self._metrics.cached_tokens.inc(num_cached)
        queue_s, compute_s = checked_seconds(response.timing.queue_s), checked_seconds(response.timing.compute_s)
        self._metrics.first_token_phase.labels("queue").observe(queue_s)
        self._metrics.first_token_phase.labels("prefill").observe(compute_s)
        self.timeline.prefilled(queue_s, compute_s, now)
        self._take_prompt_logprobs(1, response.prompt_logprobs)
        logprobs = [response.logprobs] if response.HasField("logprobs") else []
        if conflict := self._accept(0, [response.first_token_id], logprobs, now):
            # Decode was first and goes on from its own token: the answer is consistent, the pods are not.
            self._router_metrics.token_mismatches.inc()
            logger.error(
                "%s: prefill pod %s disagrees: %s", self._transfer_id, pod.address, conflict, extra=self._fields
            )
        elif response.finish_reason:
            self._finish(FinishReason(response.finish_reason), now)
        if self._held_end is not None:
            self._finish(self._held_end, now)
        self._wake()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: internal error", self._transfer_id, exc_info=error, extra=self._fields)
            self.fail(BatonError("internal error; the router's log has the details"))

    # --- output ---

    @property
    def _lacks_prompt(self) -> bool:
        """Whether log probabilities of the prompt are still to come. No output is told before."""
        return len(self.prompt_logprobs) < self._num_prompt_logprobs

    @property
    def _has_lost_prompt(self) -> bool:
        """Whether no pod will send those of the prompt any more: a pod has them before the first token."""
        awaits_prefill = self._legs is not None and self._legs.awaits_prefill
        return self._lacks_prompt and len(self._output) > 0 and not awaits_prefill

    def _lose_prompt(self) -> None:
        """The prompt must be computed again for its log probabilities, which were lost with the prefill leg."""
        self._held_end = None
        self._lose(UnavailableError("the log probabilities of the prompt were lost"), "prompt_logprobs_lost")

    def _take_prompt_logprobs(self, start: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        """Take those of prompt tokens from index `start` on, each once."""
        if self._lacks_prompt:
            self.prompt_logprobs.extend(logprobs[len(self.prompt_logprobs) + 1 - start :])

    @property
    def _known(self) -> Known:
        """What the next attempt begins with. Where the prompt is computed again for its log probabilities, the output
        is, too; each token is compared with what is known."""
        if self._lacks_prompt:
            return Known((), self.request.sampling)
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Known(self._output.token_ids, sampling)

    def _accept(
        self,
        start: int,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        now: float,
    ) -> str:
        """Take tokens from output index `start` on, each index once. Returns what is wrong with them, or ""."""
        num_before = len(self._output)
        conflict = self._output.accept(start, token_ids, logprobs)
        if len(self._output) > num_before:
            self._progress(num_before, now)
        return conflict

    def _progress(self, index: int, now: float) -> None:
        """Tokens came, from output index `index` on."""
        if self._first_token_at:
            gaps = self._metrics.inter_token_latency
            self.timeline.gap(gaps.observe(now - self._last_token_at), gaps.num_buckets, index, now)
        else:
            self._first_token_at = now
            self.timeline.first_token(now)
            self._metrics.time_to_first_token.observe(now - self.request.arrived_at)
            if self._legs is not None:
                self._legs.decode.claim.prefilled(now)
        self._last_token_at = now
        self.timeline.num_output_tokens = len(self._output) - self._num_known
        self._attempts.progressed()
        if self._slot is not None:
            self._release_slot()
            self._backoff.reset()

    def _take(self) -> OutputDelta:
        delta = self._output.take(self._finish_reason)
        self._was_cut = self._output.has_news
        self._ended = delta.finish_reason is not None
        return delta

    def _finish(self, reason: FinishReason, now: float) -> None:
        if self._lacks_prompt and reason is not FinishReason.ABORT:
            self._held_end = reason
            return
        self._finish_reason = reason
        self.timeline.end(now, finish_reason=reason.label)
        self._close()
        metrics, num_tokens = self._metrics, len(self._output) - self._num_known
        metrics.success.labels(reason.label).inc()
        metrics.generation_tokens.inc(num_tokens)
        metrics.output_length.observe(num_tokens)
        self._dispatcher.estimates.answered(len(self._output))
        metrics.e2e_latency.observe(now - self.request.arrived_at)
        if num_tokens:
            metrics.decode_time.observe(now - self._first_token_at)
        if num_tokens > 1:
            metrics.time_per_output_token.observe((now - self._first_token_at) / (num_tokens - 1))
        self._wake()

    # --- dispatching ---

    def _dispatch(self, avoid: Pod | None = None) -> None:
        plan, self.plan = self.plan, None
        resumed = bool(self._known.token_ids)
        began = time.monotonic()
        self._open(self._dispatcher.route(self.request, plan, resumed=resumed, avoid=avoid), began)

    def _open(self, route: Route, began: float) -> None:
        """Open both legs at once. `began`: when the choice of their pods did."""
        epoch = self._attempts.start()
        prefill = "" if route.prefill is None else route.prefill.address
        self.timeline.begin_attempt(epoch, route.decode.address, prefill, route.reason, began)
        self._legs = open_legs(self.request, self._known, route, self._transfer_id, epoch, self)
        self._legs.run_prefill(self._run_prefill, self._on_task_done)

    def _lose(self, error: BatonError, reason: str, detail: str = "") -> None:
        """The decode leg broke: drop it, and prefill's with it, and go on elsewhere. Clients may see the error, which
        must not name pods; the log has the pod's address and the `detail`."""
        problem = f"{error.message}: {detail}" if detail else error.message
        level = logging.INFO
        if reason == "disagreement":
            self._router_metrics.token_mismatches.inc()
            level = logging.ERROR
        logger.log(level, "%s: decode pod %s: %s", self._transfer_id, self._decode_address, problem, extra=self._fields)
        self._router_metrics.survival.redispatched.labels(reason).inc()
        self.timeline.event("redispatch", reason, self._decode_address)
        pod = self._legs.decode.pod if self._legs is not None else None
        self._close_legs()  # now: nothing more of it may be accepted
        self._recover_from(error, pod)

    async def _move(self, pod: Pod) -> None:
        slot = await self._dispatcher.migrations.enter()
        num_tokens = len(self.request.prompt_token_ids) + len(self._output)
        if self._legs is None or not self._dispatcher.has_room_besides(pod, num_tokens):
            slot.release()
            return
        logger.info("%s: leaves decode pod %s, which drains", self._transfer_id, pod.address, extra=self._fields)
        self._router_metrics.survival.redispatched.labels("drain").inc()
        self.timeline.event("redispatch", "drain", pod.address)
        self._close_legs()
        self._slot, self._was_admitted = slot, True
        try:
            self._dispatch(avoid=pod)
        except UnavailableError as error:
            self._release_slot()
            self._recover_from(error, pod)

    def _recover_from(self, error: BatonError, pod: Pod | None) -> None:
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()  # it was in line to leave a pod that is lost by now
        self._recovery = asyncio.create_task(self._recover(error, pod))
        self._recovery.add_done_callback(self._on_task_done)

    async def _recover(self, error: BatonError, pod: Pod | None) -> None:
        """Go on with prompt and output so far on another decode pod, or on `pod` when it is back."""
        if isinstance(error, OverloadedError):
            if not await self._may_try_elsewhere(pod):
                self.fail(error)
                return
        else:
            self._was_admitted = True
        if self._attempts.exhausted:
            self.fail(error)
            return
        try:
            await self._turn(error)
            self._dispatch(avoid=pod)
        except BatonError as failure:
            self.fail(failure)

    async def _may_try_elsewhere(self, full: Pod | None) -> bool:
        """The pod had no room. A request that no pod has had may be refused, if there is no other to ask; any other
        request waits for its turn."""
        if not (self._was_admitted or len(self._output)):
            return any(pod is not full for pod in self._dispatcher.pods.ready_decode())
        self._attempts.refused()
        await asyncio.sleep(self._backoff.next())
        return True

    async def _turn(self, error: BatonError) -> None:
        """Wait for a decode pod, and for those who are before us. Raises UnavailableError if no pod comes."""
        pods, pod_wait_s = self._dispatcher.pods, self._dispatcher.survival.pod_wait_s
        while True:
            if not await pods.wait_until_ready(pod_wait_s):
                raise UnavailableError(f"{error.message}; {pods.explain()}")
            if not self._was_admitted:
                return  # no pod has computed anything of it yet
            self._slot = await self._dispatcher.migrations.enter()
            if pods.can_serve:
                return
            self._release_slot()

    def _close_legs(self) -> None:
        """End both legs on their pods. Idempotent."""
        legs, self._legs = self._legs, None
        if legs is not None:
            legs.close()
            self.timeline.end_attempt(time.monotonic())
        self._release_slot()

    def _release_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()

    def _close(self) -> None:
        self._close_legs()
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()
        if self._deadline is not None:
            self._deadline.cancel()

    def _on_deadline(self) -> None:
        timeout_s = self.request.deadline - self.request.arrived_at
        self.fail(DeadlineExceededError(f"the request was not finished within {timeout_s:g} s"))

    @property
    def _vocab_size(self) -> int:
        model = self._dispatcher.pods.facts
        return 0 if model is None else model.vocab_size

    @property
    def _decode_address(self) -> str:
        return self._legs.decode.pod.address if self._legs is not None else "(none)"

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


def _level_of(error: BatonError) -> int:
    """A warning if it is not the client's fault."""
    return logging.WARNING if error.code.value.http_status >= 500 else logging.INFO
