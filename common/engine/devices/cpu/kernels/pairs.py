"""Pairs of bfloat16 numbers, two in each lane of a vector of float32: processors multiply and add them at once.

A vector of pairs is a Value whose lanes are as of float32, but hold no numbers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from common.engine.devices.cpu.kernels.language import FLOAT, INT32, MAX_LANES, Builder, Pointer, Value, constant, like
from common.engine.devices.cpu.kernels.processor import features

MULTIPLIES_PAIRS = MAX_LANES == 16 and bool(features().get("avx512bf16"))


class _BFloat16Type(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16Type)

    def __hash__(self) -> int:
        return hash(_BFloat16Type)


_PAIRS = ir.VectorType(_BFloat16Type(), 2 * MAX_LANES)
_UPPER_HALF = 0xFFFF0000  # of a lane


def paired(b: Builder, first: Value, second: Value) -> Value:
    """Both rounded to bfloat16, for processors that have it."""
    nodes = [second.node, first.node]  # the instruction's halves are in this order
    return _interleaved(b, b.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, nodes))


def paired_integers(b: Builder, first: Value, second: Value) -> Value:
    """Both as bfloat16, of whole numbers up to 256: these lose nothing when their float32 is cut."""
    low, high = (b.ir.bitcast(each.node, like(INT32, each.lanes)) for each in (first, second))
    low = b.ir.lshr(low, constant(INT32, 16, first.lanes))
    high = b.ir.and_(high, constant(INT32, _UPPER_HALF, first.lanes))
    return Value(b, b.ir.bitcast(b.ir.or_(low, high), first.node.type))


def load_interleaved(first: Pointer, second: Pointer) -> Value:
    """The next MAX_LANES bfloat16 numbers of each, one of either in each lane."""
    b = first.builder
    halves = [b.read(pointer, ir.IntType(16), MAX_LANES) for pointer in (first, second)]
    order = ir.Constant(ir.VectorType(INT32, 2 * MAX_LANES), list(range(2 * MAX_LANES)))
    return _interleaved(b, b.ir.shuffle_vector(*halves, order))


def load_pairs(pointer: Pointer, lanes: int) -> Value:
    """The next 2 * `lanes` bfloat16 numbers as they are."""
    return Value(pointer.builder, pointer.builder.read(pointer, INT32, lanes))


def load_pair(pointer: Pointer, lanes: int) -> Value:
    """The next two bfloat16 numbers as they are, in every lane."""
    b = pointer.builder
    return b.broadcast(Value(b, b.read(pointer, INT32, 0)), lanes)


def fma_pairs(b: Builder, first: Value, second: Value, third: Value) -> Value:
    """`third` plus, in each lane, the products of two pairs. A processor with an instruction for it rounds
    differently."""
    if not MULTIPLIES_PAIRS:
        for one, other in zip(halves_of(b, first), halves_of(b, second), strict=True):
            third = b.fma(one, other, third)
        return third
    nodes = [third.node, *(b.ir.bitcast(each.node, _PAIRS) for each in (first, second))]
    return Value(b, b.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", third.node.type, nodes))


def halves_of(b: Builder, pairs: Value) -> tuple[Value, Value]:
    """The first and the second numbers of pairs, as float32."""
    return _lower(b, pairs), _upper(b, pairs)


def _interleaved(b: Builder, halves: Any) -> Value:
    """A vector's halves, one number of either in each lane."""
    order = [lane // 2 + lane % 2 * MAX_LANES for lane in range(2 * MAX_LANES)]
    mixed = b.ir.shuffle_vector(halves, halves, ir.Constant(ir.VectorType(INT32, len(order)), order))
    return Value(b, b.ir.bitcast(mixed, like(FLOAT, MAX_LANES)))


def _lower(b: Builder, pairs: Value) -> Value:
    shifted = b.ir.shl(_bits(b, pairs), constant(INT32, 16, pairs.lanes))
    return Value(b, b.ir.bitcast(shifted, like(FLOAT, pairs.lanes)))


def _upper(b: Builder, pairs: Value) -> Value:
    masked = b.ir.and_(_bits(b, pairs), constant(INT32, _UPPER_HALF, pairs.lanes))
    return Value(b, b.ir.bitcast(masked, like(FLOAT, pairs.lanes)))


def _bits(b: Builder, pairs: Value) -> Any:
    return b.ir.bitcast(pairs.node, like(INT32, pairs.lanes))
