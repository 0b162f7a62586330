"""One prefill in the engine, from submission to the last saved block.

1. `start` submits it: a producer if a decode pod will fetch the KV, else a request for a single token.
2. The engine reports RequestStarted, KVSaved as chunks are saved, and the first token; saves may go on after it.
3. With the first token and all KV saved, the transfer is delivered. Any error before that fails it.

A direct connector needs a destination, which the engine gets once both legs are there and the consumer has reserved
blocks. If such a producer is cancelled, it stays until the engine reports the end of its saves: only then is nothing
written any more, and the transfer fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.engine.messages import (
    AddRequest,
    KVSaved,
    KVTransferParams,
    RequestOutput,
    RequestStarted,
    TransferTarget,
)
from common.errors import BatonError, EngineDeadError, RequestCancelledError, TransferError
from common.pod.context import PodContext
from common.pod.convert import error_of
from common.types import FinishReason, Logprobs, RequestId, SampledToken
from prefill_service.tracing import PrefillTrace
from prefill_service.transfers import Reservation, Transfer, TransferKey, TransferRegistry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The result of a prefill."""

    token: SampledToken
    finish_reason: FinishReason | None  # None: the generation goes on
    num_cached_tokens: int
    queue_s: float
    compute_s: float
    prompt_logprobs: Sequence[Logprobs] = ()  # if asked for, of each prompt token but the first


class Producer:
    """OutputSink of one prefill and ProducingLeg of its transfer. Submitted by `start`, ended by `cancel` or by the
    engine."""

    def __init__(
        self, pod: PodContext, transfers: TransferRegistry, request: AddRequest, trace: PrefillTrace | None = None
    ) -> None:
        self._pod = pod
        self._trace = trace
        self._transfers = transfers
        self._request = request
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._transfer: Transfer | None = None
        self._engine_id: RequestId | None = None
        self._submitted_at = time.monotonic()
        self._started: RequestStarted | None = None
        self._token: SampledToken | None = None
        self._prompt_logprobs: list[Logprobs] = []
        self._error: BatonError | None = None  # why it was cancelled
        self._saves_are_over = False  # the engine has ended its saves
        self.first_token: asyncio.Future[FirstToken] = asyncio.get_running_loop().create_future()

    def start(self, key: TransferKey | None) -> None:
        """Submits the prefill, as producer of the transfer `key` if one is given.

        Raises what `TransferRegistry.attach_producer` raises, and EngineDeadError; no state is left then.
        """
        request = self._request
        if key is None:
            max_tokens = len(request.output_token_ids) + 1
            request = msgspec.structs.replace(
                request, sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
            )
        else:
            self._transfer = self._transfers.attach_producer(key, self, request.data_parallel_rank or 0)
            params = KVTransferParams(transfer_id=key.transfer_id, epoch=key.epoch, role="producer")
            request = msgspec.structs.replace(request, transfer=params)
        try:
            self._engine_id = self._pod.requests.add(request, self)
        except BatonError as error:
            self.fail(error)
            raise
        if self._transfer is not None and self._transfer.reservation is not None:
            self.take_reservation(self._transfer.reservation)

    def cancel(self, error: BatonError) -> None:
        """Ends the prefill with `error`, whatever its state. Does nothing if it has ended."""
        if self._engine_id is None:
            self._end(error)
        elif self._may_write:
            self._error = self._error or error
            self._refuse_token(error)
            self._pod.requests.abort_and_listen(self._engine_id)
        else:
            self._pod.requests.abort(self._engine_id)
            self._end(error)

    def take_reservation(self, reservation: Reservation) -> None:
        """Lets the engine write, if the connector is a direct one."""
        if not self._may_write:
            return
        assert self._engine_id is not None
        assert self._transfer is not None
        target = TransferTarget(
            request_id=self._engine_id,
            epoch=self._transfer.key.epoch,
            address=reservation.address,
            num_held_tokens=reservation.num_held_tokens,
            block_ids=list(reservation.block_ids),
        )
        self._pod.requests.set_transfer_target(target)

    # -- OutputSink -------------------------------------------------------------------------------------------------

    def take_output(self, output: RequestOutput) -> None:
        """Handles an output of the engine."""
        for event in output.events:
            match event:
                case RequestStarted():
                    self._note_started(event)
                case KVSaved():
                    self._note_saved(event)
        self._prompt_logprobs += output.prompt_logprobs
        if output.tokens and self._token is None:
            self._note_first_token(output.tokens[0], output.finish_reason)
        if output.finish_reason is FinishReason.ERROR:
            self._on_failed(error_of(output))
        elif output.finish_reason is FinishReason.ABORT and not self._may_write:
            self._end(self._error or RequestCancelledError("the prefill was aborted"))
        elif output.finish_reason is FinishReason.ABORT:
            self._error = self._error or RequestCancelledError("the prefill was aborted")
        elif self._error is not None and not self._may_write:
            self._end(self._error)
        else:
            self._deliver_if_complete()

    def fail(self, error: BatonError) -> None:
        """Fails the token and the transfer, as the engine will send no more. A dead engine writes nothing."""
        self._end(error, is_quiescent=not self._may_write or isinstance(error, EngineDeadError))

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _may_write(self) -> bool:
        """Whether the engine writes into a consumer's blocks, or may begin to."""
        is_direct = self._transfer is not None and self._pod.spec.is_direct
        return is_direct and self._engine_id is not None and not self._saves_are_over

    def _on_failed(self, error: BatonError) -> None:
        """Handles a prefill that the engine rejected, or failed while it may still be writing."""
        if self._started is not None and self._may_write:
            self._error = self._error or error
            self._refuse_token(error)
        else:
            self._end(error)

    def _end(self, error: BatonError, *, is_quiescent: bool = True) -> None:
        self._forget(error.code.label)
        if self._transfer is not None:
            self._transfers.fail(self._transfer, error, is_quiescent=is_quiescent)
        self._refuse_token(error)

    def _refuse_token(self, error: BatonError) -> None:
        if not self.first_token.done():
            self.first_token.set_exception(error)
            self.first_token.exception()  # retrieved, even if no caller waits for it

    def _note_started(self, event: RequestStarted) -> None:
        self._started = event
        if self._trace is not None:
            self._trace.started(event.queue_s, event.num_cached_tokens)
        if self._transfer is not None:
            self._transfers.note_computing(self._transfer)

    def _note_saved(self, event: KVSaved) -> None:
        assert self._transfer is not None
        if self._trace is not None:
            self._trace.saved(event.num_tokens)
        self._transfers.note_ready(self._transfer, event.num_tokens, event.digests)
        self._saves_are_over = bool(event.failure) or event.num_tokens >= self._num_prompt_tokens
        if event.failure and self._error is None:  # the router still gets its first token
            self._transfers.fail(self._transfer, TransferError(f"KV could not be saved: {event.failure}"))

    def _note_first_token(self, token: SampledToken, finish_reason: FinishReason | None) -> None:
        self._token = token
        if self._trace is not None:
            self._trace.first_token()
        if self._transfer is not None:
            self._transfers.note_first_token(self._transfer)
        started = self._started or RequestStarted(queue_s=0.0, num_cached_tokens=0)
        elapsed = time.monotonic() - self._submitted_at
        goes_on = finish_reason is FinishReason.HANDOFF or self._was_cut_short(finish_reason)
        first = FirstToken(
            token=token,
            finish_reason=None if goes_on else finish_reason,
            num_cached_tokens=started.num_cached_tokens,
            queue_s=started.queue_s,
            compute_s=max(0.0, elapsed - started.queue_s),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
        if not self.first_token.done():
            self.first_token.set_result(first)

    def _was_cut_short(self, finish_reason: FinishReason | None) -> bool:
        """Whether the output ended at our own limit: without a transfer, the engine is asked for one token."""
        wanted = self._request.sampling.max_tokens - len(self._request.output_token_ids)
        return self._transfer is None and finish_reason is FinishReason.LENGTH and wanted > 1

    def _deliver_if_complete(self) -> None:
        if self._token is None:
            return
        if self._transfer is None or self._transfer.is_settled:
            self._forget()
        elif self._transfer.num_ready_tokens >= self._num_prompt_tokens:
            self._forget()
            self._transfers.deliver(self._transfer, self._token)

    def _forget(self, error: str = "") -> None:
        """Ends it here, with the label of an error or without."""
        if self._trace is not None:
            self._trace.end(error)
        if self._engine_id is not None:
            self._pod.requests.forget(self._engine_id)
