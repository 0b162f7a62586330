"""Time of steps, and memory, with each kind of weights."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.int8.quality import Weights
from benchmarks.kernels import Side, measure_steps
from common.engine.model.loader import load_model

DECODES = [(1, 128), (8, 128), (32, 128)]  # requests, tokens of context
_MEMORY_FIELDS = {"RssAnon:", "VmRSS:", "VmHWM:"}


def measure_speed(model: Path, kinds: Sequence[Weights], repeats: int) -> Iterator[tuple[str, list[list[float]]]]:
    """Yields steps by name with the milliseconds that they take with each kind of weights, in turn."""
    sides = [Side(weights.checkpoint or model, weights.dtype, "auto", weights.quantization) for weights in kinds]
    return measure_steps(sides, DECODES, repeats)


class Memory(NamedTuple):
    """The memory of a process that loads a model, beyond what it had before."""

    kept_mib: float  # without the pages of files, which embeddings in float32 stay in
    peak_mib: float  # with them


def measure_memory(model: Path, weights: Weights) -> Memory:
    """In a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_load, model, weights).result()


def _load(model: Path, weights: Weights) -> Memory:
    before = _resident()
    loaded = load_model(weights.config(model))
    assert loaded.decoder is not None
    after = _resident()
    return Memory((after["RssAnon"] - before["RssAnon"]) / 1024, (after["VmHWM"] - before["VmRSS"]) / 1024)


def _resident() -> dict[str, int]:
    """Kibibytes of this process, by their names in Linux."""
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {name.rstrip(":"): int(values[0]) for name, *values in fields if name in _MEMORY_FIELDS}
