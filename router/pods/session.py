"""The one long-lived Decode.Session stream to a decode pod: commands out, deltas in, both for many requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

import grpc

from common.errors import BatonError, ErrorCode, UnavailableError
from common.observability.logging import fields
from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from common.rpc.errors import from_rpc_error
from router.pods.suspicion import Cause

logger = logging.getLogger(__name__)


_AT_ONCE = 256  # tokens of a prompt whose log probabilities a sink gets at once; takes a few milliseconds


class DeltaSink(Protocol):
    """The request side of a decode leg. Called on the event loop; must not block."""

    @property
    def cause(self) -> Cause | None:
        """The client's request; None: a canary."""

    def on_delta(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        """Events of the pod, in order. `now` is time.monotonic() of their arrival."""

    def on_lost(self, error: BatonError) -> None:
        """Nothing more will come: the session broke, or the sink itself raised."""


class DecodeSession:
    """Multiplexes requests over one stream. Owned by the Pod, for one connection.

    The queue of commands is bounded by construction: a request puts at most three on it, and requests are admitted.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        on_broken: Callable[[], None],
        on_end: Callable[[pods_pb2.TokenDelta, DeltaSink], None],
    ) -> None:
        """`on_broken` is called when nothing can be submitted any more, before the sinks hear of it; `on_end` with the
        last delta of each request that the pod ended, and its sink."""
        self._on_broken = on_broken
        self._on_end = on_end
        self._stub = pods_pb2_grpc.DecodeStub(channel)
        self._sinks: dict[str, DeltaSink] = {}  # by request id on the pod
        self._commands: dict[str, list[pods_pb2.DecodeCommand]] = {}  # unsent, by request id, oldest first
        self._has_commands = asyncio.Event()
        self._broken: BatonError | None = None

    @property
    def broken(self) -> bool:
        """True once nothing can be submitted any more."""
        return self._broken is not None

    async def run(self) -> NoReturn:
        """Keeps the stream until it breaks. Raises why, after each sink was told."""
        # Lives as long as the connection, so it has no deadline; keepalive notices a pod that is gone.
        call = self._stub.Session(None)
        writer = asyncio.create_task(self._write_commands(call))
        error: BatonError = UnavailableError("the session was closed")
        try:
            async for events in call:
                now = time.monotonic()
                for delta in events.deltas:
                    if len(delta.prompt_logprobs) > _AT_ONCE:
                        await self._deliver_prompt(delta, now)
                    self._deliver(delta, now)
            error = UnavailableError("the pod ended the session")
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            raise from_rpc_error(
                failure
            ) from failure  # not `error`: who is given that one would keep this frame's call
        finally:
            writer.cancel()
            call.cancel()
            self._break(error)
        raise UnavailableError(error.message)

    def submit(self, submit: pods_pb2.Submit, sink: DeltaSink) -> None:
        """Start a request. Raises UnavailableError if the session is broken."""
        if self._broken is not None:
            raise UnavailableError(self._broken.message)
        self._sinks[submit.request.request_id] = sink
        self._send(submit.request.request_id, pods_pb2.DecodeCommand(submit=submit))

    def abort(self, request_id: str) -> None:
        """End a request; its sink hears nothing more. Does nothing if it has ended."""
        if self._sinks.pop(request_id, None) is None:
            return
        unsent = self._commands.pop(request_id, [])
        if not (unsent and unsent[0].HasField("submit")):  # the pod has got the submit already
            self._send(request_id, pods_pb2.DecodeCommand(abort=pods_pb2.AbortCommand(request_id=request_id)))

    def prefill_failed(self, request_id: str, epoch: int, code: ErrorCode) -> None:
        """Tell the pod to compute the prompt itself."""
        if request_id in self._sinks:
            reason = common_pb2.ErrorCode.ValueType(code.value.number)
            failed = pods_pb2.PrefillFailed(request_id=request_id, epoch=epoch, reason=reason)
            self._send(request_id, pods_pb2.DecodeCommand(prefill_failed=failed))

    async def _deliver_prompt(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        """Delivers log probabilities of the prompt but for the last ones, and takes them from the delta. There may be
        very many, so others have their turn in between."""
        while len(delta.prompt_logprobs) > _AT_ONCE:
            start, part = delta.prompt_start, delta.prompt_logprobs[:_AT_ONCE]
            request_id = delta.request_id
            self._deliver(pods_pb2.TokenDelta(request_id=request_id, prompt_start=start, prompt_logprobs=part), now)
            del delta.prompt_logprobs[:_AT_ONCE]
            delta.prompt_start += _AT_ONCE
            await asyncio.sleep(0)

    def _deliver(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        sink = self._sinks.get(delta.request_id)
        if sink is None:
            return  # aborted while this was under way
        if delta.finish_reason:
            del self._sinks[delta.request_id]
            self._on_end(delta, sink)
        try:
            sink.on_delta(delta, now)
        except Exception:  # one request's fault must not take its neighbours along
            logger.exception(
                "request %s cannot take its events", delta.request_id, extra=fields(request_id=delta.request_id)
            )
            sink.on_lost(BatonError("internal error; the router's log has the details"))

    def _send(self, request_id: str, command: pods_pb2.DecodeCommand) -> None:
        self._commands.setdefault(request_id, []).append(command)
        self._has_commands.set()

    async def _write_commands(
        self, call: grpc.aio.StreamStreamCall[pods_pb2.DecodeCommand, pods_pb2.DecodeEvents]
    ) -> None:
        try:
            while True:
                await self._has_commands.wait()
                while self._commands:
                    for command in self._commands.pop(next(iter(self._commands))):
                        await call.write(command)
                self._has_commands.clear()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            logger.debug("commands can no longer be written: %s", error)  # the reader learns why and reports it

    def _break(self, error: BatonError) -> None:
        self._broken = error
        self._on_broken()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_lost(error)
