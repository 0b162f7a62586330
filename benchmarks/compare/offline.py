"""Batches of prompts, given to each side in turn."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.compare.checkpoints import Checkpoint
from benchmarks.compare.limits import Limits, Work
from benchmarks.compare.peers import Side
from benchmarks.compare.side import Generation
from benchmarks.harness.figures import in_turn
from benchmarks.harness.processes import ChildEndedError

_CONTEXT, _DECODED = 128, 48
FIRST_WORD = 3  # tokens below may be special
_REST_S = 0.5  # before each turn: threads of the side before go on spinning, those of Intel's OpenMP for 0.2 s


def _random_prompt(source: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    return [source.randrange(FIRST_WORD, vocab_size) for _ in range(num_tokens)]


class Measure(NamedTuple):
    """A run, and the figure to take of it."""

    name: str
    unit: str
    higher_is_better: bool
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    figure: Callable[[Generation], float]
    limit: Callable[[Work, Limits], float]  # the best that the machine could do
    warm_up_tokens: int = 4
    prompt: Callable[[random.Random, int, int], list[int]] = _random_prompt  # from vocabulary and length


def _decode(batch: int) -> Measure:
    return Measure(
        f"decode, batch {batch}",
        "ms",
        False,
        batch,
        _CONTEXT,
        _DECODED,
        lambda generation: statistics.median(generation.gaps_ms),
        lambda work, limits: 1e3 * work.decode_s(limits, batch, _CONTEXT + _DECODED // 2),
    )


def _prefill(num_tokens: int) -> Measure:
    return Measure(
        f"prefill, {num_tokens} tokens",
        "tokens/s",
        True,
        1,
        num_tokens,
        1,
        lambda generation: num_tokens / generation.seconds,
        lambda work, limits: num_tokens / work.prefill_s(limits, num_tokens),
    )


def _throughput(num_prompts: int, prompt_tokens: int, output_tokens: int) -> Measure:
    def limit(work: Work, limits: Limits) -> float:
        prefill_s = num_prompts * work.prefill_s(limits, prompt_tokens)
        step_s = work.decode_s(limits, num_prompts, prompt_tokens + output_tokens // 2)
        return num_prompts * output_tokens / (prefill_s + (output_tokens - 1) * step_s)

    return Measure(
        f"offline, {num_prompts} x ({prompt_tokens} in, {output_tokens} out)",
        "tokens/s",
        True,
        num_prompts,
        prompt_tokens,
        output_tokens,
        lambda generation: num_prompts * output_tokens / generation.seconds,
        limit,
    )


MEASURES = (_decode(1), _decode(8), _decode(32), _prefill(1024), _throughput(32, 256, 64))


class Row(NamedTuple):
    """One measure of one model."""

    model: str
    precision: str
    measure: str
    unit: str
    higher_is_better: bool
    figures: dict[str, list[float]]  # by side, one for each repeat
    limit: float
    same_tokens: dict[str, bool]  # by side: the tokens were Baton's


def measure_model(
    model: str,
    precision: str,
    checkpoints: Mapping[str, Checkpoint],
    measures: Sequence[Measure],
    repeats: int,
    work: Work,
    limits: Limits,
    logs: Path,
) -> Iterator[Row]:
    """Measures of one model, on the sides that have a checkpoint of it and start. Raises ChildEndedError."""
    with ExitStack() as stack:
        sides = []
        for name, checkpoint in checkpoints.items():
            try:
                sides.append(stack.enter_context(Side(name, checkpoint, logs / f"{name}.log")))
            except ChildEndedError as error:
                if name.startswith("baton"):
                    raise
                print(f"{model} {precision}: {name} does not take part: {error}", file=sys.stderr)
        for measure in measures:
            yield _measure(model, precision, measure, sides, repeats, work.vocab_size, measure.limit(work, limits))


def _measure(
    model: str, precision: str, measure: Measure, sides: Sequence[Side], repeats: int, vocab_size: int, limit: float
) -> Row:
    figures: dict[str, list[float]] = {side.name: [] for side in sides}
    same = {side.name: True for side in sides}
    for repeat in range(repeats + 1):  # the first sets things up
        source = random.Random(repeat)
        prompts = [measure.prompt(source, vocab_size, measure.prompt_tokens) for _ in range(measure.num_prompts)]
        num_tokens = measure.output_tokens if repeat else min(measure.output_tokens, measure.warm_up_tokens)
        generations = {}
        for side in in_turn(sides, repeat):
            time.sleep(_REST_S)
            generations[side.name] = side.generate(prompts, num_tokens)
        for side in sides:
            same[side.name] &= generations[side.name].tokens == generations[sides[0].name].tokens
            if repeat:
                figures[side.name].append(measure.figure(generations[side.name]))
    return Row(model, precision, measure.name, measure.unit, measure.higher_is_better, figures, limit, same)
