"""One pod of a local cluster as a child process.

1. `supervise` starts it in a process group of its own and reads its output, line by line.
2. A probe says when it is ready.
3. When it dies it is started again with the same command, after a delay that doubles from death to death.
4. `stop` asks it to end and, after the grace period, kills its group. A launcher that is killed takes it along: see
   `deploy.parent_death`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from common.config import CONFIG_ERROR_EXIT_CODE
from common.errors import BatonError, ConfigError
from deploy.parent_death import PARENT_PID_VARIABLE

FIRST_RESTART_DELAY_S = 0.5
MAX_RESTART_DELAY_S = 30.0
STEADY_S = 60.0  # a pod that ran this long starts over with the first delay
MAX_START_ATTEMPTS = 3  # of a pod that was never ready
MAX_LINE_BYTES = 32 * 1024  # longer lines of output are cut
PROBE_INTERVAL_S = 0.1
OUTPUT_DRAIN_S = 1.0  # for what a dead pod had written last
_ERROR_PREFIX = "baton: error: "
_READY_PREFIX = "ready role="  # what a pod prints when it is started by hand; here the probe tells


class PodSpec(NamedTuple):
    """How to start a pod."""

    name: str  # prefill-0, decode-1, router
    role: str  # prefill, decode, router, store
    command: tuple[str, ...]
    env: Mapping[str, str]
    address: str  # what people and peers connect to
    quiet: bool = False  # its output is shown only if it does not start
    model: str = ""  # of several, by name


class PodStartError(BatonError):
    """A pod does not start, for a reason that is not a wrong setting."""

    is_for_terminal = True


class PodObserver(Protocol):
    """Hears what happens to pods; called on the event loop, must not block."""

    def pod_line(self, name: str, line: str) -> None:
        """One line of a pod's output, without its line break."""

    def pod_ready(self, spec: PodSpec, seconds: float, *, again: bool) -> None:
        """The pod serves, `seconds` after it was started."""

    def pod_died(self, spec: PodSpec, exit_code: int, delay_s: float) -> None:
        """The pod ended unasked; it is started again after `delay_s`."""


class PodProcess:
    """Owns the child process of one pod and its process group."""

    def __init__(self, spec: PodSpec, probe: Callable[[], Awaitable[bool]], observer: PodObserver) -> None:
        self.spec = spec
        self.ready = asyncio.Event()  # set once: at the first readiness
        self._probe = probe
        self._observer = observer
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._error_line = ""
        self._last_lines: deque[str] = deque(maxlen=20)  # for the message of a failed start

    @property
    def pid(self) -> int | None:
        """The id of the running child."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def supervise(self) -> None:
        """Keeps the pod running until `stop`.

        Raises ConfigError if it refuses its settings at start, PodStartError if it never becomes ready.
        """
        attempts, delay = 0, FIRST_RESTART_DELAY_S
        while not self._stopping:
            started = time.monotonic()
            attempts += 1
            exit_code = await self._run_once(started)
            if self._stopping:
                return
            if not self.ready.is_set():
                self._check_start(exit_code, attempts)
            if time.monotonic() - started > STEADY_S:
                delay = FIRST_RESTART_DELAY_S
            self._observer.pod_died(self.spec, exit_code, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RESTART_DELAY_S)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, up to `grace_s` seconds, SIGKILL for what is left of the group. Idempotent."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)  # `process.terminate` would poll, and take the exit code away
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
        self.kill()
        await process.wait()

    def kill(self) -> None:
        """SIGKILL to the whole group, now."""
        self._stopping = True
        self._kill_group()

    def _check_start(self, exit_code: int, attempts: int) -> None:
        if exit_code == CONFIG_ERROR_EXIT_CODE:
            raise ConfigError(f"{self.spec.name}: {self._error_line or 'refused its settings'}")
        if attempts >= MAX_START_ATTEMPTS:
            raise PodStartError(
                f"{self.spec.name} did not start in {attempts} attempts ({describe_exit(exit_code)}); it said:\n"
                + "\n".join(f"    {line}" for line in self._last_lines)
            )

    async def _run_once(self, started: float) -> int:
        """Starts the pod and waits for its end. Returns its exit code, negative for a signal."""
        read_end, write_end = os.pipe()
        try:
            # The pipe is ours, not asyncio's: a grandchild that keeps it open must not delay the news of an exit.
            self._process = process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**self.spec.env, PARENT_PID_VARIABLE: str(os.getpid())},
                process_group=0,
            )
        except OSError as error:
            os.close(read_end)
            raise PodStartError(f"{self.spec.name}: cannot start a process: {error}") from error
        finally:
            os.close(write_end)
        if self._stopping:  # asked while it was being started
            self._kill_group()
        name = self.spec.name
        exited = asyncio.create_task(process.wait(), name=f"{name}-exit")
        output = asyncio.create_task(self._read_output(read_end), name=f"{name}-output")
        readiness = asyncio.create_task(self._watch_readiness(started), name=f"{name}-readiness")
        try:
            await asyncio.wait([exited, readiness], return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                readiness.result()
            return await exited
        finally:
            readiness.cancel()
            self._kill_group()
            await asyncio.wait([exited, output, readiness], timeout=OUTPUT_DRAIN_S)
            for task in (exited, output):
                task.cancel()
            for outcome in await asyncio.gather(exited, output, readiness, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    async def _watch_readiness(self, started: float) -> None:
        while not await self._probe():  # noqa: ASYNC110  (another process has no event to wait for)
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._observer.pod_ready(self.spec, time.monotonic() - started, again=self.ready.is_set())
        self.ready.set()

    async def _read_output(self, read_end: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        pending = b""
        try:
            while chunk := await reader.read(MAX_LINE_BYTES):
                *lines, pending = (pending + chunk).split(b"\n")
                if len(pending) > MAX_LINE_BYTES:
                    lines, pending = [*lines, pending[:MAX_LINE_BYTES]], b""
                for line in lines:
                    self._hear(line)
            if pending:
                self._hear(pending)
        finally:
            transport.close()

    def _hear(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip()
        if line.startswith(_ERROR_PREFIX) and not self.ready.is_set():
            self._error_line = line.removeprefix(_ERROR_PREFIX)  # printed once, when the cluster ends
        elif line and not line.startswith(_READY_PREFIX):
            self._last_lines.append(line)
            if not self.spec.quiet:
                self._observer.pod_line(self.spec.name, line)

    def _kill_group(self) -> None:
        """Takes along what the pod started: its engine process must not outlive it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def describe_exit(exit_code: int) -> str:
    """ "exit code 1" or "killed by SIGKILL"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
