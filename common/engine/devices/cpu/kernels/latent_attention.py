"""Attention of decodes over latents in the paged KV cache, read in place: one KV head, whose values are the first
numbers of its keys.

All heads of a model attend to the same latents, so that arithmetic is what takes the time. A task has some of the
heads, and products with a tile of latents are computed for a few heads and tokens at once: each vector that is loaded
counts for several products. On processors that multiply pairs of bfloat16 numbers, latents and weights stay such
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.engine.devices.cpu.kernels.attention import (
    HIDDEN,
    MAX_HEADS,
    TILES_AHEAD,
    Scores,
    SoftmaxState,
    add_values,
    widened,
)
from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value, lanes_of
from common.engine.devices.cpu.kernels.pairs import MULTIPLIES_PAIRS, fma_pairs, load_interleaved, load_pairs, paired

_MAX_GROUP = 16  # heads of a task
_MIN_TASKS = 2  # of a sequence, if it has heads enough, so that one alone occupies several cores
_MIN_GROUP = 8


@dataclass(frozen=True)
class LatentShape:
    """The shapes that the code of the kernel depends on."""

    element: ElementType  # of the KV cache, queries and results
    num_layers: int
    num_heads: int
    block_size: int
    rank: int  # numbers of a latent
    rotary_dim: int

    @property
    def dim(self) -> int:
        """Numbers that are cached of a token."""
        return self.rank + self.rotary_dim

    @property
    def group(self) -> int:
        """Heads of a task."""
        most = max(min(_MAX_GROUP, self.num_heads // _MIN_TASKS), min(_MIN_GROUP, self.num_heads))
        return max(count for count in range(1, most + 1) if self.num_heads % count == 0)

    @property
    def tile(self) -> int:
        """Tokens that are attended to at once."""
        return lanes_of(self.block_size)

    @property
    def lanes(self) -> int:
        """Numbers of a latent that are multiplied at once."""
        return lanes_of(self.dim)

    @property
    def rows(self) -> int:
        """Heads that are multiplied with `lanes // rows` tokens at once; 0 if there is no such number."""
        fitting = (4, 2, 1)
        return next((each for each in fitting if self.group % each == 0 and self._fits(self.lanes // each)), 0)

    @property
    def has_pairs(self) -> bool:
        """Whether two numbers are multiplied in each lane."""
        is_even = self.dim % (2 * MAX_LANES) == 0 and self.rank % MAX_LANES == 0
        return MULTIPLIES_PAIRS and self.element is ElementType.BFLOAT16 and is_even

    @property
    def is_supported(self) -> bool:
        """Whether there is a kernel for it."""
        return self.rows > 0 and lanes_of(self.rank) > 1

    def _fits(self, num_tokens: int) -> bool:
        return num_tokens >= 4 and self.tile % num_tokens == 0


@kernel_factory
def latent_decode_kernel(shape: LatentShape, scores: Scores) -> KernelSource:
    """Attention of one query token for each of some sequences; a task is a sequence and some of the heads.

    cache: of the layer, from its first block on. query [sequences, heads, rank + rotary dim], out [sequences, heads,
    rank]; seq_lens [sequences], block_tables [sequences, table_width], sinks [heads] float32.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        num_parts = shape.num_heads // shape.group
        sequence, first_head = task // num_parts, task % num_parts * shape.group
        _attend(b, shape, scores, a, sequence, first_head)

    ints = ElementType.INT64
    arguments = {
        "cache": shape.element,
        "query": shape.element,
        "seq_lens": ints,
        "block_tables": ints,
        "table_width": None,
        "sinks": ElementType.FLOAT32,
        "out": shape.element,
    }
    return KernelSource("latent_decode_attention", arguments, body)


def _attend(b: Builder, shape: LatentShape, scores: Scores, a: Any, sequence: Value, first_head: Value) -> None:
    group, tile, dim = shape.group, shape.tile, shape.dim
    is_widened = shape.element is not ElementType.FLOAT32 and not shape.has_pairs
    head_of_all = sequence * shape.num_heads + first_head
    queries = a.query.at(head_of_all * dim)
    if is_widened:
        queries = widened(b, queries, group * dim)
    state, dots = SoftmaxState(b, group, tile, shape.rank), b.scratch(group * tile)
    pairs = _Pairs(b, shape) if shape.has_pairs else None
    seq_len = a.seq_lens.at(sequence).load()
    table = a.block_tables.at(sequence * a.table_width)
    first_token = scores.first_seen(b, seq_len - 1)

    def latents_at(token: Value) -> Pointer:
        block = table.at(token // shape.block_size).load()
        found: Pointer = a.cache.at((block * shape.num_layers * shape.block_size + token % shape.block_size) * dim)
        return found

    with b.loop(first_token - first_token % tile, seq_len, tile) as token:
        latents, ahead = latents_at(token), token + TILES_AHEAD * tile
        next_latents = latents_at(b.select(ahead < seq_len, ahead, token))
        if is_widened:
            latents = widened(b, latents, tile * dim)
        _multiply(b, shape, queries, latents, dots, next_latents)
        lane_tokens = b.lane_numbers(tile) + token
        visible = lane_tokens < seq_len
        if scores.window is not None:
            visible = visible & (lane_tokens >= first_token)
        with b.loop(0, group) as head:
            own = dots.at(head * tile).load(tile) * scores.scale
            if scores.softcap is not None:
                own = b.tanh(own * (1.0 / scores.softcap)) * scores.softcap
            state.take(head, b.select(visible, own, HIDDEN), visible)
        heads = max(count for count in range(1, MAX_HEADS + 1) if group % count == 0)
        if pairs is not None:
            pairs.take(latents, state)
        with b.loop(0, group, heads) as head:
            if pairs is None:
                add_values(b, state, head, heads, latents, dim)
            else:
                pairs.add_values(state, head, heads)
    out = a.out.at(head_of_all * shape.rank)
    lanes = lanes_of(shape.rank)
    with b.loop(0, group) as head:
        sink = a.sinks.at(first_head + head).load() if scores.has_sinks else None
        factor = state.final_factor(head, sink)
        with b.loop(0, shape.rank, lanes) as i:
            out.at(head * shape.rank + i).store(state.total.at(head * shape.rank + i).load(lanes) * factor)


class _Pairs:
    """Latents and weights of two tokens of a tile in each lane."""

    def __init__(self, b: Builder, shape: LatentShape) -> None:
        self._b = b
        self._shape = shape
        self._latents = b.scratch(shape.tile // 2 * shape.rank)  # [tile / 2, rank]
        self._weights = b.scratch(shape.group * shape.tile // 2)  # [group, tile / 2]

    def take(self, latents: Pointer, state: SoftmaxState) -> None:
        """Puts a tile's together."""
        b, shape = self._b, self._shape
        half = shape.tile // 2
        for pair in range(half):
            with b.loop(0, shape.rank, MAX_LANES) as i:
                two = (latents.at(i + token * shape.dim) for token in (2 * pair, 2 * pair + 1))
                self._latents.at(i + pair * shape.rank).store(load_interleaved(*two))
        even = [2 * (lane % half) for lane in range(MAX_LANES)]
        with b.loop(0, shape.group) as head:
            own = state.weights.at(head * shape.tile).load(shape.tile)
            first, second = (b.shuffle(own, own, [lane + each for lane in even]) for each in (0, 1))
            both = paired(b, first, second)
            for pair in range(half):
                self._weights.at(head * half + pair).store(b.lane(both, pair))

    def add_values(self, state: SoftmaxState, first_head: Value, num_heads: int) -> None:
        """See `add_values` of kernels that have no pairs."""
        b, rank, half = self._b, self._shape.rank, self._shape.tile // 2
        width = max(1, MAX_LANES // num_heads) * MAX_LANES
        while rank % width:
            width -= MAX_LANES
        heads = [first_head + head for head in range(num_heads)]
        with b.loop(0, rank, width) as start:
            places = [start + i for i in range(0, width, MAX_LANES)]
            totals = []
            for head in heads:
                factor = state.factors.at(head).load()
                totals.append([state.total.at(head * rank + place).load(MAX_LANES) * factor for place in places])
            for pair in range(half):
                parts = [self._latents.at(place + pair * rank).load(MAX_LANES) for place in places]
                for row, head in zip(totals, heads, strict=True):
                    weight = b.number(self._weights.at(head * half + pair).load(), MAX_LANES)
                    row[:] = [fma_pairs(b, weight, part, each) for part, each in zip(parts, row, strict=True)]
            for row, head in zip(totals, heads, strict=True):
                for place, each in zip(places, row, strict=True):
                    state.total.at(head * rank + place).store(each)


def _multiply(
    b: Builder, shape: LatentShape, queries: Pointer, latents: Pointer, dots: Pointer, next_latents: Pointer
) -> None:
    """dots [group, tile] = queries @ latents of a tile; of the next one, memory is asked for."""
    dim, tile, lanes, rows = shape.dim, shape.tile, shape.lanes, shape.rows
    columns, numbers = lanes // rows, 2 * lanes if shape.has_pairs else lanes
    add = fma_pairs if shape.has_pairs else Builder.fma
    share = -(-tile * dim * lanes // (shape.group * tile))
    with b.loop(0, shape.group, rows) as head, b.loop(0, tile, columns) as token:
        b.prefetch(next_latents.at((head * tile + token * rows) // lanes * share), share, near=False)
        sums = [b.variable(b.number(0.0, lanes)) for _ in range(lanes)]
        with b.loop(0, dim, numbers) as i:
            own = [_load(shape, queries.at((head + row) * dim + i)) for row in range(rows)]
            others = [_load(shape, latents.at((token + column) * dim + i)) for column in range(columns)]
            for place, sum_ in enumerate(sums):
                sum_.set(add(b, own[place // columns], others[place % columns], sum_.get()))
        found = b.sums(lambda place, sums=sums: sums[place].get(), lanes)  # type: ignore[misc]
        for row in range(rows):
            part = b.shuffle(found, found, range(row * columns, (row + 1) * columns))
            dots.at((head + row) * tile + token).store(part)


def _load(shape: LatentShape, pointer: Pointer) -> Value:
    return load_pairs(pointer, MAX_LANES) if shape.has_pairs else pointer.load(shape.lanes)
