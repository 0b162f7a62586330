"""Kernels that sample from logits [rows, vocabulary]: see `common.engine.devices.cpu.sampler`.

One task is a PART of a row. `stride` is the distance of rows in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Value
from common.engine.sampling.noise import GOLDEN, MIX_1, MIX_2

PART = 2048  # tokens of a task
_FLOATS = ElementType.FLOAT32


@kernel_factory
def best_kernel(element: ElementType, num_tokens: int) -> KernelSource:
    """best [rows, parts], float32: the largest logit of each part; infinite if one is NaN."""
    num_parts = -(-num_tokens // PART)

    def body(b: Builder, task: Value, a: Any) -> None:
        logits = a.logits.at(task // num_parts * a.stride)

        def logit(first: Value, lanes: int) -> Value:
            value = logits.at(first).load(lanes)
            return b.select(value >= value, value, math.inf)

        a.best.at(task).store(_reduced(b, task % num_parts, num_tokens, logit, b.maximum, b.max, -math.inf))

    return KernelSource("best", {"logits": element, "stride": None, "best": _FLOATS}, body)


@kernel_factory
def bound_kernel(element: ElementType, num_tokens: int) -> KernelSource:
    """bounds [rows, vocabulary] and the least of each part, float32.

    score = (logit - best) / temperature, with best and temperatures [rows], float32. The bound of a token is
    2**53 * (1 - u) * exp(-score), with 1 - u rounded down; u follows from keys [rows], int64. At temperature 0 it is
    best - logit.
    """
    num_parts = -(-num_tokens // PART)

    def body(b: Builder, task: Value, a: Any) -> None:
        row = task // num_parts
        logits, bounds = a.logits.at(row * a.stride), a.bounds.at(row * num_tokens)
        best, temperature, key = (each.at(row).load() for each in (a.best, a.temperatures, a.keys))
        is_drawn = b.number(0.0) < temperature

        def bound(first: Value, lanes: int) -> Value:
            below = b.number(best, lanes) - logits.at(first).load(lanes)
            steps = b.lane_numbers(lanes) + first if lanes > 1 else first
            one_less = (_mixed(steps * _signed(GOLDEN) + key) ^ -1) >> 11  # 2**53 * (1 - u)
            found = b.select(is_drawn, b.real(one_less) * b.exp(below / temperature), below)
            bounds.at(first).store(found)
            return found

        a.least.at(task).store(_reduced(b, task % num_parts, num_tokens, bound, b.minimum, b.min, math.inf))

    arguments = {"logits": element, "stride": None, "best": _FLOATS, "temperatures": _FLOATS, "keys": ElementType.INT64}
    return KernelSource("bound", {**arguments, "bounds": _FLOATS, "least": _FLOATS}, body)


def _reduced(
    b: Builder,
    part: Value,
    num_tokens: int,
    number_at: Callable[[Value, int], Value],
    combine: Callable[[Value, Value], Value],
    reduce: Callable[[Value], Value],
    start: float,
) -> Value:
    """The numbers of a part, combined. `number_at` (token, lanes) is called once for each token."""
    first, end = part * PART, b.variable((part + 1) * PART)
    with b.when(end.get() >= num_tokens):
        end.set(b.number(num_tokens))
    whole = first + (end.get() - first) // MAX_LANES * MAX_LANES
    vector = b.variable(b.number(start, MAX_LANES))
    with b.loop(first, whole, MAX_LANES) as token:
        vector.set(combine(vector.get(), number_at(token, MAX_LANES)))
    found = b.variable(reduce(vector.get()))
    with b.loop(whole, end.get()) as token:
        found.set(combine(found.get(), number_at(token, 1)))
    return found.get()


def _mixed(bits: Value) -> Value:
    """SplitMix64's finaliser."""
    bits = (bits ^ (bits >> 30)) * _signed(MIX_1)
    bits = (bits ^ (bits >> 27)) * _signed(MIX_2)
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    """The signed integer with these 64 bits, of which the first is set."""
    return bits - (1 << 64)
