"""The engine's side of the fork server and of the processes of grammars."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from common.engine.grammar.protocol import (
    Accept,
    Close,
    Compile,
    Ended,
    Fork,
    Forked,
    Frames,
    FromGrammar,
    FromServer,
    LookAhead,
    Masks,
    MatcherState,
    Open,
    Reap,
    Settings,
    Started,
    ToGrammar,
    frame,
)
from common.errors import BatonError, InvalidRequestError, OverloadedError
from common.types import Constraint

_START_TIMEOUT_S = 60.0  # for the fork server
_TIMEOUT_S = 10.0  # for its answers, each of which takes milliseconds
_CHUNK = 2**18
_LATE_NICENESS = 19
_NO_WORDS = np.empty(0, dtype=np.int32)
_Answer = TypeVar("_Answer", Started, Forked, Ended)


class ForkServer:
    """Starts processes of grammars, which end with it. Started by the first, and again by the next one after it has
    ended. Not thread-safe, but for `stop`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames: Frames[FromServer] = Frames(FromServer)

    def start(self, constraint: Constraint) -> GrammarProcess:
        """Returns a process that compiles `constraint`. Raises InvalidRequestError if the model has no tokenizer,
        BatonError if no process can be started."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            own, others = socket.socketpair()
        except OSError as error:  # too many files or processes
            raise OverloadedError(f"no process can be started for the grammar: {error}") from error
        try:
            with others:
                forked = self._ask(frame(Fork()), Forked, others)
            if forked.problem:
                raise OverloadedError(f"no process can be started for the grammar: {forked.problem}")
        except BatonError:
            own.close()
            raise
        process = GrammarProcess(own, forked.pid, self._process)
        process.compile(constraint)
        return process

    def reap(self, process: GrammarProcess) -> int | None:
        """Ends a process, if it has not ended. Returns its exit code; None: it is not known. Called once."""
        is_own = process.server is self._process  # else its id may be another process's by now
        process.close(may_kill=is_own)
        if self._socket is None or not is_own:
            return None
        try:
            return self._ask(frame(Reap(process.pid)), Ended).exit_code
        except BatonError:
            return None

    def kill(self, process: GrammarProcess) -> None:
        """Ends a process that is in use and takes too much memory; whoever uses it notices."""
        process.has_outgrown = True
        if process.server is self._process:  # as above
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ends the server's process, so that no call waits for it. May be called from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the server, and with it the processes of grammars. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._socket, others = socket.socketpair()
        self._socket.settimeout(_START_TIMEOUT_S)
        self._frames = Frames(FromServer)
        command = [sys.executable, "-m", "common.engine.grammar.fork_server"]
        with others:
            self._process = subprocess.Popen(command, stdin=others.fileno(), stdout=2)  # noqa: S603  # our own module
        started = self._ask(frame(self._settings), Started)
        if started.problem:
            self.close()
            raise InvalidRequestError(started.problem)
        self._socket.settimeout(_TIMEOUT_S)

    def _ask(self, message: bytes, answer: type[_Answer], descriptor: socket.socket | None = None) -> _Answer:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [message], [] if descriptor is None else [descriptor.fileno()])
            answers: list[FromServer] = []
            while not answers:
                data = self._socket.recv(_CHUNK)
                if not data:
                    raise EOFError
                answers = self._frames.feed(data)
        except (OSError, EOFError) as error:  # a time-out among them
            self.close()
            raise OverloadedError("the process that compiles grammars failed; the pod's log has the details") from error
        [found] = answers
        assert isinstance(found, answer)
        return found


class GrammarProcess:
    """A process with one grammar. Used by one thread at a time: the compiler's, then the step loop's. Calls never wait:
    what the socket does not take is sent later."""

    def __init__(self, own: socket.socket, pid: int, server: object) -> None:
        """`server`: whatever stands for the fork server that has started it."""
        self.pid = pid
        self.server = server
        self.is_gone = False  # it has ended, or its socket is closed
        self.has_outgrown = False  # it has been ended for the memory that it took
        self._socket = own
        self._socket.setblocking(False)
        self._frames: Frames[FromGrammar] = Frames(FromGrammar)
        self._unsent = bytearray()
        self._open: set[int] = set()  # matchers
        # Of each mask that was asked for, in order: its matcher, and after how many drafts it holds.
        self._awaited: deque[tuple[int, int]] = deque()
        self._cpu_when_late: float | None = None  # CPU time taken when an answer was first late, if one is
        self._is_demoted = False  # has a lower priority

    @property
    def resident_bytes(self) -> int:
        """Memory in use, with what it shares with the fork server; 0 if it has ended, or where the system does not say.
        May be read on any thread."""
        try:
            num_pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except OSError:
            return 0
        return num_pages * resource.getpagesize()

    def fileno(self) -> int:
        """Descriptor of the socket, readable when there are answers."""
        return self._socket.fileno()

    def compile(self, constraint: Constraint) -> None:
        """Asks for the grammar."""
        self._put(Compile(constraint))
        self.flush()

    def open(self, matcher_id: int, token_ids: list[int], share_s: float) -> None:
        """Asks for a matcher and its mask. Sent by `flush`."""
        self._open.add(matcher_id)
        self._awaited.append((matcher_id, 0))
        self._put(Open(matcher_id, token_ids, share_s))

    def accept(self, token_ids: list[tuple[int, list[int]]], share_s: float) -> None:
        """Hands over the tokens of a step by matcher, and asks for the next masks. Sent by `flush`."""
        self._awaited.extend((matcher_id, 0) for matcher_id, _ in token_ids)
        self._put(Accept(token_ids, share_s))

    def look_ahead(self, matcher_id: int, drafts: list[int], share_s: float) -> None:
        """Asks for the masks after each of the drafts, should they be accepted. Sent by `flush`."""
        self._awaited.extend((matcher_id, number) for number in range(1, len(drafts) + 1))
        self._put(LookAhead(matcher_id, drafts, share_s))

    def close_matcher(self, matcher_id: int) -> None:
        """Drops a matcher. Sent by `flush`."""
        self._open.discard(matcher_id)
        self._put(Close(matcher_id))

    def is_alive(self) -> bool:
        """Whether it has not ended. Called when it has no open matcher; what it still answers is dropped."""
        for message in self.receive():
            assert isinstance(message, Masks)
            for _ in self.take(message):
                pass
        return not self.is_gone

    @property
    def is_late(self) -> bool:
        """Whether it is at work and has a lower priority."""
        return self._is_demoted and bool(self._awaited)

    @property
    def at_work_on(self) -> tuple[int, int] | None:
        """The matcher whose mask comes next, if one is awaited, and after how many drafts."""
        return self._awaited[0] if self._awaited else None

    def flush(self) -> None:
        """Sends what the socket takes."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass  # it is busy
        except OSError:
            self._unsent.clear()  # `receive` finds out that it is gone

    def receive(self) -> list[FromGrammar]:
        """Returns the answers that are here."""
        answers: list[FromGrammar] = []
        try:
            while data := self._socket.recv(_CHUNK):
                answers += self._frames.feed(data)
            self.is_gone = True
        except BlockingIOError:
            self.flush()
        except OSError:
            self.is_gone = True
        return answers

    def take(self, masks: Masks) -> Iterator[tuple[int, int, MatcherState, npt.NDArray[np.int32]]]:
        """Yields matcher, number of drafts, state and mask [words] of each matcher that is open and was not told of
        tokens since. The mask is empty unless it follows the grammar."""
        num_masks = sum(state == "following" for _, state in masks.states)
        words = iter(np.frombuffer(masks.words, dtype=np.int32).reshape(num_masks, -1) if num_masks else ())
        for matcher_id, state in masks.states:
            awaited_id, num_drafts = self._awaited.popleft()
            assert matcher_id == awaited_id, "answers come in order"
            mask = next(words) if state == "following" else _NO_WORDS
            if matcher_id in self._open and (matcher_id, 0) not in self._awaited:
                yield matcher_id, num_drafts, state, mask
        if not self._awaited:
            self._cpu_when_late = None

    def note_late(self, cpu_s: float) -> None:
        """An answer is late. Lowers the priority of the process if that has taken more CPU time than `cpu_s` since the
        first was; it may just not have been its turn."""
        if self._is_demoted:
            return
        if self._cpu_when_late is None:
            self._cpu_when_late = self._cpu_s
        elif self._cpu_s - self._cpu_when_late > cpu_s:
            self._is_demoted = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.pid, _LATE_NICENESS)

    @property
    def _cpu_s(self) -> float:
        """CPU time that the process has taken; wall time where the system does not tell it of other processes."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                return time.clock_gettime(~self.pid << 3 | 2)  # the clock of clock_getcpuclockid(3)
        return time.monotonic()

    def close(self, *, may_kill: bool) -> None:
        """Closes the socket, and ends the process if its id is still its own, as it is until the fork server reaps it.
        Idempotent."""
        if not self.is_gone:
            self.is_gone = True
            with contextlib.suppress(ProcessLookupError):
                if may_kill:
                    os.kill(self.pid, signal.SIGKILL)
        self._socket.close()

    def _put(self, message: ToGrammar) -> None:
        self._unsent += frame(message)
