"""The sides of the comparison as processes, each in the Python environment that it needs."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.compare.checkpoints import Checkpoint
from benchmarks.compare.side import Generation
from benchmarks.harness.checkouts import ROOT
from benchmarks.harness.processes import Child

PEERS = ROOT / ".venv-peers"  # of `make peers`
TCMALLOC = ctypes.util.find_library("tcmalloc_minimal")  # as vLLM's documentation recommends; Debian has it
_OWN = {name: ROOT / f".venv-peers-{name}" for name in ("openvino", "llamacpp")}  # likewise
NAMES = ("baton", "vllm", "openvino", "llamacpp", "transformers", "generate_batch", "invariant")
MAIN_NAMES = ("baton", "vllm", "transformers")  # what --quick measures


class Python(NamedTuple):
    """An interpreter, and the environment variables that what runs in it needs."""

    path: str
    variables: Mapping[str, str]


def python_of(name: str) -> Python | None:
    """Returns the interpreter of a side; None if it is not installed."""
    if name in _OWN:
        own = _OWN[name] / "bin" / "python"
        return Python(str(own), {}) if own.exists() else None
    if not name.startswith("vllm"):
        return Python(sys.executable, {})
    interpreter = PEERS / "bin" / "python"
    if interpreter.exists():
        cores = sorted(os.sched_getaffinity(0))
        return Python(
            str(interpreter),
            {
                "LD_PRELOAD": ":".join(filter(None, (TCMALLOC, str(PEERS / "lib" / "libiomp5.so")))),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
    return Python(sys.executable, {}) if importlib.util.find_spec("vllm") else None


class Side(Child):
    """One side with one model. Raises ChildEndedError if it does not start."""

    def __init__(self, name: str, checkpoint: Checkpoint, log: Path) -> None:
        python = python_of(name)
        assert python is not None
        arguments = (str(part) for part in checkpoint if part)
        super().__init__(
            "-m",
            "benchmarks.compare.side",
            name,
            *arguments,
            python=python.path,
            variables=python.variables,
            directory=ROOT,
            log=log,
            ends_with_input=True,
        )
        self.name = name
        self.read_line()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generation:
        """See Generator. Raises ChildEndedError."""
        return Generation(**self.ask(prompts, num_tokens))
