"""The kernel of a race between tokens: see `common.engine.sampling.race`."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from common.engine.cpu_kernels.compiled import Kernel
from common.engine.cpu_kernels.language import MAX_LANES, Builder, ElementType, Value
from common.engine.sampling.noise import GOLDEN, MIX_1, MIX_2

PART = 2048  # tokens of a task


@cache
def race_kernel(num_tokens: int) -> Kernel:
    """bounds = 2**53 * (1 - u) * exp(-score), with 1 - u rounded down; least = the smallest of each PART of them.

    scores and bounds [rows, num_tokens] and least [rows, parts], float32; keys [rows] int64. One task is a part of a
    row.
    """
    num_parts = -(-num_tokens // PART)

    def body(b: Builder, task: Value, a: Any) -> None:
        row, part = task // num_parts, task % num_parts
        start, end = part * PART, b.variable((part + 1) * PART)
        with b.when(end.get() >= num_tokens):
            end.set(b.number(num_tokens))
        scores, bounds = (each.at(row * num_tokens) for each in (a.scores, a.bounds))
        key = a.keys.at(row).load()

        def bound(first: Value, lanes: int) -> Value:
            steps = b.lane_numbers(lanes) if lanes > 1 else b.number(0)
            one_less = (_mixed((steps + first) * _signed(GOLDEN) + key) ^ -1) >> 11
            found = b.real(one_less) * b.exp(b.number(0.0, lanes) - scores.at(first).load(lanes))
            bounds.at(first).store(found)
            return found

        whole = start + (end.get() - start) // MAX_LANES * MAX_LANES
        least = b.variable(b.number(math.inf, MAX_LANES))
        with b.loop(start, whole, MAX_LANES) as i:
            least.set(b.minimum(least.get(), bound(i, MAX_LANES)))
        rest = b.variable(b.min(least.get()))
        with b.loop(whole, end.get()) as i:
            rest.set(b.minimum(rest.get(), bound(i, 1)))
        a.least.at(task).store(rest.get())

    floats = ElementType.FLOAT32
    return Kernel("race", {"scores": floats, "keys": ElementType.INT64, "bounds": floats, "least": floats}, body)


def _mixed(bits: Value) -> Value:
    """SplitMix64's finaliser."""
    bits = (bits ^ (bits >> 30)) * _signed(MIX_1)
    bits = (bits ^ (bits >> 27)) * _signed(MIX_2)
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64)
