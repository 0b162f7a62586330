"""The loop around an EngineCore, on a thread of its own: take commands, step, emit outputs.

Idle means blocked: with nothing to compute the loop waits on its command queue, to which clients add commands and the
connector, through the core, a wake-up. Every few seconds of that it reports for how long it has waited.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.engine.config import EngineConfig
from common.engine.core import EngineCore
from common.engine.executor.base import Executor
from common.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EndProfile,
    EngineCommand,
    EngineCoreOutputs,
    EngineReply,
    EngineSpec,
    LoadAdapter,
    StartProfile,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from common.engine.profiling.profile import Profile

IDLE_REPORT_S = 5.0  # between two reports of an idle engine
# Prompt tokens of the requests that are taken between two steps, which take some 5 ms. A client may send a million at
# once, for which streams must not wait.
MAX_NEW_TOKENS = 65_536
_REQUEST_TOKENS = 200  # that take as long as what a request takes beside its tokens


class _Wakeup:
    """Wakes the loop."""


class _Stop:
    """Ends the loop after the step in flight."""


class _Failure:
    """Reports that a thread of this loop has failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error


_WAKEUP = _Wakeup()
_STOP = _Stop()


class EngineLoop:
    """Owns the core. `put`, `stop` and `fail` may be called from any thread; the rest is called on the loop's thread.

    The queue of commands has no bound of its own: the front that feeds it bounds live requests, and each has one
    AddRequest, at most one abort, at most one transfer target and few transfer updates. `emit` takes one reply, on any
    thread, and may block for a bounded time.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        emit: Callable[[EngineReply], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._commands: queue.SimpleQueue[EngineCommand | _Wakeup | _Stop | _Failure] = queue.SimpleQueue()
        self._profile: Profile | None = None
        self._core = EngineCore(
            config,
            executor,
            on_wakeup=lambda: self._commands.put(_WAKEUP),
            on_outputs=emit,
            on_failure=self.fail,
            clock=clock,
        )

    @property
    def spec(self) -> EngineSpec:
        """Facts of the started engine."""
        return self._core.spec

    def put(self, command: EngineCommand) -> None:
        """Queues a command; those of one thread stay in order."""
        self._core.receive(command)
        self._commands.put(command)

    def stop(self) -> None:
        """Makes `run` return after the step in flight."""
        self._commands.put(_STOP)

    def fail(self, error: Exception) -> None:
        """Makes `run` raise `error` after the step in flight."""
        self._commands.put(_Failure(error))

    def run(self) -> None:
        """Serves until stopped. Any exception is fatal for the engine."""
        while self._take_commands():
            outputs = self._core.step()
            if not self._core.has_only_attended:
                self._emit(outputs)
            self._continue_profile()

    def close(self) -> None:
        """Release the executor. Idempotent."""
        if self._profile is not None:
            self._profile.cancel("the engine is closed")
            self._profile = None
        self._core.close()

    def _take_commands(self) -> bool:
        """Executes the commands that have arrived, but no more new requests than MAX_NEW_TOKENS says; waits while there
        is nothing to compute. False: stop."""
        self._core.begin_commands()
        num_left = MAX_NEW_TOKENS
        while num_left > 0 or not self._core.has_work:
            try:
                command = self._commands.get_nowait() if self._core.has_work else self._wait_for_command()
            except queue.Empty:
                return True
            match command:
                case AddRequest():
                    self._core.add_request(command)
                    num_left -= _REQUEST_TOKENS + len(command.prompt_token_ids)
                case AbortRequests():
                    self._core.abort_requests(command.request_ids)
                case Call():
                    self._emit(self._core.call(command))
                case LoadAdapter():
                    self._core.begin_load_adapter(command)
                case UnloadAdapter():
                    self._emit(self._core.answer_unload(command))
                case StartProfile():
                    self._start_profile(command)
                case EndProfile(call_id):
                    if self._profile is not None and self._profile.call_id == call_id:
                        self._profile.cancel("it was cancelled")
                        self._profile = None
                case _Failure():
                    raise command.error
                case _Stop():
                    return False
                case _Wakeup():
                    for result in self._core.settle_adapters():
                        self._emit(result)
                case TransferUpdate() | TransferTarget() | TransferQuiesced():
                    pass  # they are for the transfer thread, which has got them
        return True

    def _wait_for_command(self) -> EngineCommand | _Wakeup | _Stop | _Failure:
        self._core.begin_wait()
        while True:
            left_s = IDLE_REPORT_S if self._profile is None else self._profile.remaining_s
            try:
                command = self._commands.get(timeout=min(left_s, IDLE_REPORT_S))
            except queue.Empty:
                self._emit(EngineCoreOutputs(outputs=[], phases=self._core.phases.seconds()))
                self._continue_profile()
            else:
                self._core.begin_commands()
                return command

    def _start_profile(self, command: StartProfile) -> None:
        from common.engine.profiling.profile import Profile  # torch, which a core of another executor may not need

        if self._profile is not None:
            self._emit(CallResult(call_id=command.call_id, error="a profile is being taken already"))
        else:
            self._profile = Profile(command, self._core.phases, self._emit)
            self._continue_profile()

    def _continue_profile(self) -> None:
        if self._profile is not None and self._profile.check():
            self._profile = None
