"""One router's stream to this pod: its requests live and die with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from common.errors import BatonError, ErrorCode, InvalidRequestError, UnavailableError
from common.observability.logging import fields
from common.pb import common_pb2, pods_pb2
from common.pod.convert import add_request_from_pb
from common.rpc.convert import finish_reason_to_pb
from common.rpc.errors import error_to_pb
from common.types import FinishReason
from decode_service.delta_buffer import DeltaBuffer
from decode_service.request import DecodeRequest, PodServices
from decode_service.tracing import traced

logger = logging.getLogger(__name__)


class RouterSession:
    """Owns the requests that its router has submitted."""

    def __init__(self, services: PodServices) -> None:
        self._services = services
        self._requests: dict[str, DecodeRequest] = {}
        self._deltas = DeltaBuffer(max_keys=2 * services.config.max_open)
        self.ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    async def run(
        self,
        commands: AsyncIterator[pods_pb2.DecodeCommand],
        write: Callable[[pods_pb2.DecodeEvents], Awaitable[None]],
    ) -> None:
        """Executes commands and sends deltas until the router disconnects or the session is closed, then ends all
        requests."""
        reading = asyncio.create_task(self._read(commands), name="session reader")
        writing = asyncio.create_task(self._deltas.write_to(write), name="session writer")
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            self._abort_all()
            self._deltas.close()
            await writing  # a write must not be cut short: gRPC would send no status after it
        finally:
            self._abort_all()
            await _end({reading, writing})
            self.ended.set()

    def close(self) -> None:
        """Fails the remaining requests, sends their errors and ends, as the pod is closing."""
        for request in list(self._requests.values()):
            request.fail(UnavailableError("the pod is closing"))
        self._deltas.close()

    async def _read(self, commands: AsyncIterator[pods_pb2.DecodeCommand]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "submit":
                    self._submit(command.submit)
                case "abort":
                    self._abort(command.abort)
                case "prefill_failed":
                    self._note_prefill_failed(command.prefill_failed)
            await self._deltas.wait_for_room()

    def _submit(self, submit: pods_pb2.Submit) -> None:
        request_id = submit.request.request_id
        try:
            if request_id in self._requests:
                raise InvalidRequestError(f"request {request_id} is running already", param="request_id")
            request = add_request_from_pb(submit.request, self._services.pod.spec)
            self._services.pod.admission.admit()
        except BatonError as error:
            self._refuse(request_id, error)
            return
        request = self._services.pod.requests.place(request)
        emit = traced(self._deltas.put, submit, self._services.pod.tracer)
        accepted = DecodeRequest(self._services, request, submit, emit=emit, on_end=self._forget)
        self._requests[request_id] = accepted
        accepted.start()

    def _refuse(self, request_id: str, error: BatonError) -> None:
        self._services.pod.metrics.request_failure.labels(error.code.label).inc()
        logger.info(
            "request %s refused: %s: %s",
            request_id,
            error.code.label,
            error.message,
            extra=fields(request_id=request_id),
        )
        delta = pods_pb2.TokenDelta(
            request_id=request_id, finish_reason=finish_reason_to_pb(FinishReason.ERROR), error=error_to_pb(error)
        )
        self._deltas.put(object(), delta)  # its own key, so that it does not merge with a running request of that id

    def _abort(self, command: pods_pb2.AbortCommand) -> None:
        request = self._requests.get(command.request_id)
        if request is not None:
            request.abort()

    def _note_prefill_failed(self, command: pods_pb2.PrefillFailed) -> None:
        request = self._requests.get(command.request_id)
        if request is not None:
            request.note_prefill_failed(command.epoch, _code(command.reason))

    def _forget(self, request: DecodeRequest) -> None:
        del self._requests[request.request_id]
        self._services.pod.admission.release()

    def _abort_all(self) -> None:
        if self._requests:
            logger.info("a router disconnected: aborting its %d requests", len(self._requests))
        for request in list(self._requests.values()):
            request.abort()


def _code(number: common_pb2.ErrorCode.ValueType) -> ErrorCode:
    return ErrorCode.from_number(number)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # raised by `run` already, or a consequence of it
