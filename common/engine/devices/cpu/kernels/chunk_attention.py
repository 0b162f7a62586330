"""Attention of a prompt's chunk over the paged KV cache, read in place.

Query rows, a token's query heads of one KV head each, lie in the lanes of vectors, so that the softmax over keys needs
no sums or maxima across lanes. Scores, weights and results are therefore transposed: [keys, rows] and [head_dim, rows].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from common.engine.devices.cpu.kernels.attention import CacheShape, Scores, Vectors
from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value
from common.engine.devices.cpu.kernels.pairs import load_interleaved, paired
from common.engine.devices.cpu.kernels.tiles import (
    MAX_TILE_ROWS,
    clear_tile,
    configuration,
    configure_tiles,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
)

_RUN = 16  # keys that lie side by side in any block
_HIDDEN, _LOWEST = -1e35, -1e29  # score of a token that is not attended to; below all others, so that its weight is 0
_LOG2_E = 1.4426950408889634
_GROWTH = 8.0  # of a maximum, as a power of two, up to which weights are kept relative to the one before
_FLOATS = ElementType.FLOAT32


def can_attend_chunks(shape: CacheShape, *, tiled: bool) -> bool:
    """True if the kernel can read such a cache."""
    return shape.block_size % _RUN == 0 and shape.head_dim % (2 * _RUN if tiled else MAX_LANES) == 0


def rows_per_task(*, tiled: bool) -> int:
    """Query rows of a task."""
    return (_TiledRows if tiled else _VectorRows).num_rows


@kernel_factory
def chunk_attention_kernel(shape: CacheShape, scores: Scores, *, tiled: bool) -> KernelSource:
    """Attention of `num_tokens` query tokens of each of some sequences, their last ones; keys and values are in the
    cache. A row's result depends on nothing but its query and the tokens up to its own. For each sequence and KV head
    there are `num_tiles` tasks: num_tokens * group rows, by those of a task, rounded up.

    cache: of the layer, from its first block on. query [sequences * num_tokens, ...] with `query_stride` numbers from
    one token to the next, out [sequences * num_tokens, heads, head_dim], seq_lens [sequences], block_tables [sequences,
    table_width], sinks [heads] float32. `tiled`: with matrix instructions, for bfloat16; configuration is that of whole
    tiles then.
    """
    rows_type = _TiledRows if tiled else _VectorRows

    def body(b: Builder, task: Value, a: Any) -> None:
        sequence, rest = task // (a.num_tiles * shape.num_kv_heads), task % (a.num_tiles * shape.num_kv_heads)
        kv_head, tile = rest // a.num_tiles, a.num_tiles - 1 - rest % a.num_tiles  # the longest begin
        chunk = _Chunk(
            cache=a.cache,
            query=a.query.at(sequence * a.num_tokens * a.query_stride),
            query_stride=a.query_stride,
            out=a.out.at(sequence * a.num_tokens * (shape.num_heads * shape.head_dim)),
            num_tokens=a.num_tokens,
            seq_len=a.seq_lens.at(sequence).load(),
            block_table=a.block_tables.at(sequence * a.table_width),
            sinks=a.sinks,
            configuration=a.configuration,
        )
        rows = rows_type(b, shape, scores, chunk, kv_head, tile * rows_type.num_rows)
        rows.load()
        with b.loop(rows.first_key(), rows.end, rows.num_keys) as key:
            runs = [rows.keys_at(key + start) for start in range(0, rows.num_keys, _RUN)]
            rows.score(rows.plain(runs))
            has_shrunk = rows.weigh(key)
            rows.add_values(rows.plain([shape.values_beside(run) for run in runs]), has_shrunk)
        rows.store()

    ints = ElementType.INT64
    pointers = {"cache": shape.cache_element, "query": shape.element, "out": shape.element, "seq_lens": ints}
    pointers |= {"block_tables": ints, "sinks": _FLOATS, "configuration": ints}
    numbers = ("query_stride", "num_tokens", "num_tiles", "table_width")
    return KernelSource("chunk_attention", pointers | dict.fromkeys(numbers), body)


@dataclass(frozen=True)
class _Chunk:
    """The arguments of a task: those of one sequence."""

    cache: Pointer
    query: Pointer
    query_stride: Value
    out: Pointer
    num_tokens: Value
    seq_len: Value
    block_table: Pointer
    sinks: Pointer
    configuration: Pointer


class _Rows(ABC):
    """Query rows of a task and the state of their softmax, in memory of the thread."""

    num_rows: ClassVar[int]
    num_keys: ClassVar[int]  # attended to at once
    keys_per_turn: ClassVar[int]  # whose weights are kept together
    degree: ClassVar[int]  # of the polynomial that gives weights, see `exp2`

    def __init__(
        self, b: Builder, shape: CacheShape, scores: Scores, chunk: _Chunk, kv_head: Value, first: Value
    ) -> None:
        self.b, self.shape, self.chunk = b, shape, chunk
        self._scores, self._kv_head, self._first = scores, kv_head, first
        num_rows, dim = self.num_rows, shape.head_dim
        num_left = chunk.num_tokens * shape.group - first
        self._num_valid = b.select(num_left < num_rows, num_left, num_rows)
        self._first_position = chunk.seq_len - chunk.num_tokens
        self.end = self._position(self._num_valid - 1) + 1
        self._plain = b.scratch(num_rows * dim)  # [rows, head_dim]
        self.scores = b.scratch(self.num_keys * num_rows)  # [keys, rows]
        self.totals = b.scratch(dim * num_rows)  # of weighted values, [head_dim, rows]
        self.factors = b.scratch(num_rows)  # that shrink totals as the maximum grows
        if shape.quantized is not None:
            self._restored = b.scratch(self.num_keys * dim).of(shape.element)
        self._positions, self._firsts, self._sinks = (b.scratch(num_rows) for _ in range(3))
        self._maxima, self._sums = b.scratch(num_rows), b.scratch(num_rows)
        # Weights are powers of two, so that scaling a score and subtracting the maximum is one operation.
        self._power = _LOG2_E * (scores.scale if scores.softcap is None else 1.0)  # of two, for a score of 1

    @property
    def places(self) -> range:
        """The beginnings of vectors of rows."""
        return range(0, self.num_rows, MAX_LANES)

    @abstractmethod
    def score(self, runs: Sequence[Pointer]) -> None:
        """scores = keys @ queries"""

    @abstractmethod
    def add_values(self, runs: Sequence[Pointer], has_shrunk: Value) -> None:
        """totals = totals * factors + values @ weights. `has_shrunk`: any factor is below 1."""

    @abstractmethod
    def _take_queries(self) -> None:
        """Reads the queries of all valid rows, and zeroes those of others."""

    @abstractmethod
    def _keep(self, weights: Sequence[Value], key: Value, start: int) -> None:
        """Keeps the weights of `keys_per_turn` keys."""

    def _position(self, row: Value) -> Value:
        """Returns the position of a row's token, in its sequence."""
        return self._first_position + (self._first + row) // self.shape.group

    def place(self, row: Value) -> tuple[Value, Value]:
        """Token of the chunk, and query head."""
        group = self.shape.group
        whole = self._first + row
        return whole // group, self._kv_head * group + whole % group

    def first_key(self) -> Value:
        """The first that any row sees, or one before."""
        if self._scores.window is None:
            return self.b.number(0)
        first = self._scores.first_seen(self.b, self._position(self.b.number(0)))
        return first - first % self.num_keys

    def keys_at(self, token: Value) -> Vectors:
        """Keys of the tokens from a multiple of _RUN on; of the sequence's last ones if there are no such."""
        shape, chunk = self.shape, self.chunk
        last = chunk.seq_len - 1
        token = self.b.select(token < chunk.seq_len, token, last - last % _RUN)
        block = chunk.block_table.at(token // shape.block_size).load()
        return shape.keys_at(chunk.cache, block, self._kv_head, token % shape.block_size)

    def plain(self, runs: Sequence[Vectors]) -> list[Pointer]:
        """Runs of keys, or of values, as numbers of the type of queries. Valid until the next call."""
        return [self._restored_run(run, i) for i, run in enumerate(runs)]

    def _restored_run(self, run: Vectors, index: int) -> Pointer:
        numbers, scales = run
        if scales is None:
            return numbers
        dim = self.shape.head_dim
        target = self._restored.at(index * _RUN * dim)
        with self.b.loop(0, _RUN) as key:
            scale = self.b.number(scales.at(key).load(), MAX_LANES)
            for i in range(0, dim, MAX_LANES):
                place = key * dim + i
                target.at(place).store(numbers.at(place).load(MAX_LANES) * scale)
        return target

    def load(self) -> None:
        """Reads the queries, and begins."""
        b = self.b
        zero = b.number(0.0, MAX_LANES)
        for start in self.places:
            self._positions.at(start).store(b.number(-1.0, MAX_LANES))  # of rows that do not exist: they see nothing
            self._maxima.at(start).store(b.number(_LOWEST, MAX_LANES))
            self._sums.at(start).store(zero)
        for memory in (self._plain, self.totals):
            with b.loop(0, self.shape.head_dim * self.num_rows, MAX_LANES) as i:
                memory.at(i).store(zero)
        with b.loop(0, self._num_valid) as row:
            position = self._position(row)
            self._positions.at(row).store(b.real(position))
            if self._scores.window is not None:
                self._firsts.at(row).store(b.real(self._scores.first_seen(b, position)))
            if self._scores.has_sinks:
                self._sinks.at(row).store(self.chunk.sinks.at(self.place(row)[1]).load())
        self._take_queries()

    def _copy(self, element: ElementType, width: int, queries: Pointer) -> None:
        """Queries of valid rows, as `width` numbers of an element type each; queries = [width, rows]."""
        chunk, dim = self.chunk, self.shape.head_dim
        with self.b.loop(0, self._num_valid) as row:
            token, head = self.place(row)
            source = chunk.query.at(token * chunk.query_stride + head * dim).of(element)
            with self.b.loop(0, width, MAX_LANES) as i:
                self._plain.at(row * width + i).store(source.at(i).load(MAX_LANES))
        self._transpose(self._plain, self.num_rows, queries, width)

    def _transpose(self, source: Pointer, num_rows: int, target: Pointer, num_columns: int) -> None:
        b = self.b
        with b.loop(0, num_rows, MAX_LANES) as row, b.loop(0, num_columns, MAX_LANES) as column:
            lines = [source.at((row + i) * num_columns + column).load(MAX_LANES) for i in range(MAX_LANES)]
            for i, line in enumerate(b.transposed(lines)):
                target.at((column + i) * num_rows + row).store(line)

    def weigh(self, first_key: Value) -> Value:
        """Turns scores into weights, with running sums relative to running maxima. Returns whether any factor is below
        1."""
        b = self.b
        if self._scores.softcap is not None:
            self._cap(self._scores.softcap)
        with b.otherwise(self._sees_all(first_key)):
            self._hide(first_key)
        maxima = [b.variable(b.number(_HIDDEN, MAX_LANES)) for _ in self.places]
        with b.loop(0, self.num_keys) as key:
            for start, maximum in zip(self.places, maxima, strict=True):
                maximum.set(b.maximum(maximum.get(), self.scores.at(key * self.num_rows + start).load(MAX_LANES)))
        smallest = b.number(1.0, MAX_LANES)
        for start, maximum in zip(self.places, maxima, strict=True):
            before, found = self._maxima.at(start).load(MAX_LANES), maximum.get() * self._power
            reference = b.select(before + _GROWTH < found, found, before)
            factor = b.exp2(before - reference)
            smallest = b.minimum(smallest, factor)
            self.factors.at(start).store(factor)
            self._maxima.at(start).store(reference)
            self._add_weights(start, reference, factor)
        return b.min(smallest) < 1.0

    def _add_weights(self, start: int, reference: Value, factor: Value) -> None:
        """Keeps the weights of a vector of rows, and adds them up."""
        b = self.b
        subtrahend, power = b.number(0.0) - reference, b.number(self._power, MAX_LANES)
        total = b.variable(self._sums.at(start).load(MAX_LANES) * factor)
        with b.loop(0, self.num_keys, self.keys_per_turn) as key:
            rows = [self.scores.at((key + i) * self.num_rows + start) for i in range(self.keys_per_turn)]
            powers = [b.fma(row.load(MAX_LANES), power, subtrahend) for row in rows]
            weights = [b.exp2(power, degree=self.degree) for power in powers]
            for weight in weights:
                total.set(total.get() + weight)
            self._keep(weights, key, start)
        self._sums.at(start).store(total.get())

    def _cap(self, softcap: float) -> None:
        b = self.b
        with b.loop(0, self.num_keys * self.num_rows, MAX_LANES) as i:
            place = self.scores.at(i)
            place.store(b.tanh(place.load(MAX_LANES) * (self._scores.scale / softcap)) * softcap)

    def _sees_all(self, first_key: Value) -> Value:
        """Whether each row sees all keys from the first on."""
        b = self.b
        sees_all = self._position(b.number(0)) >= first_key + (self.num_keys - 1)
        if self._scores.window is not None:
            sees_all = sees_all & (first_key >= self._scores.first_seen(b, self.end - 1))
        return sees_all

    def _hide(self, first_key: Value) -> None:
        """Lowers scores of keys that rows do not see."""
        b, has_window = self.b, self._scores.window is not None
        for start in self.places:
            positions = self._positions.at(start).load(MAX_LANES)
            firsts = self._firsts.at(start).load(MAX_LANES) if has_window else positions
            with b.loop(0, self.num_keys) as key:
                place = self.scores.at(key * self.num_rows + start)
                position = b.number(b.real(first_key + key), MAX_LANES)
                visible = positions >= position
                if has_window:
                    visible = visible & (position >= firsts)
                place.store(b.select(visible, place.load(MAX_LANES), _HIDDEN))

    def store(self) -> None:
        """Writes the results."""
        b, dim = self.b, self.shape.head_dim
        for start in self.places:
            factor = self._final_factor(start)
            with b.loop(0, dim) as i:
                place = self.totals.at(i * self.num_rows + start)
                place.store(place.load(MAX_LANES) * factor)
        self._transpose(self.totals, dim, self._plain, self.num_rows)
        with b.loop(0, self._num_valid) as row:
            token, head = self.place(row)
            target = self.chunk.out.at((token * self.shape.num_heads + head) * dim)
            with b.loop(0, dim, MAX_LANES) as i:
                target.at(i).store(self._plain.at(row * dim + i).load(MAX_LANES))

    def _final_factor(self, start: int) -> Value:
        """Returns the factor of totals in the end."""
        b = self.b
        sums = self._sums.at(start).load(MAX_LANES)
        if not self._scores.has_sinks:
            return b.number(1.0, MAX_LANES) / sums
        before, sinks = self._maxima.at(start).load(MAX_LANES), self._sinks.at(start).load(MAX_LANES) * _LOG2_E
        maximum = b.maximum(before, sinks)
        factor = b.exp2(before - maximum)
        return factor / (sums * factor + b.exp2(sinks - maximum))


class _VectorRows(_Rows):
    """Multiplies with vector instructions, in float32: one number of a key or value with vectors of rows."""

    num_rows = 2 * MAX_LANES
    num_keys = 2 * _RUN
    keys_per_turn = 1
    degree = 6
    _SUMS = MAX_LANES // 2  # keys, or numbers of a value, whose sums are in registers

    def _take_queries(self) -> None:
        self._queries = self.b.scratch(self.shape.head_dim * self.num_rows)  # [head_dim, rows]
        self._copy(self.shape.element, self.shape.head_dim, self._queries)

    def _keep(self, weights: Sequence[Value], key: Value, start: int) -> None:
        self.scores.at(key * self.num_rows + start).store(weights[0])

    def score(self, runs: Sequence[Pointer]) -> None:
        """See _Rows."""
        b, dim = self.b, self.shape.head_dim
        for number, run in enumerate(runs):
            with b.loop(0, _RUN, self._SUMS) as first:
                keys = run.at(first * dim)
                sums = _Sums(b, [[b.number(0.0, MAX_LANES) for _ in self.places] for _ in range(self._SUMS)])
                with b.loop(0, dim) as i:
                    queries = [self._queries.at(i * self.num_rows + place).load(MAX_LANES) for place in self.places]
                    sums.add([keys.at(i + key * dim).load() for key in range(self._SUMS)], queries)
                sums.store(self.scores, first + number * _RUN, self.num_rows)

    def add_values(self, runs: Sequence[Pointer], has_shrunk: Value) -> None:
        """See _Rows."""
        b, dim = self.b, self.shape.head_dim
        factors = [self.factors.at(place).load(MAX_LANES) for place in self.places]
        with b.loop(0, dim, self._SUMS) as first:
            initial = [
                [
                    self.totals.at((first + i) * self.num_rows + place).load(MAX_LANES) * factor
                    for place, factor in zip(self.places, factors, strict=True)
                ]
                for i in range(self._SUMS)
            ]
            sums = _Sums(b, initial)
            for number, run in enumerate(runs):
                with b.loop(0, _RUN) as key:
                    row = self.scores.at((key + number * _RUN) * self.num_rows)
                    weights = [row.at(place).load(MAX_LANES) for place in self.places]
                    values = run.at(key * dim + first)
                    sums.add([values.at(i).load() for i in range(self._SUMS)], weights)
            sums.store(self.totals, first, self.num_rows)


class _Sums:
    """Sums of products of some numbers with the same vectors, in registers."""

    def __init__(self, b: Builder, initial: Sequence[Sequence[Value]]) -> None:
        self._b = b
        self._sums = [[b.variable(value) for value in row] for row in initial]

    def add(self, numbers: Sequence[Value], vectors: Sequence[Value]) -> None:
        for number, row in zip(numbers, self._sums, strict=True):
            broadcast = self._b.number(number, MAX_LANES)
            for vector, sum_ in zip(vectors, row, strict=True):
                sum_.set(self._b.fma(broadcast, vector, sum_.get()))

    def store(self, memory: Pointer, first: Value, width: int) -> None:
        """Stores the sums as rows of the memory, from the row `first` on."""
        for i, row in enumerate(self._sums):
            for vector, sum_ in enumerate(row):
                memory.at((first + i) * width + vector * MAX_LANES).store(sum_.get())


class _TiledRows(_Rows):
    """Multiplies tiles of 16 x 16 x 32 bfloat16 numbers with matrix instructions. Numbers that are added up lie in
    pairs: those of a key, which are read from the cache as they are, and those of two tokens' values."""

    num_rows = 4 * MAX_LANES
    num_keys = 4 * _RUN
    keys_per_turn = 2
    degree = 4  # weights are rounded to 8 bits
    _TOTALS, _LEFT, _RIGHT = range(4), 4, 5  # registers

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pairs = self.b.scratch(self.num_keys // 2 * self.num_rows)  # of weights, [keys / 2, rows]
        self._values = self.b.scratch(self.shape.head_dim * self.num_keys // 2)  # pairs, [head_dim, keys / 2]

    def load(self) -> None:
        """See _Rows."""
        configure_tiles(self.chunk.configuration)
        super().load()

    def store(self) -> None:
        """See _Rows."""
        release_tiles(self.b)
        super().store()

    def _take_queries(self) -> None:
        self._queries = self.b.scratch(self.shape.head_dim // 2 * self.num_rows)  # pairs, [head_dim / 2, rows]
        self._copy(_FLOATS, self.shape.head_dim // 2, self._queries)

    def _keep(self, weights: Sequence[Value], key: Value, start: int) -> None:
        self._pairs.at(key // 2 * self.num_rows + start).store(paired(self.b, *weights))

    def score(self, runs: Sequence[Pointer]) -> None:
        """See _Rows."""
        b, dim = self.b, self.shape.head_dim
        for number, run in enumerate(runs):
            for register in self._TOTALS:
                clear_tile(b, register)
            for i in range(0, dim, 2 * _RUN):
                load_tile(self._LEFT, run.at(i), dim)
                self._multiply(self._queries.at(i // 2 * self.num_rows))
            for register, place in zip(self._TOTALS, self.places, strict=True):
                store_tile(register, self.scores.at(number * _RUN * self.num_rows + place), self.num_rows)

    def add_values(self, runs: Sequence[Pointer], has_shrunk: Value) -> None:
        """See _Rows."""
        b, dim, half = self.b, self.shape.head_dim, self.num_keys // 2
        with b.when(has_shrunk):
            factors = [self.factors.at(place).load(MAX_LANES) for place in self.places]
            with b.loop(0, dim) as i:
                for place, factor in zip(self.places, factors, strict=True):
                    total = self.totals.at(i * self.num_rows + place)
                    total.store(total.load(MAX_LANES) * factor)
        with b.loop(0, dim, _RUN) as i:
            self._pair_values(runs, i)
            for register, place in zip(self._TOTALS, self.places, strict=True):
                load_tile(register, self.totals.at(i * self.num_rows + place), self.num_rows)
            for pair in range(0, half, _RUN):
                load_tile(self._LEFT, self._values.at(i * half + pair), half)
                self._multiply(self._pairs.at(pair * self.num_rows))
            for register, place in zip(self._TOTALS, self.places, strict=True):
                store_tile(register, self.totals.at(i * self.num_rows + place), self.num_rows)

    def _multiply(self, right: Pointer) -> None:
        """Adds the left tile times [16 pairs, rows] to the totals."""
        for register, place in zip(self._TOTALS, self.places, strict=True):
            load_tile(self._RIGHT, right.at(place), self.num_rows)
            multiply_tiles(self.b, register, self._LEFT, self._RIGHT)

    def _pair_values(self, runs: Sequence[Pointer], first: Value) -> None:
        """Pairs 16 numbers of the values."""
        b, dim, half = self.b, self.shape.head_dim, self.num_keys // 2
        pairs = [
            load_interleaved(run.at(first + token * dim), run.at(first + (token + 1) * dim))
            for run in runs
            for token in range(0, _RUN, 2)
        ]
        for start in range(0, half, MAX_LANES):
            for i, line in enumerate(b.transposed(pairs[start : start + MAX_LANES])):
                self._values.at((first + i) * half + start).store(line)


def whole_tiles() -> int:
    """Address of the configuration for tiles of 16 rows."""
    return configuration(MAX_TILE_ROWS).data_ptr()
