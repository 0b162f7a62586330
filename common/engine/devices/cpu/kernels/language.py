"""The language of the CPU kernels: integers, float32 numbers and vectors, over LLVM's IR builder.

Python runs while a kernel is built: a Python loop is unrolled, `Builder.loop` is a loop of the kernel. Memory holds
float32, bfloat16, float8 or int8; a load gives float32, a store rounds to the nearest even number. What is stored as
float8 or int8 must be within its range. Products and sums may be contracted to fused multiply-adds, and are never
reordered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

from common.engine.devices.cpu.kernels.processor import features, is_x86

MAX_LANES = 16 if features().get("avx512f") else 8  # float32 numbers in a register, at most
_MIN_LANES = 4  # of a vector; LLVM 22 generates wrong code for some shuffles of two

_INT = ir.IntType(64)
INT32 = ir.IntType(32)
_BYTE = ir.IntType(8)
_HALF_BITS = ir.IntType(16)
FLOAT = ir.FloatType()
_POINTER = ir.PointerType()
_CONTRACT = ("contract",)
_SCALED_LANES = 16 if MAX_LANES == 16 and is_x86() else None
"""Of vectors that one instruction multiplies with powers of two, whatever these are."""

# Polynomials for 2 to the power of -0.5 to 0.5, from the highest power on, with the smallest relative error; the last
# coefficient is 1.
_EXP2 = {
    4: (0.0095828531, 0.0559064246, 0.240240986, 0.693124193),
    6: (0.000153533619, 0.00133988744, 0.00961843736, 0.0555033247, 0.240226479, 0.693147203),
}
_CACHE_LINE = 64  # bytes; scratch memory begins at one


class ElementType(enum.Enum):
    """Type of the numbers in memory."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8_e4m3fn"
    INT8 = "int8"
    INT64 = "int64"

    @property
    def dtype(self) -> torch.dtype:
        """The type of tensors of such numbers."""
        found: torch.dtype = getattr(torch, self.value)
        return found

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize


def element_type_of(dtype: torch.dtype) -> ElementType:
    """Returns the type of a tensor's numbers."""
    return _ELEMENT_TYPES[dtype]


_ELEMENT_TYPES = {each.dtype: each for each in ElementType}


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
        return bool(_element(self.node.type) == FLOAT)

    def __add__(self, other: Operand) -> Value:
        return self._apply("fadd", "add", other)

    def __sub__(self, other: Operand) -> Value:
        return self._apply("fsub", "sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self._apply("fmul", "mul", other)

    def __truediv__(self, other: Operand) -> Value:
        return self._apply("fdiv", "sdiv", other)

    def __floordiv__(self, other: Operand) -> Value:
        """Divides integers that are not negative."""
        return self._apply("fdiv", "udiv", other)

    def __mod__(self, other: Operand) -> Value:
        """Returns the remainder of integers that are not negative."""
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
        """Shifts an integer's bits: zeros come in from above."""
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
        offset = (self.builder.number(index) * self.element.size).node
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
        return Value(self.builder, self.builder.ir.load_atomic(self.address, "seq_cst", self.element.size, typ=_INT))

    def share(self, value: Operand) -> None:
        """Writes an integer that other threads read."""
        self._change_shared("xchg", value)

    def add_shared(self, value: Operand) -> Value:
        """Adds to an integer that other threads change; returns what it was."""
        return self._change_shared("add", value)

    def mask_shared(self, value: Operand) -> Value:
        """Keeps only these bits of an integer that other threads change; returns what it was."""
        return self._change_shared("and", value)

    def replace_shared(self, expected: Value, value: Value) -> Value:
        """Writes an integer that other threads change if it is what was expected; returns whether it was."""
        nodes = expected.node, value.node
        result = self.builder.ir.cmpxchg(self.address, *nodes, "seq_cst", "seq_cst")
        return Value(self.builder, self.builder.ir.extract_value(result, 1))

    def _change_shared(self, operation: str, value: Operand) -> Value:
        node = self.builder.number(value).node
        return Value(self.builder, self.builder.ir.atomic_rmw(operation, self.address, node, "seq_cst"))


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
            kind = FLOAT if isinstance(value, float) else _INT
            value = Value(self, ir.Constant(kind, value))
        return self.broadcast(value, lanes) if lanes > 1 and not value.lanes else value

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
        return Value(self, self.ir.extract_element(vector.node, ir.Constant(INT32, index)))

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
        return Pointer(self, self.slot(ir.ArrayType(FLOAT, count)), ElementType.FLOAT32)

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
        callee = self.ir.inttoptr(function.node, ir.PointerType(ir.FunctionType(INT32, [_INT] * len(nodes))))
        return Value(self, self.ir.sext(self.ir.call(callee, nodes), _INT))

    def pause(self) -> None:
        """Lets the other thread of a core go on for a moment."""
        if is_x86():
            self.intrinsic("llvm.x86.sse2.pause", ir.VoidType(), [])

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
                raw = self.read(pointer, ir.IntType(16), lanes)
                wide = self.ir.shl(self.ir.zext(raw, like(INT32, lanes)), constant(INT32, 16, lanes))
                return Value(self, self.ir.bitcast(wide, like(FLOAT, lanes)))
            case ElementType.FLOAT32:
                return Value(self, self.read(pointer, FLOAT, lanes))
            case ElementType.FLOAT8:
                return self._widened_float8(self.read(pointer, _BYTE, lanes), lanes)
            case ElementType.INT8:
                return Value(self, self.ir.sitofp(self.read(pointer, _BYTE, lanes), like(FLOAT, lanes)))
            case ElementType.INT64:
                return Value(self, self.read(pointer, _INT, lanes))

    def store(self, pointer: Pointer, value: Value) -> None:
        """See Pointer.store."""
        match pointer.element:
            case ElementType.BFLOAT16:
                node = self._rounded_to_bfloat16(value)
            case ElementType.FLOAT8:
                node = self._rounded_to_float8(value)
            case ElementType.INT8:
                node = self._to_bytes(self._rounded(value))
            case _:
                node = value.node
        self.ir.store(node, pointer.address, align=pointer.element.size)

    def prefetch(self, pointer: Pointer, count: int, *, near: bool = True) -> None:
        """Asks for `count` numbers to be brought into the core's first cache, or not `near`, into its second."""
        to_read, keep, data = ir.Constant(INT32, 0), ir.Constant(INT32, 3 if near else 2), ir.Constant(INT32, 1)
        for i in range(0, count, _CACHE_LINE // pointer.element.size):
            self.intrinsic("llvm.prefetch.p0", ir.VoidType(), [pointer.at(i).address, to_read, keep, data])

    def intrinsic(self, name: str, result: Any, operands: Sequence[Any]) -> Any:
        """Calls one of LLVM's intrinsics with LLVM values; returns one of type `result`."""
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self.ir.call(self._module.globals.get(name) or ir.Function(self._module, kind, name), operands)

    def read(self, pointer: Pointer, kind: Any, lanes: int) -> Any:
        """A load instruction: one number as memory holds it, or a vector of the next `lanes`."""
        return self.ir.load(pointer.address, typ=like(kind, lanes), align=pointer.element.size)

    def _rounded_to_bfloat16(self, value: Value) -> Any:
        """The upper halves, rounded to even. A NaN stays one."""
        lanes = value.lanes
        bits = self.ir.bitcast(value.node, like(INT32, lanes))
        upper = self.ir.lshr(bits, constant(INT32, 16, lanes))
        odd = self.ir.and_(upper, constant(INT32, 1, lanes))
        rounded = self.ir.add(self.ir.add(bits, constant(INT32, 0x7FFF, lanes)), odd)
        not_a_number = self.ir.fcmp_unordered("uno", value.node, value.node)
        kept = self.ir.select(not_a_number, constant(INT32, 0x7FC00000, lanes), rounded)
        return self.ir.trunc(self.ir.lshr(kept, constant(INT32, 16, lanes)), like(ir.IntType(16), lanes))

    def _widened_float8(self, byte: Any, lanes: int) -> Value:
        """By way of half-precision numbers, which have the same sign and fraction and one more bit of the exponent.
        What stands for NaN becomes 480."""
        upper = self.ir.shl(self.ir.zext(byte, like(_HALF_BITS, lanes)), constant(_HALF_BITS, 8, lanes))
        signed = self.ir.ashr(upper, constant(_HALF_BITS, 1, lanes))  # the sign is there twice
        half = self.ir.bitcast(self.ir.and_(signed, constant(_HALF_BITS, 0xBFFF, lanes)), like(ir.HalfType(), lanes))
        return Value(self, self.ir.fpext(half, like(FLOAT, lanes))) * 256.0

    def _rounded_to_float8(self, value: Value) -> Any:
        """Bytes of numbers from -448 to 448. Those below the smallest normal one, 2**-6, are multiples of 2**-9."""
        lanes = value.lanes
        bits = self.ir.bitcast(value.node, like(INT32, lanes))
        sign = self.ir.and_(self.ir.lshr(bits, constant(INT32, 24, lanes)), constant(INT32, 0x80, lanes))
        size = self.ir.and_(bits, constant(INT32, 0x7FFFFFFF, lanes))
        odd = self.ir.and_(self.ir.lshr(size, constant(INT32, 20, lanes)), constant(INT32, 1, lanes))
        rounded = self.ir.add(self.ir.add(size, constant(INT32, 0x7FFFF, lanes)), odd)
        biased = self.ir.sub(self.ir.lshr(rounded, constant(INT32, 20, lanes)), constant(INT32, 120 << 3, lanes))
        magnitude = Value(self, self.ir.bitcast(size, like(FLOAT, lanes)))
        multiple = self.ir.fptosi(self._rounded(magnitude * 512.0).node, like(INT32, lanes))
        whole = self.ir.select((magnitude < 2.0**-6).node, multiple, biased)
        return self.ir.trunc(self.ir.or_(sign, whole), like(_BYTE, lanes))

    def _rounded(self, value: Value) -> Value:
        return self._intrinsic("llvm.rint", [value])

    def _to_bytes(self, whole: Value) -> Any:
        """Bytes of whole numbers."""
        return self.ir.trunc(self.ir.fptosi(whole.node, like(INT32, whole.lanes)), like(_BYTE, whole.lanes))

    def real(self, integer: Value) -> Value:
        """The integer, or a vector of them, as float32."""
        return Value(self, self.ir.sitofp(integer.node, like(FLOAT, integer.lanes)))

    def fma(self, first: Value, second: Value, third: Value) -> Value:
        """first * second + third, rounded once."""
        return self._intrinsic("llvm.fma", [first, second, third])

    def rounded(self, value: Value) -> Value:
        """The nearest whole number, still as float32; of two the even one."""
        return self._intrinsic("llvm.rint", [value])

    def sqrt(self, value: Value) -> Value:
        """The square root."""
        return self._intrinsic("llvm.sqrt", [value])

    def abs(self, value: Value) -> Value:
        """The size of a number."""
        return self._intrinsic("llvm.fabs", [value])

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
        power = self._rounded(clamped * 1.44269504088896341)
        rest = self.fma(power, self.number(-0.693359375, lanes), clamped)
        rest = self.fma(power, self.number(2.12194440e-4, lanes), rest)
        sum_ = self.number(1.9875691500e-4, lanes)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            sum_ = self.fma(sum_, rest, self.number(coefficient, lanes))
        sum_ = self.fma(sum_, rest * rest, rest + 1.0)
        return self.select(value < -87.3, 0.0, sum_ * self._power_of_two(power))

    def exp2(self, value: Value, *, degree: int = 6) -> Value:
        """2 to the power of `value`, which is below 127; 1 for 0, and 0 far below -126. The relative error is 1e-7, or
        3e-6 with a polynomial of `degree` 4."""
        lanes = value.lanes
        can_scale = lanes == _SCALED_LANES
        value = value if can_scale else self.maximum(value, -150.0)
        power = self._rounded(value)
        rest = value - power
        sum_ = self.number(_EXP2[degree][0], lanes)
        for coefficient in (*_EXP2[degree][1:], 1.0):
            sum_ = self.fma(sum_, rest, self.number(coefficient, lanes))
        if can_scale:
            every_lane, as_usual = ir.Constant(ir.IntType(16), -1), ir.Constant(INT32, 4)
            nodes = [sum_.node, power.node, sum_.node, every_lane, as_usual]
            return Value(self, self.intrinsic("llvm.x86.avx512.mask.scalef.ps.512", sum_.node.type, nodes))
        return self.select(value < -126.0, 0.0, sum_ * self._power_of_two(power))

    def _power_of_two(self, power: Value) -> Value:
        """Returns 2 to the power of whole numbers from -126 to 127."""
        exponent = self.ir.fptosi(power.node, like(INT32, power.lanes))
        biased = self.ir.add(exponent, constant(INT32, 127, power.lanes))
        bits = self.ir.shl(biased, constant(INT32, 23, power.lanes))
        return Value(self, self.ir.bitcast(bits, like(FLOAT, power.lanes)))

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
            return self.merged(added(first, half), added(first + half, half), half)

        return added(0, count)

    def merged(self, left: Value, right: Value, width: int) -> Value:
        """Parts of the sums of twice as many vectors: the lanes of either hold parts of the sums of `width` vectors in
        turn."""
        count = left.lanes
        low = [lane + count - width if lane & width else lane for lane in range(count)]
        return self.shuffle(left, right, low) + self.shuffle(left, right, [lane + width for lane in low])

    def vector(self, numbers: Sequence[Value]) -> Value:
        """A vector of the numbers; of one number, itself."""
        if len(numbers) == 1:
            return numbers[0]
        node = ir.Constant(ir.VectorType(numbers[0].node.type, len(numbers)), ir.Undefined)
        for lane, number in enumerate(numbers):
            node = self.ir.insert_element(node, number.node, ir.Constant(INT32, lane))
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
        mask = ir.Constant(ir.VectorType(INT32, len(order)), list(order))
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

    def broadcast(self, value: Value, lanes: int) -> Value:
        """The number in every one of `lanes` lanes."""
        kind = ir.VectorType(value.node.type, lanes)
        if isinstance(value.node, ir.Constant):
            return Value(self, ir.Constant(kind, [value.node.constant] * lanes))
        one = self.ir.insert_element(ir.Constant(kind, ir.Undefined), value.node, ir.Constant(INT32, 0))
        return Value(self, self.ir.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)))

    def _intrinsic(self, name: str, arguments: Sequence[Value]) -> Value:
        kind = arguments[0].node.type
        full_name = f"{name}.v{kind.count}f32" if isinstance(kind, ir.VectorType) else f"{name}.f32"
        return Value(self, self.intrinsic(full_name, kind, [argument.node for argument in arguments]))


def _element(kind: Any) -> Any:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def like(kind: Any, lanes: int) -> Any:
    """The type of a vector of `lanes` of a kind; without lanes that of one."""
    return ir.VectorType(kind, lanes) if lanes else kind


def constant(kind: Any, value: int, lanes: int) -> Any:
    """LLVM's constant with the integer in every lane."""
    return ir.Constant(like(kind, lanes), [value] * lanes if lanes else value)
