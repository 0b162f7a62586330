"""The sides of the comparison as processes, each in the Python environment that it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare.checkpoints import Checkpoint
from benchmarks.compare.side import Generation

CHECKOUT = Path(__file__).resolve().parents[2]
PEERS = CHECKOUT / ".venv-peers"  # of `make peers`
NAMES = ("baton", "vllm", "transformers", "generate_batch", "invariant")
MAIN_NAMES = NAMES[:3]  # what --quick measures
_END_S = 60.0
_SHOWN_LINES = 20  # of what a side that failed has written


class SideError(RuntimeError):
    """A side has ended, or did not start."""


class Python(NamedTuple):
    """An interpreter, and the environment variables that what runs in it needs."""

    path: str
    variables: Mapping[str, str]


def python_of(name: str) -> Python | None:
    """Returns the interpreter of a side; None if it is not installed."""
    if not name.startswith("vllm"):
        return Python(sys.executable, {})
    interpreter = PEERS / "bin" / "python"
    if interpreter.exists():
        cores = sorted(os.sched_getaffinity(0))
        return Python(
            str(interpreter),
            {
                "LD_PRELOAD": str(PEERS / "lib" / "libiomp5.so"),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
    return Python(sys.executable, {}) if importlib.util.find_spec("vllm") else None


class Side(AbstractContextManager["Side"]):
    """One side with one model. Raises SideError if it does not start."""

    def __init__(self, name: str, checkpoint: Checkpoint, log: Path) -> None:
        python = python_of(name)
        assert python is not None
        self.name = name
        self._log = log
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                [python.path, "-m", f"benchmarks.compare.{name}_side", *(str(part) for part in checkpoint if part)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                cwd=CHECKOUT,
                env={**os.environ, **python.variables},
            )
        try:
            self._read()
        except SideError:
            self.__exit__()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generation:
        """See Generator. Raises SideError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        return Generation(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
            raise SideError(f"{self.name} has ended with code {self._process.returncode}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
