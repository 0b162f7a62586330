"""The language of the CPU kernels: integers, float32 numbers and vectors, over LLVM's IR builder.

Python runs while a kernel is built: a Python loop is unrolled, `Builder.loop` is a loop of the kernel. Memory holds
float32, bfloat16, or int8 that is only read; a load gives float32, a store rounds to the nearest even number. Products
and sums may be contracted to fused multiply-adds, and are never reordered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import binding, ir

MAX_LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8  # float32 numbers in a register, at most
_MIN_LANES = 4  # of a vector; LLVM 22 generates wrong code for some shuffles of two

_INT = ir.IntType(64)
_INT32 = ir.IntType(32)
_BYTE = ir.IntType(8)
_FLOAT = ir.FloatType()
_POINTER = ir.PointerType()
_CONTRACT = ("contract",)
_CACHE_LINE = 64  # bytes; scratch memory begins at one


class _BFloat16Type(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16Type)

    def __hash__(self) -> int:
        return hash(_BFloat16Type)


_BFLOAT16 = _BFloat16Type()
MULTIPLIES_PAIRS = MAX_LANES == 16 and bool(binding.get_host_cpu_features().get("avx512bf16"))


class ElementType(enum.Enum):
    """Type of the numbers in memory; the value is their size in bytes."""

    FLOAT32 = 4
    BFLOAT16 = 2
    INT8 = 1
    INT64 = 8


def element_type_of(dtype: torch.dtype) -> ElementType:
    """Of a tensor's numbers."""
    return _ELEMENT_TYPES[dtype]


_ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.int8: ElementType.INT8,
    torch.int64: ElementType.INT64,
}


def lanes_of(size: int) -> int:
    """Numbers that are worked on at once in rows of `size`: a power of two; 1 where that would be few."""
    lanes = min(MAX_LANES, size & -size)
    return lanes if lanes >= _MIN_LANES else 1


class Value:
    """An integer, a float32, a vector of either, or a truth value."""

    def __init__(self, builder: Builder, node: Any) -> None:
        self._builder = builder
        self.node = node

    @property
    def lanes(self) -> int:
        """Numbers in a vector; 0 for a single number."""
        return self.node.type.count if isinstance(self.node.type, ir.VectorType) else 0

    @property
    def is_float(self) -> bool:
        """True for float32, single or vector."""
        return bool(_element(self.node.type) == _FLOAT)

    def __add__(self, other: Operand) -> Value:
        return self._apply("fadd", "add", other)

    def __sub__(self, other: Operand) -> Value:
        return self._apply("fsub", "sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self._apply("fmul", "mul", other)

    def __truediv__(self, other: Operand) -> Value:
        return self._apply("fdiv", "sdiv", other)

    def __floordiv__(self, other: Operand) -> Value:
        """Of integers that are not negative."""
        return self._apply("fdiv", "udiv", other)

    def __mod__(self, other: Operand) -> Value:
        """Of integers that are not negative."""
        return self._apply("frem", "urem", other)

    def __lt__(self, other: Operand) -> Value:
        return self._compare("<", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare(">=", other)

    def __and__(self, other: Value) -> Value:
        return Value(self._builder, self._builder.ir.and_(self.node, other.node))

    def __xor__(self, other: Operand) -> Value:
        mine, its = self._builder.matched(self, other)
        return Value(self._builder, self._builder.ir.xor(mine.node, its.node))

    def __rshift__(self, count: int) -> Value:
        """Of an integer's bits: zeros come in from above."""
        mine, its = self._builder.matched(self, count)
        return Value(self._builder, self._builder.ir.lshr(mine.node, its.node))

    def _apply(self, of_floats: str, of_ints: str, other: Operand) -> Value:
        mine, its = self._builder.matched(self, other)
        if mine.is_float:
            return Value(self._builder, getattr(self._builder.ir, of_floats)(mine.node, its.node, flags=_CONTRACT))
        return Value(self._builder, getattr(self._builder.ir, of_ints)(mine.node, its.node))

    def _compare(self, relation: str, other: Operand) -> Value:
        mine, its = self._builder.matched(self, other)
        compare = self._builder.ir.fcmp_ordered if mine.is_float else self._builder.ir.icmp_signed
        return Value(self._builder, compare(relation, mine.node, its.node))


Operand = Value | int | float


@dataclass(frozen=True)
class Pointer:
    """Address of numbers of one type."""

    builder: Builder
    address: Any
    element: ElementType

    def at(self, index: Operand) -> Pointer:
        """Address `index` numbers further on."""
        offset = (self.builder.number(index) * self.element.value).node
        address = self.builder.ir.gep(self.address, [offset], source_etype=_BYTE)
        return Pointer(self.builder, address, self.element)

    @property
    def number(self) -> Value:
        """The address, as an integer."""
        return Value(self.builder, self.builder.ir.ptrtoint(self.address, _INT))

    def of(self, element: ElementType) -> Pointer:
        """The same address, of numbers of another type."""
        return Pointer(self.builder, self.address, element)

    def load(self, lanes: int = 0) -> Value:
        """One number, or a vector of the next `lanes`."""
        return self.builder.load(self, lanes)

    def store(self, value: Value) -> None:
        """Writes the number or the vector."""
        self.builder.store(self, value)

    def shared(self) -> Value:
        """The integer, which other threads change."""
        return Value(self.builder, self.builder.ir.load_atomic(self.address, "seq_cst", self.element.value, typ=_INT))

    def share(self, value: Operand) -> None:
        """Writes an integer that other threads read."""
        self.builder.ir.atomic_rmw("xchg", self.address, self.builder.number(value).node, "seq_cst")

    def add_shared(self, value: int) -> Value:
        """Adds to an integer that other threads change; returns what it was."""
        return Value(self.builder, self.builder.ir.atomic_rmw("add", self.address, ir.Constant(_INT, value), "seq_cst"))

    def replace_shared(self, expected: Value, value: Value) -> Value:
        """Writes an integer that other threads change if it is what was expected; returns whether it was."""
        nodes = expected.node, value.node
        result = self.builder.ir.cmpxchg(self.address, *nodes, "seq_cst", "seq_cst")
        return Value(self.builder, self.builder.ir.extract_value(result, 1))


class Variable:
    """A value that changes in a loop."""

    def __init__(self, builder: Builder, initial: Value) -> None:
        self._builder = builder
        self._type = initial.node.type
        self._slot = builder.slot(self._type)
        self.set(initial)

    def get(self) -> Value:
        """The value now."""
        return Value(self._builder, self._builder.ir.load(self._slot, typ=self._type))

    def set(self, value: Value) -> None:
        """Changes the value."""
        self._builder.ir.store(value.node, self._slot)


class Builder:
    """Appends instructions to one function."""

    def __init__(self, function: ir.Function) -> None:
        self._module = function.module
        self.ir = ir.IRBuilder(function.append_basic_block("entry"))

    def number(self, value: Operand, lanes: int = 0) -> Value:
        """A constant, or `value` itself; in every one of `lanes` lanes."""
        if not isinstance(value, Value):
            kind = _FLOAT if isinstance(value, float) else _INT
            value = Value(self, ir.Constant(kind, value))
        return self._broadcast(value, lanes) if lanes > 1 and not value.lanes else value

    def matched(self, first: Value, second: Operand) -> tuple[Value, Value]:
        """Both with the same number of lanes."""
        if not isinstance(second, Value) and first.is_float:
            second = float(second)
        other = self.number(second)
        lanes = max(first.lanes, other.lanes)
        return self.number(first, lanes), self.number(other, lanes)

    def lane_numbers(self, lanes: int) -> Value:
        """The integers 0, 1, 2, ... as a vector."""
        return Value(self, ir.Constant(ir.VectorType(_INT, lanes), list(range(lanes))))

    def lane(self, vector: Value, index: int) -> Value:
        """One number of a vector."""
        return Value(self, self.ir.extract_element(vector.node, ir.Constant(_INT32, index)))

    def select(self, condition: Value, first: Operand, second: Operand) -> Value:
        """`first` where the condition holds, else `second`."""
        lanes = condition.lanes
        then, otherwise = self.number(first, lanes), self.number(second, lanes)
        return Value(self, self.ir.select(condition.node, then.node, otherwise.node))

    def variable(self, initial: Operand) -> Variable:
        """A variable of the function."""
        return Variable(self, self.number(initial))

    def scratch(self, count: int) -> Pointer:
        """Memory of the running thread for `count` float32 numbers; its content is undefined at first."""
        return Pointer(self, self.slot(ir.ArrayType(_FLOAT, count)), ElementType.FLOAT32)

    def slot(self, kind: Any) -> Any:
        """Memory of the running thread for one `kind`."""
        with self.ir.goto_entry_block():
            slot = self.ir.alloca(kind)
        slot.align = _CACHE_LINE
        slot.type = _POINTER  # llvmlite's is one of a type, which would not accept vectors
        return slot

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        """Runs the body for each index from `start`, while below `stop`."""
        index = self.variable(start)
        end = self.number(stop)
        condition = self.ir.append_basic_block("condition")
        body = self.ir.append_basic_block("body")
        after = self.ir.append_basic_block("after")
        self.ir.branch(condition)
        self.ir.position_at_end(condition)
        self.ir.cbranch((index.get() < end).node, body, after)
        self.ir.position_at_end(body)
        now = index.get()
        yield now
        index.set(now + step)
        self.ir.branch(condition)
        self.ir.position_at_end(after)

    def pointer(self, address: Value, element: ElementType) -> Pointer:
        """To the numbers at an address, an integer."""
        return Pointer(self, self.ir.inttoptr(address.node, _POINTER), element)

    def call(self, function: Value, *arguments: Operand) -> Value:
        """Calls the function at an address, which takes integers and returns one of 32 bits, if any."""
        nodes = [self.number(argument).node for argument in arguments]
        callee = self.ir.inttoptr(function.node, ir.PointerType(ir.FunctionType(_INT32, [_INT] * len(nodes))))
        return Value(self, self.ir.sext(self.ir.call(callee, nodes), _INT))

    def pause(self) -> None:
        """Lets the other thread of a core go on for a moment."""
        if binding.get_process_triple().startswith("x86_64"):
            self.ir.call(self._declared("llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Runs the body if the condition holds."""
        with self.ir.if_then(condition.node):
            yield

    @contextmanager
    def otherwise(self, condition: Value) -> Iterator[None]:
        """Runs the body unless the condition holds."""
        with self.ir.if_then(self.ir.not_(condition.node)):
            yield

    @contextmanager
    def repeat(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Runs the body again and again while the condition holds."""
        test, body, after = (self.ir.append_basic_block(name) for name in ("test", "body", "after"))
        self.ir.branch(test)
        self.ir.position_at_end(test)
        self.ir.cbranch(condition().node, body, after)
        self.ir.position_at_end(body)
        yield
        self.ir.branch(test)
        self.ir.position_at_end(after)

    def load(self, pointer: Pointer, lanes: int = 0) -> Value:
        """See Pointer.load. One lane is a single number."""
        lanes = 0 if lanes == 1 else lanes
        match pointer.element:
            case ElementType.BFLOAT16:
                raw = self._read(pointer, ir.IntType(16), lanes)
                wide = self.ir.shl(self.ir.zext(raw, _like(_INT32, lanes)), _constant(_INT32, 16, lanes))
                return Value(self, self.ir.bitcast(wide, _like(_FLOAT, lanes)))
            case ElementType.FLOAT32:
                return Value(self, self._read(pointer, _FLOAT, lanes))
            case ElementType.INT8:
                return Value(self, self.ir.sitofp(self._read(pointer, _BYTE, lanes), _like(_FLOAT, lanes)))
            case ElementType.INT64:
                return Value(self, self._read(pointer, _INT, lanes))

    def store(self, pointer: Pointer, value: Value) -> None:
        """See Pointer.store."""
        node = value.node
        if pointer.element is ElementType.BFLOAT16:
            node = self._rounded_to_bfloat16(value)
        self.ir.store(node, pointer.address, align=pointer.element.value)

    def paired(self, first: Value, second: Value) -> Value:
        """Both as bfloat16, two in each lane, for processors that have it. Lanes are as of float32, but no numbers."""
        pairs, kind = ir.VectorType(_BFLOAT16, 2 * MAX_LANES), first.node.type
        function = self._declared("llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.FunctionType(pairs, [kind, kind]))
        return self._interleaved(self.ir.call(function, [second.node, first.node]))  # whose halves are in this order

    def paired_integers(self, first: Value, second: Value) -> Value:
        """Both as bfloat16, two in each lane, of whole numbers up to 256: these lose nothing when their float32 is cut.
        Lanes are as of float32, but no numbers."""
        low, high = (self.ir.bitcast(each.node, _like(_INT32, each.lanes)) for each in (first, second))
        low = self.ir.lshr(low, _constant(_INT32, 16, first.lanes))
        high = self.ir.and_(high, _constant(_INT32, 0xFFFF0000, first.lanes))
        return Value(self, self.ir.bitcast(self.ir.or_(low, high), first.node.type))

    def load_interleaved(self, first: Pointer, second: Pointer) -> Value:
        """MAX_LANES bfloat16 numbers each, two in each lane. Lanes are as of float32, but no numbers."""
        halves = [self._read(pointer, ir.IntType(16), MAX_LANES) for pointer in (first, second)]
        order = ir.Constant(ir.VectorType(_INT32, 2 * MAX_LANES), list(range(2 * MAX_LANES)))
        return self._interleaved(self.ir.shuffle_vector(*halves, order))

    def _interleaved(self, halves: Any) -> Value:
        order = [lane // 2 + lane % 2 * MAX_LANES for lane in range(2 * MAX_LANES)]
        mask = ir.Constant(ir.VectorType(_INT32, len(order)), order)
        mixed = self.ir.shuffle_vector(halves, halves, mask)
        return Value(self, self.ir.bitcast(mixed, _like(_FLOAT, MAX_LANES)))

    def load_pairs(self, pointer: Pointer, lanes: int) -> Value:
        """The next 2 * `lanes` bfloat16 numbers as they are, two in each lane."""
        return Value(self, self._read(pointer, _INT32, lanes))

    def load_pair(self, pointer: Pointer, lanes: int) -> Value:
        """The next two bfloat16 numbers as they are, in every lane."""
        return self._broadcast(Value(self, self._read(pointer, _INT32, 0)), lanes)

    def fma_pairs(self, first: Value, second: Value, third: Value) -> Value:
        """`third` plus, in each lane, the products of two pairs of bfloat16 numbers. A processor with an instruction
        for it rounds differently."""
        if not MULTIPLIES_PAIRS:
            for half in (self._lower, self._upper):
                third = self.fma(half(first), half(second), third)
            return third
        pairs, kind = ir.VectorType(_BFLOAT16, 2 * MAX_LANES), third.node.type
        function = self._declared("llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(kind, [kind, pairs, pairs]))
        operands = [third.node, *(self.ir.bitcast(each.node, pairs) for each in (first, second))]
        return Value(self, self.ir.call(function, operands))

    def _lower(self, pairs: Value) -> Value:
        shifted = self.ir.shl(pairs.node, _constant(_INT32, 16, pairs.lanes))
        return Value(self, self.ir.bitcast(shifted, _like(_FLOAT, pairs.lanes)))

    def _upper(self, pairs: Value) -> Value:
        masked = self.ir.and_(pairs.node, _constant(_INT32, 0xFFFF0000, pairs.lanes))
        return Value(self, self.ir.bitcast(masked, _like(_FLOAT, pairs.lanes)))

    def configure_tiles(self, configuration: Pointer) -> None:
        """Gives the tile registers the shapes of a configuration, see `tiled_linear`; they are zero then."""
        self._tiles("ldtilecfg", [], [configuration.address])

    def release_tiles(self) -> None:
        """Ends the use of tile registers."""
        self._tiles("tilerelease", [], [])

    def clear_tile(self, tile: int) -> None:
        """Makes a tile zero."""
        self._tiles("tilezero", [tile], [])

    def load_tile(self, tile: int, pointer: Pointer, stride: Operand) -> None:
        """Reads the rows of a tile, `stride` numbers from one to the next."""
        self._tiles("tileloadd64", [tile], [pointer.address, self._bytes(pointer, stride)])

    def store_tile(self, tile: int, pointer: Pointer, stride: Operand) -> None:
        """Writes the rows of a tile, `stride` numbers from one to the next."""
        self._tiles("tilestored64", [tile], [pointer.address, self._bytes(pointer, stride)])

    def multiply_tiles(self, total: int, first: int, second: int) -> None:
        """total += first @ second, of bfloat16 numbers: first [rows, 2k], second [k, columns, 2], total float32."""
        self._tiles("tdpbf16ps", [total, first, second], [])

    def _tiles(self, name: str, tiles: Sequence[int], operands: Sequence[Any]) -> None:
        operands = [*(ir.Constant(ir.IntType(8), tile) for tile in tiles), *operands]
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        self.ir.call(self._declared(f"llvm.x86.{name}", kind), operands)

    def _bytes(self, pointer: Pointer, count: Operand) -> Any:
        return (self.number(count) * pointer.element.value).node

    def prefetch(self, pointer: Pointer, count: int) -> None:
        """Asks for `count` numbers to be brought into the processor's cache."""
        kinds = [_POINTER, _INT32, _INT32, _INT32]
        function = self._declared("llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), kinds))
        to_read, keep, data = ir.Constant(_INT32, 0), ir.Constant(_INT32, 3), ir.Constant(_INT32, 1)
        for i in range(0, count, _CACHE_LINE // pointer.element.value):
            self.ir.call(function, [pointer.at(i).address, to_read, keep, data])

    def _declared(self, name: str, kind: Any) -> Any:
        return self._module.globals.get(name) or ir.Function(self._module, kind, name)

    def _read(self, pointer: Pointer, kind: Any, lanes: int) -> Any:
        return self.ir.load(pointer.address, typ=_like(kind, lanes), align=pointer.element.value)

    def _rounded_to_bfloat16(self, value: Value) -> Any:
        """The upper halves, rounded to even. A NaN stays one."""
        lanes = value.lanes
        bits = self.ir.bitcast(value.node, _like(_INT32, lanes))
        upper = self.ir.lshr(bits, _constant(_INT32, 16, lanes))
        odd = self.ir.and_(upper, _constant(_INT32, 1, lanes))
        rounded = self.ir.add(self.ir.add(bits, _constant(_INT32, 0x7FFF, lanes)), odd)
        not_a_number = self.ir.fcmp_unordered("uno", value.node, value.node)
        kept = self.ir.select(not_a_number, _constant(_INT32, 0x7FC00000, lanes), rounded)
        return self.ir.trunc(self.ir.lshr(kept, _constant(_INT32, 16, lanes)), _like(ir.IntType(16), lanes))

    def real(self, integer: Value) -> Value:
        """The integer, or a vector of them, as float32."""
        return Value(self, self.ir.sitofp(integer.node, _like(_FLOAT, integer.lanes)))

    def fma(self, first: Value, second: Value, third: Value) -> Value:
        """first * second + third, rounded once."""
        return self._intrinsic("llvm.fma", [first, second, third])

    def sqrt(self, value: Value) -> Value:
        """The square root."""
        return self._intrinsic("llvm.sqrt", [value])

    def maximum(self, first: Value, second: Operand) -> Value:
        """The larger one; of a number and NaN the number."""
        return self._intrinsic("llvm.maxnum", list(self.matched(first, second)))

    def minimum(self, first: Value, second: Operand) -> Value:
        """The smaller one; of a number and NaN the number."""
        return self._intrinsic("llvm.minnum", list(self.matched(first, second)))

    def exp(self, value: Value) -> Value:
        """e to the power of `value`, within 2 units in the last place; 0 below -87.3. Method and coefficients are those
        of Cephes' expf."""
        lanes = value.lanes
        clamped = self.minimum(self.maximum(value, -87.5), 88.0)
        power = self._intrinsic("llvm.rint", [clamped * 1.44269504088896341])
        rest = self.fma(power, self.number(-0.693359375, lanes), clamped)
        rest = self.fma(power, self.number(2.12194440e-4, lanes), rest)
        sum_ = self.number(1.9875691500e-4, lanes)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            sum_ = self.fma(sum_, rest, self.number(coefficient, lanes))
        sum_ = self.fma(sum_, rest * rest, rest + 1.0)
        exponent = self.ir.fptosi(power.node, _like(_INT32, lanes))
        exponent = self.ir.shl(self.ir.add(exponent, _constant(_INT32, 127, lanes)), _constant(_INT32, 23, lanes))
        scaled = sum_ * Value(self, self.ir.bitcast(exponent, _like(_FLOAT, lanes)))
        return self.select(value < -87.3, 0.0, scaled)

    def tanh(self, value: Value) -> Value:
        """The hyperbolic tangent, within 1e-7."""
        return self.number(1.0, value.lanes) - self.number(2.0, value.lanes) / (self.exp(value * 2.0) + 1.0)

    def sum(self, vector: Value) -> Value:
        """Sum of a vector's numbers, in a tree; of a single number, itself."""
        return self._reduce(vector, lambda first, second: first + second)

    def max(self, vector: Value) -> Value:
        """Largest of a vector's numbers; of a single number, itself."""
        return self._reduce(vector, self.maximum)

    def min(self, vector: Value) -> Value:
        """Smallest of a vector's numbers; of a single number, itself."""
        return self._reduce(vector, self.minimum)

    def sums(self, vector_at: Callable[[int], Value], count: int) -> Value:
        """The sums of `count` vectors of as many numbers, as a vector: neighbours are added to one another until each
        lane holds a whole sum. Takes a third of the instructions of separate sums."""

        def added(first: int, width: int) -> Value:
            """Lanes hold parts of the sums of the vectors from `first` on, `width` of them in turn."""
            if width == 1:
                return vector_at(first)
            half = width // 2
            left, right = added(first, half), added(first + half, half)
            low = [lane + count - half if lane & half else lane for lane in range(count)]
            high = [lane + half for lane in low]
            return self.shuffle(left, right, low) + self.shuffle(left, right, high)

        return added(0, count)

    def vector(self, numbers: Sequence[Value]) -> Value:
        """A vector of the numbers; of one number, itself."""
        if len(numbers) == 1:
            return numbers[0]
        node = ir.Constant(ir.VectorType(numbers[0].node.type, len(numbers)), ir.Undefined)
        for lane, number in enumerate(numbers):
            node = self.ir.insert_element(node, number.node, ir.Constant(_INT32, lane))
        return Value(self, node)

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """The columns of as many rows as each has lanes."""
        count = len(rows)
        found, distance = list(rows), 1
        while distance < count:
            low = [lane if not lane & distance else lane + count - distance for lane in range(count)]
            high = [lane + distance if not lane & distance else lane + count for lane in range(count)]
            for row in range(count):
                if not row & distance:
                    first, second = found[row], found[row + distance]
                    found[row], found[row + distance] = (self.shuffle(first, second, order) for order in (low, high))
            distance *= 2
        return found

    def shuffle(self, first: Value, second: Value, order: Sequence[int]) -> Value:
        """Lanes of both vectors, counted through, in the given order."""
        mask = ir.Constant(ir.VectorType(_INT32, len(order)), list(order))
        return Value(self, self.ir.shuffle_vector(first.node, second.node, mask))

    def _reduce(self, vector: Value, combine: Any) -> Value:
        width = vector.lanes
        if not width:
            return vector
        while width > 1:
            width //= 2
            low, high = list(range(width)), list(range(width, 2 * width))
            vector = combine(self.shuffle(vector, vector, low), self.shuffle(vector, vector, high))
        return self.lane(vector, 0)

    def _broadcast(self, value: Value, lanes: int) -> Value:
        kind = ir.VectorType(value.node.type, lanes)
        if isinstance(value.node, ir.Constant):
            return Value(self, ir.Constant(kind, [value.node.constant] * lanes))
        one = self.ir.insert_element(ir.Constant(kind, ir.Undefined), value.node, ir.Constant(_INT32, 0))
        return Value(self, self.ir.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)))

    def _intrinsic(self, name: str, arguments: Sequence[Value]) -> Value:
        kind = arguments[0].node.type
        full_name = f"{name}.v{kind.count}f32" if isinstance(kind, ir.VectorType) else f"{name}.f32"
        function = self._declared(full_name, ir.FunctionType(kind, [kind] * len(arguments)))
        return Value(self, self.ir.call(function, [argument.node for argument in arguments]))


def _element(kind: Any) -> Any:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _like(kind: Any, lanes: int) -> Any:
    return ir.VectorType(kind, lanes) if lanes else kind


def _constant(kind: Any, value: int, lanes: int) -> Any:
    return ir.Constant(_like(kind, lanes), [value] * lanes if lanes else value)
