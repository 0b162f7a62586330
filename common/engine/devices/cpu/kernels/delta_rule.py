"""A token's step of the gated delta rule (https://arxiv.org/abs/2412.06464), whose states lie in slots.

With a state S [key dim, value dim], which decays g > 0 shrink, for each head:

    S = g S;  S = S + k (beta (v - k S));  out = q S

A state is read once from memory, for k S and q S at once, and once from the core's cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value, lanes_of

_EPSILON = 1e-6  # of normed keys and queries
_COLUMNS = 4 * MAX_LANES  # of a state, whose sums are in registers


class DeltaShape(NamedTuple):
    """The shape of a layer. A key head serves as many consecutive value heads each."""

    element: ElementType
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decays_channels: bool  # each row of a state by its own; else the whole state by one

    @property
    def is_supported(self) -> bool:
        """True if the kernel takes it."""
        return min(lanes_of(self.key_dim), lanes_of(self.value_dim)) > 1 and not self.value_heads % self.key_heads


@kernel_factory
def delta_rule_kernel(shape: DeltaShape, *, has_norms: bool) -> KernelSource:
    """A task is a value head of a sequence.

    query and key [sequences, key heads, key dim], value [sequences, value heads, value dim], rows of sequences
    `query_stride`, `key_stride` and `value_stride` numbers apart; logs of decays [sequences, value heads] or
    [sequences, value heads, key dim] and beta [sequences, value heads], float32; states float32 [slots, value heads,
    key dim, value dim], slots `slot` numbers apart; out [sequences, value heads, value dim]. `has_norms`: queries and
    keys are divided by their norms.
    """
    key_dim, value_dim, num_heads = shape.key_dim, shape.value_dim, shape.value_heads
    lanes = lanes_of(key_dim)

    def body(b: Builder, task: Value, a: Any) -> None:
        sequence, head = task // num_heads, task % num_heads
        key_head = head // (num_heads // shape.key_heads)
        query = a.query.at(sequence * a.query_stride + key_head * key_dim)
        key = a.key.at(sequence * a.key_stride + key_head * key_dim)
        value = a.value.at(sequence * a.value_stride + head * value_dim)
        place = head * (key_dim * value_dim)
        source, target = (a.states.at(each.at(sequence).load() * a.slot + place) for each in (a.sources, a.targets))
        beta = a.beta.at(task).load()
        queries, keys, decays = (b.scratch(key_dim) for _ in range(3))
        query_norm = _inverse_norm(b, query, key_dim) if has_norms else b.number(1.0)
        key_norm = _inverse_norm(b, key, key_dim) if has_norms else b.number(1.0)
        product = b.variable(b.number(0.0, lanes))
        with b.loop(0, key_dim, lanes) as i:
            own_query = query.at(i).load(lanes) * (query_norm * key_dim**-0.5)
            own_key = key.at(i).load(lanes) * key_norm
            logs = a.decays.at(task * key_dim + i).load(lanes) if shape.decays_channels else a.decays.at(task).load()
            queries.at(i).store(own_query)
            keys.at(i).store(own_key)
            decays.at(i).store(b.number(b.exp(logs), lanes))
            product.set(b.fma(own_query, own_key, product.get()))
        query_times_key = b.sum(product.get())
        for columns, count in _parts(value_dim):
            known = [b.variable(b.number(0.0, count)) for _ in columns]
            asked = [b.variable(b.number(0.0, count)) for _ in columns]
            with b.loop(0, key_dim) as i:
                decay = decays.at(i).load()
                own_key, own_query = (each.at(i).load() * decay for each in (keys, queries))
                for column, first, second in zip(columns, known, asked, strict=True):
                    row = source.at(i * value_dim + column).load(count)
                    first.set(b.fma(row, b.number(own_key, count), first.get()))
                    second.set(b.fma(row, b.number(own_query, count), second.get()))
            deltas = []
            for column, first, second in zip(columns, known, asked, strict=True):
                delta = (value.at(column).load(count) - first.get()) * beta
                total = b.fma(delta, b.number(query_times_key, count), second.get())
                a.out.at(task * value_dim + column).store(total)
                deltas.append(delta)
            with b.loop(0, key_dim) as i:
                decay, own_key = decays.at(i).load(), keys.at(i).load()
                for column, delta in zip(columns, deltas, strict=True):
                    kept = source.at(i * value_dim + column).load(count) * decay
                    target.at(i * value_dim + column).store(b.fma(delta, b.number(own_key, count), kept))

    floats, ints = ElementType.FLOAT32, ElementType.INT64
    pointers = {
        "query": shape.element,
        "key": shape.element,
        "value": shape.element,
        "decays": floats,
        "beta": floats,
        "states": floats,
        "out": shape.element,
        "sources": ints,
        "targets": ints,
    }
    strides = dict.fromkeys(("query_stride", "key_stride", "value_stride", "slot"))
    return KernelSource("delta_rule", pointers | strides, body)


def _inverse_norm(b: Builder, row: Pointer, size: int) -> Value:
    lanes = lanes_of(size)
    squares = b.variable(b.number(0.0, lanes))
    with b.loop(0, size, lanes) as i:
        own = row.at(i).load(lanes)
        squares.set(b.fma(own, own, squares.get()))
    return b.number(1.0) / b.sqrt(b.sum(squares.get()) + _EPSILON)


def _parts(value_dim: int) -> list[tuple[range, int]]:
    """The columns of a state in runs: where the vectors of each begin, and their lanes."""
    whole = value_dim // _COLUMNS * _COLUMNS
    runs = [(start, start + _COLUMNS) for start in range(0, whole, _COLUMNS)]
    if value_dim > whole:
        runs.append((whole, value_dim))
    return [(range(start, stop, lanes_of(stop - start)), lanes_of(stop - start)) for start, stop in runs]
