"""One of the sides in a process of its own: `python -m benchmarks.compare.side NAME DIRECTORY DTYPE [QUANTIZATION]`.

It loads a model once and answers orders, one line of JSON each. The processes live side by side and take turns; one
without an order waits for the next line and computes nothing. This module needs the standard library only, as a side
may run in a Python environment of its own.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_MODULES = {
    "baton": "baton_side",
    "baton_ngram": "baton_side",
    "baton_pooling": "baton_side",
    "invariant": "baton_side",
    "llamacpp": "llamacpp_side",
    "openvino": "openvino_side",
    "vllm": "vllm_side",
    "vllm_ngram": "vllm_side",
    "vllm_pooling": "vllm_side",
    "transformers": "transformers_side",
    "transformers_pooling": "transformers_side",
    "generate_batch": "generate_batch_side",
}


class Generation(NamedTuple):
    """One batch generated."""

    tokens: list[list[int]]
    seconds: float  # from the order to the last token
    gaps_ms: list[float]  # between the steps that completed a token for all prompts


class Generator(Protocol):
    """A model that one of the sides has loaded."""

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """Returns `num_tokens` greedy tokens after each prompt, ends of sequence ignored. Calls `on_step` after each
        step with the number of tokens that every prompt has by then; sides that pool, once, with 1."""

    def close(self) -> None:
        """Ends what it has started."""


def largest(embedding: Sequence[float]) -> list[int]:
    """Returns the place of its largest number: what sides that pool answer with, in place of tokens."""
    return [max(range(len(embedding)), key=lambda place: abs(embedding[place]))]


def serve(load: Callable[..., Generator]) -> None:
    """Runs a side until its input ends, or it fails, and closes it; `load` gets the command's arguments."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    side = load(*sys.argv[1:])
    print("ready", file=answers)
    try:
        for line in sys.stdin:
            prompts, num_tokens = json.loads(line)
            print(json.dumps(timed(side, prompts, num_tokens)._asdict()), file=answers)
    finally:
        side.close()


def timed(side: Generator, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generation:
    """Generates, and notes when."""
    stamps: list[float] = []

    def note(num_complete: int) -> None:
        stamps.extend([time.perf_counter()] * (num_complete - len(stamps)))

    started = time.perf_counter()
    tokens = side.generate(prompts, num_tokens, note)
    gaps = [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(stamps)]
    return Generation(tokens, stamps[-1] - started, gaps)


def _load(name: str, directory: str, dtype: str, quantization: str | None = None) -> Generator:
    side: Generator = importlib.import_module(f"benchmarks.compare.{_MODULES[name]}").load(
        name, directory, dtype, quantization
    )
    return side


if __name__ == "__main__":
    serve(_load)
