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

Generation owns the legs and decides. Output has what came and the front that waits for it; Retries, whether and when
it is tried again; Record, what is noted of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Sequence
from typing import Self

from common.errors import BatonError, DeadlineExceededError, ErrorCode, InvalidRequestError, UnavailableError
from common.pb import common_pb2, pods_pb2
from common.rpc.errors import error_from_pb
from common.types import FinishReason
from router.admission.goodput import Timing
from router.dispatching.attempts import ADAPTER_PARAM
from router.dispatching.dispatcher import Dispatcher, Route
from router.dispatching.kept import KnownChoice
from router.dispatching.legs import Legs, PrefillLeg, open_legs
from router.dispatching.output import Output
from router.dispatching.record import Record
from router.dispatching.retries import Retries
from router.dispatching.token_log import OutputDelta
from router.dispatching.validity import checked_report, invalid_end, invalid_tokens
from router.placing.planner import Plan
from router.pods.pod import Pod
from router.requests.request import STRUCTURED, GenerationRequest, SpeculationCounts
from router.timelines.timeline import Timeline

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
        self._dispatcher = dispatcher
        self._transfer_id = dispatcher.new_transfer_id(request)
        self._record = Record(request, dispatcher, self._transfer_id)
        self._output = Output(request)
        self._retries = Retries(dispatcher, request.adapter_digest)
        self._legs: Legs | None = None  # of the current attempt
        self._recovery: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stopped_by_front = False

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
        self._record.began()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()
        self._record.left(is_over=self.is_over)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[OutputDelta]:
        return self._output.next()

    @property
    def is_over(self) -> bool:
        """Finished or failed."""
        return self._output.is_over

    @property
    def timeline(self) -> Timeline:
        """The course of the generation."""
        return self._record.timeline

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a pod found in its prefix cache."""
        return self.timeline.num_cached_tokens

    @property
    def prompt_logprobs(self) -> Sequence[common_pb2.PositionLogprobs]:
        """Log probabilities of all prompt tokens but the first, if asked for. Complete with the first output."""
        return self._output.prompt_logprobs

    @property
    def timing(self) -> Timing:
        """The generation's times so far."""
        output, record = self._output, self._record
        is_served = output.finish_reason is not None and output.finish_reason is not FinishReason.ABORT
        return Timing(
            record.first_token_at, record.last_token_at, len(output), is_served, is_failed=output.error is not None
        )

    @property
    def speculation(self) -> SpeculationCounts:
        """Counts of drafts in the answer so far, with those from before it was resumed."""
        own, resumption = self.timeline.speculation, self.request.resumption
        return own if resumption is None else resumption.speculation.plus(*own)

    def known(self) -> KnownChoice:
        """All of it so far, for a client that resumes it."""
        reason = self._output.finish_reason
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
            self._output.error = error
            self._record.failed(error)
            self._close()
            self._output.wake()

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
        output = self._output
        is_invalid = delta.start_index > len(output.token_ids)
        if problem := output.problem_in(delta, self._vocab_size):
            self._on_disagreement(problem, is_invalid=True)
            return
        if delta.prompt_logprobs:
            output.take_prompt_logprobs(delta.prompt_start, delta.prompt_logprobs)
        if not self.timeline.has_report and delta.HasField("report"):
            report = checked_report(delta.report, len(self.request.prompt_token_ids))
            self._record.reported(report, now, self._decode_address)
        token_ids = delta.token_ids
        if token_ids and (conflict := self._accept(delta.start_index, token_ids, delta.logprobs, now)):
            self._on_disagreement(conflict, is_invalid=is_invalid)
            return
        if delta.num_verified_drafts:
            self.timeline.verified(delta.num_verified_drafts, delta.num_accepted_drafts)
        if self._has_lost_prompt:
            self._lose_prompt()
        elif delta.finish_reason:
            self._on_decode_end(delta, now)
        else:
            output.wake()

    def on_lost(self, error: BatonError) -> None:
        """See DeltaSink."""
        self._lose(UnavailableError("the decode pod was lost"), "pod_lost", error.message)

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
            if error.param == ADAPTER_PARAM:
                self._lose(UnavailableError("the decode pod has forgotten the adapter"), "adapter_missing")
            elif error.code not in _RETRIABLE:
                self.fail(error)
            elif error.param == _KV_FAILURE_PARAM:
                self._on_kv_failed(error)
            else:
                self._lose(error, error.code.label)
        elif reason is FinishReason.ABORT:  # not by us: an aborted request has no sink any more
            self._lose(UnavailableError("the decode pod ended the request"), "pod_aborted")
        else:
            self._finish(reason, now)

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
        problem = problem or await self._output.problem_in_prompt(response.prompt_logprobs, self._vocab_size)
        if response.finish_reason in (common_pb2.FINISH_REASON_ABORT, common_pb2.FINISH_REASON_ERROR):
            problem = problem or f"finish reason {response.finish_reason} with a token"
        if problem:
            error = UnavailableError(f"prefill pod {pod.address} sent an invalid answer: {problem}")
            pod.note_invalid(error, self.request)
            raise error

    def _on_prefill_failed(self, legs: Legs, leg: PrefillLeg, error: BatonError) -> None:
        self._record.prefill_failed(error, leg.pod.address)
        if legs is self._legs and isinstance(error, InvalidRequestError) and error.param == STRUCTURED:
            self.fail(error)  # the decode pod would find the same, after as long a time
            return
        may_retry = error.code in _RETRIABLE or error.param == ADAPTER_PARAM
        if legs is self._legs and not (may_retry and self._retry_prefill(legs, error.code.label)):
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
        if legs.prefill is None or self._output.known.token_ids or self._retries.attempts.exhausted:
            return False
        self._retries.failed_prefill_pods.add(legs.prefill.pod.address)
        began = time.monotonic()
        route = self._dispatcher.reroute(self.request, legs.decode.pod, self._retries.failed_prefill_pods)
        if route is None or route.prefill is None:
            return False
        self._record.prefill_retried(reason, route.prefill.address)
        self._close_legs()
        try:
            self._open(route, began)
        except UnavailableError as error:  # the decode pod was lost in this moment
            self._recover_from(error, None)
        return True

    def _on_prefill_response(self, pod: Pod, response: pods_pb2.PrefillResponse) -> None:
        now = time.monotonic()
        self._record.prefilled(response, now)
        self._output.take_prompt_logprobs(1, response.prompt_logprobs)
        logprobs = [response.logprobs] if response.HasField("logprobs") else []
        if conflict := self._accept(0, [response.first_token_id], logprobs, now):
            # Decode was first and goes on from its own token: the answer is consistent, the pods are not.
            self._record.prefill_disagreed(conflict, pod.address)
        elif response.finish_reason:
            self._finish(FinishReason(response.finish_reason), now)
        if self._output.held_end is not None:
            self._finish(self._output.held_end, now)
        self._output.wake()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._record.log(logging.ERROR, "%s: internal error", exc_info=error)
            self.fail(BatonError("internal error; the router's log has the details"))

    # --- output ---

    @property
    def _has_lost_prompt(self) -> bool:
        """Whether no pod will send log probabilities of the prompt any more: a pod has them before the first token."""
        if not self._output.lacks_prompt or not len(self._output):
            return False
        return self._legs is None or not self._legs.awaits_prefill

    def _lose_prompt(self) -> None:
        """The prompt must be computed again for its log probabilities, which were lost with the prefill leg."""
        self._output.held_end = None
        self._lose(UnavailableError("the log probabilities of the prompt were lost"), "prompt_logprobs_lost")

    def _accept(
        self,
        start: int,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        now: float,
    ) -> str:
        """Take tokens from output index `start` on, each index once. Returns what is wrong with them, or ""."""
        output = self._output
        num_before = len(output.token_ids)
        conflict = output.accept(start, token_ids, logprobs)
        if len(output.token_ids) > num_before:
            if self._record.progressed(num_before, output.num_new, now) and self._legs is not None:
                self._legs.decode.claim.prefilled(now)
            self._retries.progressed()
        return conflict

    def _finish(self, reason: FinishReason, now: float) -> None:
        if self._output.end(reason):
            self._record.finished(reason, len(self._output), self._output.num_new, now)
            self._close()
            self._output.wake()

    # --- dispatching ---

    def _dispatch(self, avoid: Pod | None = None) -> None:
        plan, self.plan = self.plan, None
        resumed = bool(self._output.known.token_ids)
        began = time.monotonic()
        self._open(self._dispatcher.route(self.request, plan, resumed=resumed, avoid=avoid), began)

    def _open(self, route: Route, began: float) -> None:
        """Open both legs at once. `began`: when the choice of their pods did."""
        epoch = self._retries.attempts.start()
        prefill = "" if route.prefill is None else route.prefill.address
        self.timeline.begin_attempt(epoch, route.decode.address, prefill, route.reason, began)
        self._legs = open_legs(self.request, self._output.known, route, self._transfer_id, epoch, self)
        self._legs.run_prefill(self._run_prefill, self._on_task_done)

    def _lose(self, error: BatonError, reason: str, detail: str = "") -> None:
        """The decode leg broke: drop it, and prefill's with it, and go on elsewhere. Clients may see the error, which
        must not name pods; the log has the pod's address and the `detail`."""
        self._record.lost(error, reason, detail, self._decode_address)
        pod = self._legs.decode.pod if self._legs is not None else None
        self._close_legs()  # now: nothing more of it may be accepted
        self._recover_from(error, pod)

    async def _move(self, pod: Pod) -> None:
        slot = await self._dispatcher.migrations.enter()
        num_tokens = len(self.request.prompt_token_ids) + len(self._output)
        if self._legs is None or not self._dispatcher.has_room_besides(pod, num_tokens):
            slot.release()
            return
        self._record.moved(pod.address)
        self._close_legs()
        self._retries.hold(slot)
        try:
            self._dispatch(avoid=pod)
        except UnavailableError as error:
            self._retries.release()
            self._recover_from(error, pod)

    def _recover_from(self, error: BatonError, pod: Pod | None) -> None:
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()  # it was in line to leave a pod that is lost by now
        self._recovery = asyncio.create_task(self._recover(error, pod))
        self._recovery.add_done_callback(self._on_task_done)

    async def _recover(self, error: BatonError, pod: Pod | None) -> None:
        """Go on with prompt and output so far on another decode pod, or on `pod` when it is back."""
        try:
            await self._retries.turn(error, pod, has_output=len(self._output) > 0)
            self._dispatch(avoid=pod)
        except BatonError as failure:
            self.fail(failure)

    def _close_legs(self) -> None:
        """End both legs on their pods. Idempotent."""
        legs, self._legs = self._legs, None
        if legs is not None:
            legs.close()
            self.timeline.end_attempt(time.monotonic())
        self._retries.release()

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
