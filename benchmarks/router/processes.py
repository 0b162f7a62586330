"""Processes of the benchmark: started, spoken to in lines, measured, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import psutil

_END_S = 10.0
_CPU_CLOCK = 2  # Linux' clock of a process by its id, in nanoseconds; /proc counts in steps of 10 ms


class ChildEndedError(RuntimeError):
    """The process has ended."""


class OrderError(RuntimeError):
    """The process could not do what it was asked."""


class Child(AbstractContextManager["Child"]):
    """A Python module in a process of its own, which ends with its context."""

    def __init__(self, module: str, *arguments: str, quiet: bool = False, directory: Path | None = None) -> None:
        """`quiet`: what it writes goes nowhere, so `read_line` is not for it. `directory`: the checkout that the module
        is of; by default this one."""
        sink = subprocess.DEVNULL if quiet else subprocess.PIPE
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sink, text=True, cwd=directory)
        self._usage = psutil.Process(self._process.pid)
        self._module = module

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all its threads so far, and of those of its children."""
        pids = [self.pid, *(child.pid for child in self._usage.children())]
        return sum(time.clock_gettime(~pid << 3 | _CPU_CLOCK) for pid in pids)

    @property
    def own_bytes(self) -> int:
        """Memory that nobody else shares (USS)."""
        return int(self._usage.memory_full_info().uss)

    @property
    def has_ended(self) -> bool:
        """True: it will answer nothing any more."""
        return self._process.poll() is not None

    def read_line(self) -> str:
        """Returns the next line of the process. Raises ChildEndedError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildEndedError(f"{self._module} has ended with code {self._process.wait()}")
        return line.strip()

    def tell(self, line: str) -> str:
        """Say a line and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.read_line()

    def ask(self, *order: Any) -> dict[str, Any]:
        """The same in JSON. Raises OrderError if the answer is an error."""
        answer: dict[str, Any] = json.loads(self.tell(json.dumps(order)))
        if "error" in answer:
            raise OrderError(f"{order[0]}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
