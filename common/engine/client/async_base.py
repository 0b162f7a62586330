"""Base of the asynchronous clients: dispatches replies to the calls that wait for them."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import logging
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from common.engine.client.base import EngineProfile
from common.engine.contract.adapters import AdapterFacts
from common.engine.launch import EngineFailed, EngineProcReply, EngineReady
from common.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EndProfile,
    EngineCommand,
    EngineCoreOutputs,
    EngineSpec,
    EngineStats,
    IntegrityReport,
    LoadAdapter,
    ProfileReport,
    StartProfile,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
    UnloadAdapter,
)
from common.engine.profiling import TRACE_FILE
from common.errors import (
    BatonError,
    DeadlineExceededError,
    EngineDeadError,
    ErrorCode,
    UnavailableError,
    make_error,
)
from common.types import RequestId

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0  # loading a large model from a slow disk
_LOAD_ADAPTER_TIMEOUT_S = 300.0  # from a slow disk
_CALL_TIMEOUT_S = 60.0  # a call is answered between two steps, and a step may be long


class AsyncClientBase(abc.ABC):
    """See EngineClient. A subclass starts an engine, sends it commands, and passes on each reply on the event loop."""

    def __init__(self, *, start_timeout_s: float = _START_TIMEOUT_S, call_timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._spec: EngineSpec | None = None
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._changed = asyncio.Event()  # outputs, death or close
        self._settled = asyncio.Event()  # the start has succeeded or failed
        self._died = asyncio.Event()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._cause_of_death: BatonError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._directory: str | None = None  # private, for what the engine writes; None: the system's for such files

    # -- for subclasses ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def _start_engine(self) -> None:
        """Starts the engine, which answers with EngineReady or EngineFailed."""

    @abc.abstractmethod
    def _send(self, command: EngineCommand) -> None:
        """Sends a command without waiting."""

    @abc.abstractmethod
    async def _stop_engine(self) -> None:
        """Ends the engine and releases everything. Called once, also after a partial start."""

    def _on_outputs_taken(self) -> None:  # noqa: B027  a hook that most have no use for
        """Called when the consumer has taken an item of `self._outputs`."""

    def _take_reply(self, reply: EngineProcReply) -> None:
        match reply:
            case EngineCoreOutputs():
                if self._closing is None:
                    self._outputs.append(reply)
                    self._changed.set()
            case CallResult():
                answer = self._calls.pop(reply.call_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
            case EngineReady():
                self._spec = reply.spec
                self._settled.set()
            case EngineFailed():
                self._die(reply.to_error())

    def _die(self, cause: BatonError) -> None:
        """Handles the unexpected end of the engine. Only the first cause counts."""
        if self._cause_of_death is not None or self._closing is not None:
            return
        self._cause_of_death = cause
        if self._spec is not None:
            logger.error("the engine is dead: %s", cause.message)
        self._fail_calls(cause.message)
        self._settled.set()
        self._died.set()
        self._changed.set()

    # -- EngineClient -----------------------------------------------------------------------------------------------

    async def start(self) -> EngineSpec:
        """Starts the engine and waits until it can serve. Raises ConfigError if a setting or the model is at fault,
        EngineDeadError if the engine died or took too long. A failed client is closed."""
        try:
            await self._start_engine()
            async with asyncio.timeout(self._start_timeout_s):
                await self._settled.wait()
            if self._cause_of_death is not None:
                raise self._cause_of_death
            return await self.spec()
        except TimeoutError as error:
            await self.close()
            raise EngineDeadError(f"the engine did not start within {self._start_timeout_s} s") from error
        except BaseException:
            await self.close()
            raise

    def least_loaded(self) -> int:
        """See EngineClient. There is one."""
        return 0

    def add_request(self, request: AddRequest) -> None:
        """Starts a generation. A request that cannot be admitted ends with FinishReason.ERROR in the outputs."""
        self._check_alive()
        self._send(request)

    def abort_requests(self, request_ids: Sequence[RequestId]) -> None:
        """Ends generations; each live one still answers, with FinishReason.ABORT."""
        self._check_alive()
        self._send(AbortRequests(list(request_ids)))

    def update_transfer(self, command: TransferUpdate) -> None:
        """Passes on an update of a consumer's handoff."""
        self._check_alive()
        self._send(command)

    def quiesce_transfer(self, command: TransferQuiesced) -> None:
        """Reports that a producer no longer writes to a consumer's blocks."""
        self._check_alive()
        self._send(command)

    def set_transfer_target(self, target: TransferTarget) -> None:
        """Gives a producer the blocks to which a direct connector writes."""
        self._check_alive()
        self._send(target)

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """Yields the engine's outputs, one item per step; ends with `close`, raises EngineDeadError if the engine
        dies."""
        while True:
            while self._outputs:
                item = self._outputs.popleft()
                self._on_outputs_taken()
                yield item
            if self._closing is not None:
                return
            self._check_alive()
            self._changed.clear()
            await self._changed.wait()

    async def spec(self) -> EngineSpec:
        """Facts of the started engine."""
        self._check_alive()
        assert self._spec is not None
        return self._spec

    async def stats(self) -> EngineStats:
        """Returns the current statistics."""
        result = await self._call("stats")
        assert isinstance(result, EngineStats)
        return result

    async def stats_by_engine(self) -> list[EngineStats]:
        """See EngineClient."""
        return [await self.stats()]

    async def check_integrity(self) -> IntegrityReport:
        """Checks the engine's invariants."""
        result = await self._call("check_integrity")
        assert isinstance(result, IntegrityReport)
        return result

    @asynccontextmanager
    async def profile(self, *, seconds: float, max_steps: int = 0) -> AsyncIterator[EngineProfile]:
        """See EngineClient."""
        self._check_alive()
        with tempfile.TemporaryDirectory(prefix="profile-", dir=self._directory) as directory:  # mode 0700
            call_id = next(self._call_ids)
            command = StartProfile(call_id=call_id, directory=directory, seconds=seconds, max_steps=max_steps)
            answer = self._begin_call(call_id, command)
            try:
                outcome = await self._answer_of(asyncio.shield(answer), "a profile", seconds + self._call_timeout_s)
            except asyncio.CancelledError:
                if not answer.done():
                    self._send(EndProfile(call_id))
                with contextlib.suppress(BatonError):  # until nothing writes to the directory any more
                    await self._answer_of(answer, "the end of a profile", self._call_timeout_s)
                raise
            finally:
                self._calls.pop(call_id, None)
            if outcome.error:
                raise UnavailableError(outcome.error)
            assert isinstance(outcome.result, ProfileReport)
            yield EngineProfile(outcome.result, Path(directory, TRACE_FILE))

    async def reset_prefix_cache(self) -> None:
        """Removes all cached blocks that no request owns."""
        await self._call("reset_prefix_cache")

    async def load_adapter(self, directory: str) -> AdapterFacts:
        """See EngineClient."""
        call_id = next(self._call_ids)
        command = LoadAdapter(call_id=call_id, directory=directory)
        answer = await self._ask(call_id, command, "load_adapter", _LOAD_ADAPTER_TIMEOUT_S)
        assert isinstance(answer.result, AdapterFacts)
        return answer.result

    async def unload_adapter(self, digest: bytes) -> None:
        """See EngineClient."""
        call_id = next(self._call_ids)
        await self._ask(call_id, UnloadAdapter(call_id=call_id, digest=digest), "unload_adapter")

    async def close(self) -> None:
        """Ends the engine. Idempotent; safe after a partial start."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._stop_engine(), name="engine-close")
            self._outputs.clear()
            self._fail_calls("the engine is closed")
            self._changed.set()
        await asyncio.shield(self._closing)  # so that a cancelled caller leaves no partly closed engine

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._closing is not None:
            raise EngineDeadError("the engine is closed")
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death.message)
        if self._spec is None:
            raise EngineDeadError("the engine has not started")

    async def _call(
        self, method: Literal["stats", "check_integrity", "reset_prefix_cache"]
    ) -> EngineSpec | EngineStats | IntegrityReport | ProfileReport | AdapterFacts | None:
        call = Call(next(self._call_ids), method)
        return (await self._ask(call.call_id, call, method)).result

    async def _ask(self, call_id: int, command: EngineCommand, what: str, timeout_s: float | None = None) -> CallResult:
        """Sends a command and waits for its answer. Raises the error that it is."""
        self._check_alive()
        try:
            answer = await self._answer_of(self._begin_call(call_id, command), what, timeout_s or self._call_timeout_s)
        finally:
            self._calls.pop(call_id, None)
        if answer.error:
            raise make_error(ErrorCode.from_number(answer.error_code), answer.error, param=answer.error_param or None)
        return answer

    def _begin_call(self, call_id: int, command: EngineCommand) -> asyncio.Future[CallResult]:
        answer: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._send(command)
        return answer

    async def _answer_of(self, answer: asyncio.Future[CallResult], what: str, timeout_s: float) -> CallResult:
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceededError(f"the engine did not answer {what} in {timeout_s:g} s") from error

    def _fail_calls(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))
