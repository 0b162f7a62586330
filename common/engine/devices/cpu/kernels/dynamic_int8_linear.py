"""Products of int8 activations with int8 weights, with the instructions of x86 processors for them (AVX512-VNNI).

An instruction adds the products of four inputs to each of 16 sums. It takes one factor without a sign: 128 is added to
the activations, and what that adds to an output taken off its sum. Integers add up to the same in any order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import (
    INT32,
    MAX_LANES,
    Builder,
    ElementType,
    Pointer,
    Value,
    constant,
    like,
)
from common.engine.devices.cpu.kernels.processor import features, is_x86

DEPTH = 64  # inputs of an instruction, of which those of a layer are a multiple
BLOCK = 16  # outputs of a task

_OFFSET = 128  # that makes activations positive
_LARGEST = 127.0
_BYTE = ir.IntType(8)


def multiplies_int8() -> bool:
    """True if the processor has the instructions."""
    return bool(features().get("avx512vnni")) and MAX_LANES == BLOCK and is_x86()


@kernel_factory
def round_rows_kernel(element: ElementType) -> KernelSource:
    """rounded = inputs / scale of their row, whose largest number is 127 of it; a task is a row.

    inputs [rows, size] of `element`, rounded [rows, padded] int8, with zeros after `size`, a multiple of MAX_LANES, and
    scale [rows] float32.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        inputs, rounded = a.inputs.at(task * a.size), a.rounded.at(task * a.padded)
        largest, poison = (b.variable(b.number(0.0, MAX_LANES)) for _ in range(2))
        with b.loop(0, a.size, MAX_LANES) as k:
            value = inputs.at(k).load(MAX_LANES)
            largest.set(b.maximum(largest.get(), b.maximum(value, b.number(0.0, MAX_LANES) - value)))
            poison.set(poison.get() + value * 0.0)  # NaN of NaN or infinity, which the maximum ignores
        most = b.max(largest.get())
        a.scale.at(task).store(most / _LARGEST + b.sum(poison.get()))
        steps = b.broadcast(b.select(b.number(0.0) < most, b.number(_LARGEST) / most, 0.0), MAX_LANES)
        with b.loop(0, a.size, MAX_LANES) as k:
            _store_rounded(b, rounded.at(k), inputs.at(k).load(MAX_LANES) * steps)
        with b.loop(a.size, a.padded, MAX_LANES) as k:
            _store_rounded(b, rounded.at(k), b.number(0.0, MAX_LANES))

    numbers = {"inputs": element, "rounded": ElementType.INT8, "scale": ElementType.FLOAT32}
    return KernelSource("round_rows", numbers | dict.fromkeys(("size", "padded")), body)


@kernel_factory
def dynamic_int8_linear_kernel(element: ElementType, *, has_bias: bool) -> KernelSource:
    """out = inputs @ weight.T * weight_scale * scale of the row + bias; a task is a block of outputs.

    inputs [num_rows, in_features] and weight [out_features, in_features] int8; scale [num_rows], weight_scale and bias
    [out_features] float32; weight_sum [out_features], the sums of the weights of an output, int32 in the places of
    float32; out [num_rows, out_features] of `element`.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        first_output = task * BLOCK
        weight = a.weight.at(first_output * a.in_features)
        with b.loop(0, a.num_rows) as row:
            source = a.inputs.at(row * a.in_features)
            sums = [b.variable(Value(b, constant(INT32, 0, MAX_LANES))) for _ in range(BLOCK)]
            with b.loop(0, a.in_features, DEPTH) as k:
                inputs = b.ir.xor(b.read(source.at(k), _BYTE, DEPTH), constant(_BYTE, _OFFSET, DEPTH))
                with b.when(row < 1):
                    for output in range(BLOCK, 2 * BLOCK):  # of the next task
                        b.prefetch(weight.at(a.in_features * output + k), DEPTH, near=False)
                for output, sum_ in enumerate(sums):
                    weights = b.read(weight.at(a.in_features * output + k), _BYTE, DEPTH)
                    nodes = [sum_.get().node, inputs, weights]
                    sum_.set(Value(b, b.intrinsic("llvm.x86.avx512.vpdpbusd.512", nodes[0].type, nodes)))
            total = b.sums(lambda output, sums=sums: sums[output].get(), BLOCK)  # type: ignore[misc]
            added = Value(b, b.read(a.weight_sum.at(first_output), INT32, MAX_LANES))
            exact = Value(b, b.ir.sub(total.node, b.ir.mul(added.node, constant(INT32, _OFFSET, MAX_LANES))))
            _store_scaled(b, a, exact, row, first_output, has_bias=has_bias)

    numbers = {"inputs": ElementType.INT8, "weight": ElementType.INT8, "weight_sum": ElementType.FLOAT32}
    return KernelSource("dynamic_int8_linear", numbers | _results(element), body)


@kernel_factory
def scale_sums_kernel(element: ElementType, *, has_bias: bool) -> KernelSource:
    """out = sums * weight_scale * scale of the row + bias, for sums [num_rows, out_features], int32 in the places of
    float32; a task is a row. Others are as in `dynamic_int8_linear_kernel`."""

    def body(b: Builder, task: Value, a: Any) -> None:
        with b.loop(0, a.out_features, MAX_LANES) as output:
            total = Value(b, b.read(a.sums.at(task * a.out_features + output), INT32, MAX_LANES))
            _store_scaled(b, a, total, task, output, has_bias=has_bias)

    return KernelSource("scale_sums", {"sums": ElementType.FLOAT32} | _results(element), body)


def _results(element: ElementType) -> dict[str, ElementType | None]:
    floats = dict.fromkeys(("scale", "weight_scale", "bias"), ElementType.FLOAT32)
    return {"out": element} | floats | dict.fromkeys(("num_rows", "in_features", "out_features"))


def _store_scaled(b: Builder, a: Any, total: Value, row: Value, output: Value, *, has_bias: bool) -> None:
    scaled = b.real(total) * a.weight_scale.at(output).load(MAX_LANES)
    of_row = b.broadcast(a.scale.at(row).load(), MAX_LANES)
    result = b.fma(scaled, of_row, a.bias.at(output).load(MAX_LANES)) if has_bias else scaled * of_row
    a.out.at(row * a.out_features + output).store(result)


def _store_rounded(b: Builder, target: Pointer, value: Value) -> None:
    integers = b.ir.fptosi(b.rounded(value).node, like(INT32, MAX_LANES))
    b.ir.store(b.ir.trunc(integers, like(_BYTE, MAX_LANES)), target.address, align=1)
