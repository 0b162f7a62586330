"""The parent's side of a process that tries out grammars, see `common.engine.grammar.trial`."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
import time
from typing import IO

import msgspec

from common.engine.grammar.trial import Settings, Verdict, frame_length, frame_payload, write_frame
from common.errors import BatonError, InvalidRequestError
from common.types import Constraint

_START_TIMEOUT_S = 60.0
_WALL_FACTOR = 10.0  # a machine may be so busy; a process that sleeps takes no CPU time
_CHUNK = 65536


class TrialProcess:
    """Started by the first constraint, and again by the one after a constraint that ended it. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequestError if the constraint cannot be compiled, or not within the limits, and BatonError if
        no process can be started."""
        process = self._process or self._start()
        try:
            write_frame(_stdin(process), constraint)
            verdict = self._read(process, _WALL_FACTOR * self._settings.cpu_s)
        except (OSError, EOFError, TimeoutError) as error:
            raise InvalidRequestError(self._cause_of_death(error)) from error
        if verdict.problem:
            raise InvalidRequestError(verdict.problem)

    def stop(self) -> None:
        """Ends the process; a check under way fails, and no other process is started. May be called from any thread."""
        self._is_stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process and closes its pipes. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not read by a process that is gone
                        pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "common.engine.grammar.trial"]
        process = self._process = subprocess.Popen(  # noqa: S603  # our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._is_stopped:  # before the process could be seen
            process.kill()
        try:
            write_frame(_stdin(process), self._settings)
            self._read(process, _START_TIMEOUT_S)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise BatonError(
                "the process that compiles grammars did not start; the pod's log has the details"
            ) from error
        return process

    def _read(self, process: subprocess.Popen[bytes], timeout_s: float) -> Verdict:
        """Raises EOFError if the process ends, TimeoutError if it does not answer."""
        assert process.stdout is not None
        due = time.monotonic() + timeout_s
        buffer = b""
        while (length := frame_length(buffer)) is None or len(buffer) < length:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, due - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = process.stdout.read1(_CHUNK)  # type: ignore[attr-defined]  # a BufferedReader
            if not chunk:
                raise EOFError
            buffer += chunk
        return msgspec.msgpack.decode(frame_payload(buffer), type=Verdict)

    def _cause_of_death(self, error: Exception) -> str:
        """Ends the process; says why it was."""
        process = self._process
        assert process is not None
        if isinstance(error, TimeoutError):
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_START_TIMEOUT_S)
        code = process.returncode
        self.close()
        if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
            return f"it takes more than {self._settings.cpu_s:g} s to compile"
        return f"it takes too much memory to compile, or is nested too deep ({_exit_name(code)})"


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _exit_name(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
