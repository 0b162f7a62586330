"""Processes of a benchmark: started, spoken to in lines, measured, ended. None of them outlives the benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from deploy.parent_death import PARENT_PID_VARIABLE
from loadgen.http_client import RequestFailed

_END_S = 60.0
_SHOWN_LINES = 30  # of what a process that has ended has written
_CPU_CLOCK = 2  # Linux' clock of a process by its id, in nanoseconds; /proc counts in steps of 10 ms


class ChildEndedError(RuntimeError):
    """The process has ended."""


class OrderError(RuntimeError):
    """The process could not do what it was asked."""


class Child:
    """A program of Python in a process of its own, which ends with its context."""

    def __init__(
        self,
        *arguments: str,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
        directory: Path | None = None,
        log: Path | None = None,
        ends_with_input: bool = False,
        is_direct: bool = False,
        under: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """`arguments`: those of the interpreter, as `-m` and a module. `variables`: more of the environment. `log`: a
        file for what it writes besides answers. `ends_with_input`: it is waited for and not terminated.
        `is_direct`: nothing is run before it that would count as its own. `under`: a program that runs the interpreter,
        with its path. `options`: others of Popen."""
        self._name = " ".join(arguments[:2])
        self._ends_with_input = ends_with_input
        self._log = log
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        environment = {**os.environ, **(variables or {}), PARENT_PID_VARIABLE: str(os.getpid())}
        with contextlib.nullcontext(None) if log is None else log.open("w") as sink:
            self._process = subprocess.Popen(
                [python, *arguments] if is_direct else orphan_proof(*under, python, *arguments),
                **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": sink, **options},
                text=True,
                cwd=directory,
                env=environment,
            )
        self._usage = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all its threads so far, and of all processes below it that have not ended."""
        pids = [self.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            pids += [child.pid for child in self._usage.children(recursive=True)]
        total_s = 0.0
        for pid in pids:
            with contextlib.suppress(OSError):
                total_s += time.clock_gettime(~pid << 3 | _CPU_CLOCK)
        return total_s

    @property
    def own_bytes(self) -> int:
        """Memory that no other process shares (USS)."""
        return int(self._usage.memory_full_info().uss)

    @property
    def has_ended(self) -> bool:
        """Whether it will answer nothing any more."""
        return self._process.poll() is not None

    def read_line(self) -> str:
        """Returns the next line of the process. Raises ChildEndedError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildEndedError(f"{self._name} has ended with code {self._process.wait()}\n{self._last_words()}")
        self._lines.append(line.rstrip())
        return str(line).strip()

    def read_until(self, start: str) -> str:
        """Returns the first line that begins so. Raises ChildEndedError."""
        while not (line := self.read_line()).startswith(start):
            pass
        return line

    def read_ready(self) -> dict[str, str]:
        """Returns what a process of Baton says once it is ready, by name. Raises ChildEndedError."""
        return dict(word.split("=", 1) for word in self.read_until("ready ").split()[1:] if "=" in word)

    def drain(self) -> None:
        """Reads on and forgets, so that the pipe never fills."""
        assert self._process.stdout is not None
        threading.Thread(target=deque, args=(self._process.stdout, 0), daemon=True).start()

    def write_line(self, line: str) -> None:
        """Gives the process a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def tell(self, line: str) -> str:
        """Gives the process a line and returns its answer. Raises ChildEndedError."""
        with contextlib.suppress(BrokenPipeError):  # reading says why
            self.write_line(line)
        return self.read_line()

    def ask(self, *order: Any) -> Any:
        """The same in JSON. Raises OrderError if the answer is an error, and ChildEndedError."""
        answer = json.loads(self.tell(json.dumps(order)))
        if isinstance(answer, dict) and "error" in answer:
            raise OrderError(f"{order[0]}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._lines if self._log is None else self._log.read_text(errors="replace").splitlines()
        return "\n".join([*lines][-_SHOWN_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if not self._ends_with_input:
            self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def orphan_proof(*command: str) -> list[str]:
    """Returns a command whose process does not outlive this one, if the environment names it."""
    return [sys.executable, "-m", "deploy.parent_death", *command]


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def obey(orders: object) -> None:
    """Takes orders from `Child.ask`, each a method of `orders` and its arguments, until stdin ends."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, *arguments = json.loads(line)
        try:
            answer = await getattr(orders, name)(*arguments)
        except (OSError, RuntimeError, RequestFailed) as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
