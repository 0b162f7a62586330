"""Kernels around a decoder's linear layers: embedding, residual and RMS norm, and SwiGLU. One task is one token."""

from __future__ import annotations

from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Pointer, Value, lanes_of

_NUMBERS_OF_TASK = 2048


@kernel_factory
def embed_kernel(element: ElementType, size: int, *, is_part: bool = False) -> KernelSource:
    """hidden = rows of the table, delta = 0.

    token_ids [tokens], table [vocabulary, size] of `element`; hidden float32 and delta of `element`, [tokens, size].
    `is_part`: the table is of the tokens from `first` on, up to row `zeros`, which stands for all others.
    """
    lanes = lanes_of(size)

    def body(b: Builder, token: Value, a: Any) -> None:
        number = a.token_ids.at(token).load()
        if is_part:
            number = number - a.first
            number = b.select((number >= 0) & (number < a.zeros), number, a.zeros)
        row = a.table.at(number * size)
        hidden, delta = (each.at(token * size) for each in (a.hidden, a.delta))
        with b.loop(0, size, lanes) as i:
            hidden.at(i).store(row.at(i).load(lanes))
            delta.at(i).store(b.number(0.0, lanes))

    arguments = {"token_ids": ElementType.INT64, "table": element, "hidden": ElementType.FLOAT32, "delta": element}
    return KernelSource("embed", arguments | (dict.fromkeys(("first", "zeros")) if is_part else {}), body)


@kernel_factory
def add_norm_kernel(element: ElementType, size: int) -> KernelSource:
    """hidden += delta, then out = RMS norm of hidden, times weight.

    hidden float32 [tokens, size], delta and out [tokens, size] of `element`, weight float32 [size]; epsilon points to
    one float32.
    """
    lanes = lanes_of(size)

    def body(b: Builder, token: Value, a: Any) -> None:
        hidden, delta, out = (each.at(token * size) for each in (a.hidden, a.delta, a.out))
        squares = b.variable(b.number(0.0, lanes))
        with b.loop(0, size, lanes) as i:
            value = hidden.at(i).load(lanes) + delta.at(i).load(lanes)
            hidden.at(i).store(value)
            squares.set(b.fma(value, value, squares.get()))
        scale = inverse_rms(b, squares.get(), size, a.epsilon)
        with b.loop(0, size, lanes) as i:
            out.at(i).store(hidden.at(i).load(lanes) * scale * a.weight.at(i).load(lanes))

    floats = ElementType.FLOAT32
    return KernelSource(
        "add_norm", {"hidden": floats, "delta": element, "out": element, "weight": floats, "epsilon": floats}, body
    )


@kernel_factory
def norm_kernel(element: ElementType, size: int) -> KernelSource:
    """out = RMS norm of inputs, times weight. A task is `rows_of_norm(size)` rows.

    inputs and out [num_rows, size] of `element`, weight float32 [size]; epsilon points to one float32.
    """
    lanes, share = lanes_of(size), rows_of_norm(size)

    def body(b: Builder, task: Value, a: Any) -> None:
        first, last = task * share, (task + 1) * share
        with b.loop(first, b.select(last < a.num_rows, last, a.num_rows)) as row:
            inputs, out = a.inputs.at(row * size), a.out.at(row * size)
            squares = b.variable(b.number(0.0, lanes))
            with b.loop(0, size, lanes) as i:
                value = inputs.at(i).load(lanes)
                squares.set(b.fma(value, value, squares.get()))
            scale = inverse_rms(b, squares.get(), size, a.epsilon)
            with b.loop(0, size, lanes) as i:
                out.at(i).store(inputs.at(i).load(lanes) * scale * a.weight.at(i).load(lanes))

    floats = ElementType.FLOAT32
    pointers = {"inputs": element, "out": element, "weight": floats, "epsilon": floats}
    return KernelSource("norm", pointers | {"num_rows": None}, body)


def rows_of_norm(size: int) -> int:
    """Rows of this size that are worth a task."""
    return max(1, _NUMBERS_OF_TASK // size)


@kernel_factory
def copy_kernel(element: ElementType, size: int, stride: int) -> KernelSource:
    """out = hidden, float32 [tokens, size]; out is of `element`, its rows `stride` numbers apart."""
    lanes = lanes_of(size)

    def body(b: Builder, token: Value, a: Any) -> None:
        hidden, out = a.hidden.at(token * size), a.out.at(token * stride)
        with b.loop(0, size, lanes) as i:
            out.at(i).store(hidden.at(i).load(lanes))

    return KernelSource("copy", {"hidden": ElementType.FLOAT32, "out": element}, body)


@kernel_factory
def silu_mul_kernel(element: ElementType, size: int) -> KernelSource:
    """out = silu(gate) * up; gate and up are the halves of gate_up [tokens, 2 * size], out is [tokens, size]."""
    lanes = lanes_of(size)

    def body(b: Builder, token: Value, a: Any) -> None:
        gate, out = a.gate_up.at(token * (2 * size)), a.out.at(token * size)
        up = gate.at(size)
        with b.loop(0, size, lanes) as i:
            out.at(i).store(silu(b, gate.at(i).load(lanes)) * up.at(i).load(lanes))

    return KernelSource("silu_mul", {"gate_up": element, "out": element}, body)


def silu(b: Builder, value: Value) -> Value:
    """value * sigmoid(value)"""
    return value / (b.exp(b.number(0.0, value.lanes) - value) + 1.0)


def inverse_rms(b: Builder, squares: Value, size: int, epsilon: Pointer) -> Value:
    """1 / sqrt(mean + epsilon), from a vector of sums of squares."""
    mean = b.sum(squares) * (1.0 / size)
    return b.number(1.0) / b.sqrt(mean + epsilon.load())
