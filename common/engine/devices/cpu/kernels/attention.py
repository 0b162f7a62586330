"""Attention of decodes over the paged KV cache, read in place; and what comes between a layer's projections and it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from common.engine.contract.kv_groups import Window, row_numbers_of
from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.elementwise import inverse_rms
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value, lanes_of
from common.engine.devices.kv_quantization import LIMITS, MIN_SCALE

MAX_HEADS = 4  # query heads that share a pass over their keys; their sums stay in registers
_MAX_WIDENING_HEADS = 8  # the same, where each number is also widened
_MAX_VECTORS = MAX_LANES  # of values summed up at once: half of the registers, of which there are 32 or 16
TILES_AHEAD = 2  # of the one that is attended to, memory is asked for
HIDDEN = -1e30  # score of a token that is not attended to
_SCALES = ElementType.BFLOAT16


@dataclass(frozen=True)
class CacheShape:
    """The shapes that the code of an attention kernel depends on."""

    element: ElementType  # of queries and results, and of the KV cache
    num_layers: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    quantized: ElementType | None = None  # of the KV cache, if that is quantised

    @property
    def cache_element(self) -> ElementType:
        """Type of the numbers in the KV cache."""
        return self.quantized or self.element

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_numbers(self) -> int:
        """Numbers in a block."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_numbers

    @property
    def head_numbers(self) -> int:
        """Numbers of one head's keys, or values, in a block and layer; with scales, if there are some."""
        return self.block_size * row_numbers_of(self.cache_element.value, self.head_dim)

    @property
    def tile(self) -> int:
        """Tokens that are attended to at once."""
        return lanes_of(self.block_size)

    def keys_at(self, cache: Pointer, block: Value, kv_head: Value, offset: Value) -> Vectors:
        """Keys of a head from a token of a block on. `cache`: of the layer, from its first block on."""
        head = cache.at(block * self.block_numbers + kv_head * self.head_numbers)
        numbers = head.at(offset * self.head_dim)
        if self.quantized is None:
            return Vectors(numbers, None)
        return Vectors(numbers, head.at(self.block_size * self.head_dim).of(_SCALES).at(offset))

    def values_beside(self, keys: Vectors) -> Vectors:
        """Values of the same tokens."""
        distance = self.num_kv_heads * self.head_numbers
        numbers, scales = keys
        if scales is not None:
            scales = scales.of(self.cache_element).at(distance).of(_SCALES)
        return Vectors(numbers.at(distance), scales)


class Vectors(NamedTuple):
    """Keys, or values, of tokens that are side by side in a block."""

    numbers: Pointer
    scales: Pointer | None  # of each token, if they are quantised


@dataclass(frozen=True)
class Scores:
    """How a layer turns queries and keys into scores."""

    scale: float
    window: Window | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def first_seen(self, b: Builder, position: Value) -> Value:
        """The first position that the token at `position` sees."""
        window = self.window
        if window is None:
            return b.number(0)
        if window.is_chunked:
            return position - position % window.size
        return b.select(position < window.size, 0, position - (window.size - 1))


@kernel_factory
def decode_kernel(shape: CacheShape, scores: Scores) -> KernelSource:
    """Attention of one query token for each of some sequences; a task is one sequence and KV head.

    cache: of the layer, from its first block on. query [sequences, heads, head_dim] and out alike, with `query_stride`
    numbers from one sequence to the next in query. seq_lens [sequences], block_tables [sequences, table_width], sinks
    [heads] float32.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        sequence, kv_head = task // shape.num_kv_heads, task % shape.num_kv_heads
        first_head = kv_head * shape.group
        query = a.query.at(sequence * a.query_stride + first_head * shape.head_dim)
        scaled = b.scratch(shape.group * shape.head_dim)
        lanes = lanes_of(shape.head_dim)
        with b.loop(0, shape.group * shape.head_dim, lanes) as i:
            scaled.at(i).store(query.at(i).load(lanes) * scores.scale)
        _attend(b, shape, scores, a, sequence, kv_head, scaled)

    arguments = _attention_arguments(shape) | {"query": shape.element, "query_stride": None}
    return KernelSource("decode_attention", arguments, body)


@kernel_factory
def fused_decode_kernel(shape: CacheShape, scores: Scores, *, has_norms: bool) -> KernelSource:
    """The same from the projections: norms of queries and keys, rotary embedding, writing the cache, attention.

    qkv [sequences, (heads + 2 * kv heads) * head_dim]; slots [sequences]; positions [sequences], rows of the tables
    cosines and sines [positions, head_dim] float32; query_norm and key_norm [head_dim] float32.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        sequence, kv_head = task // shape.num_kv_heads, task % shape.num_kv_heads
        scaled = b.scratch(shape.group * shape.head_dim)
        _rotate_and_store(b, shape, a, sequence, kv_head, scaled, has_norms=has_norms, scale=scores.scale)
        _attend(b, shape, scores, a, sequence, kv_head, scaled)

    return KernelSource("fused_decode_attention", _attention_arguments(shape) | _projection_arguments(shape), body)


@kernel_factory
def prepare_kernel(shape: CacheShape, *, has_norms: bool) -> KernelSource:
    """The first part of it alone, for chunks of prompts: queries and keys are also changed in place in qkv. A task is
    one token and KV head."""

    def body(b: Builder, task: Value, a: Any) -> None:
        token, kv_head = task // shape.num_kv_heads, task % shape.num_kv_heads
        row = a.qkv.at(token * _qkv_numbers(shape))
        queries = row.at(kv_head * (shape.group * shape.head_dim))
        _rotate_and_store(b, shape, a, token, kv_head, queries, has_norms=has_norms, scale=None)

    return KernelSource("prepare_attention", _projection_arguments(shape), body)


@kernel_factory
def store_kernel(shape: CacheShape) -> KernelSource:
    """Rounds keys and values to a cache that is quantised. A task is one token and KV head.

    cache: of the layer, from its first block on. key and value [tokens, kv heads, head_dim], with `key_stride` and
    `value_stride` numbers from one token to the next. slots [tokens].
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        token, kv_head = task // shape.num_kv_heads, task % shape.num_kv_heads
        slot, first = a.slots.at(token).load(), kv_head * shape.head_dim
        cached = shape.keys_at(a.cache, slot // shape.block_size, kv_head, slot % shape.block_size)
        quantize(b, a.key.at(token * a.key_stride + first), cached, shape.head_dim)
        quantize(b, a.value.at(token * a.value_stride + first), shape.values_beside(cached), shape.head_dim)

    arguments = {"cache": shape.cache_element, "key": shape.element, "value": shape.element}
    strides = dict.fromkeys(("key_stride", "value_stride"))
    return KernelSource("store_quantized", arguments | {"slots": ElementType.INT64} | strides, body)


def _attention_arguments(shape: CacheShape) -> dict[str, ElementType | None]:
    ints = ElementType.INT64
    return {
        "cache": shape.cache_element,
        "seq_lens": ints,
        "block_tables": ints,
        "table_width": None,
        "sinks": ElementType.FLOAT32,
        "out": shape.element,
    }


def _projection_arguments(shape: CacheShape) -> dict[str, ElementType | None]:
    ints, floats = ElementType.INT64, ElementType.FLOAT32
    return {
        "cache": shape.cache_element,
        "qkv": shape.element,
        "slots": ints,
        "positions": ints,
        "cosines": floats,
        "sines": floats,
        "query_norm": floats,
        "key_norm": floats,
        "epsilon": floats,
    }


def _qkv_numbers(shape: CacheShape) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def _rotate_and_store(
    b: Builder,
    shape: CacheShape,
    a: Any,
    token: Value,
    kv_head: Value,
    queries: Pointer,
    *,
    has_norms: bool,
    scale: float | None,
) -> None:
    """Queries of the KV head's group go to `queries`, its key and value to the cache."""
    dim = shape.head_dim
    row = a.qkv.at(token * _qkv_numbers(shape))
    cosines, sines = (table.at(a.positions.at(token).load() * dim) for table in (a.cosines, a.sines))
    query_norm, key_norm = (a.query_norm, a.key_norm) if has_norms else (None, None)
    own = row.at(kv_head * (shape.group * dim))
    with b.loop(0, shape.group) as head:
        offset = head * dim
        _rotate(b, dim, own.at(offset), [queries.at(offset)], cosines, sines, query_norm, a.epsilon, scale)
    slot = a.slots.at(token).load()
    cached = shape.keys_at(a.cache, slot // shape.block_size, kv_head, slot % shape.block_size)
    key = row.at((kv_head + shape.num_heads) * dim)
    value = key.at(shape.num_kv_heads * dim)
    turned = cached.numbers if shape.quantized is None else b.scratch(dim)
    targets = [turned] if scale is not None else [turned, key]
    _rotate(b, dim, key, targets, cosines, sines, key_norm, a.epsilon, None)
    if shape.quantized is not None:
        quantize(b, turned, cached, dim)
        quantize(b, value, shape.values_beside(cached), dim)
        return
    cached_value, lanes = shape.values_beside(cached).numbers, lanes_of(dim)
    for i in range(0, dim, lanes):
        cached_value.at(i).store(value.at(i).load(lanes))


def quantize(b: Builder, source: Pointer, target: Vectors, dim: int) -> None:
    """Writes one vector of `dim` numbers with its scale; see `kv_quantization`."""
    numbers, scale = target
    assert scale is not None
    limit, lanes = LIMITS[numbers.element.dtype], lanes_of(dim)
    parts = {i: source.at(i).load(lanes) for i in range(0, dim, lanes)}
    largest = poison = b.number(0.0, lanes)
    for part in parts.values():
        largest = b.maximum(largest, b.abs(part))
        poison = poison + part * 0.0  # NaN if the part has NaN or infinity, which the maximum ignores
    scale.store(b.maximum(b.max(largest) * (1.0 / limit), MIN_SCALE) + b.sum(poison))
    inverse = b.number(1.0) / scale.load()
    for i, part in parts.items():
        numbers.at(i).store(b.minimum(b.maximum(part * inverse, -limit), limit))


def _rotate(
    b: Builder,
    dim: int,
    source: Pointer,
    targets: list[Pointer],
    cosines: Pointer,
    sines: Pointer,
    norm: Pointer | None,
    epsilon: Pointer,
    scale: float | None,
) -> None:
    """Norm, if any, and rotary embedding of one head: each number turns with the one half a head away."""
    half = dim // 2
    lanes = lanes_of(half)
    places = range(0, half, lanes)
    numbers = {i: source.at(i).load(lanes) for start in (0, half) for i in (start + place for place in places)}
    if norm is not None:
        squares = b.number(0.0, lanes)
        for number in numbers.values():
            squares = b.fma(number, number, squares)
        inverse = inverse_rms(b, squares, dim, epsilon)
        numbers = {i: number * inverse * norm.at(i).load(lanes) for i, number in numbers.items()}
    for i in places:
        first, second = numbers[i], numbers[i + half]
        turned = {
            i: first * cosines.at(i).load(lanes) - second * sines.at(i).load(lanes),
            i + half: second * cosines.at(i + half).load(lanes) + first * sines.at(i + half).load(lanes),
        }
        for place, value in turned.items():
            for target in targets:
                target.at(place).store(value if scale is None else value * scale)


def _attend(
    b: Builder, shape: CacheShape, scores: Scores, a: Any, sequence: Value, kv_head: Value, queries: Pointer
) -> None:
    """Softmax over tiles of tokens, with running maxima and sums per query head; `queries` are scaled, float32."""
    group, dim, tile = shape.group, shape.head_dim, shape.tile
    state = SoftmaxState(b, group, tile, dim)
    seq_len = a.seq_lens.at(sequence).load()
    cache: Pointer = a.cache
    table = a.block_tables.at(sequence * a.table_width)
    first_token = scores.first_seen(b, seq_len - 1)

    def keys_at(token: Value) -> Vectors:
        block = table.at(token // shape.block_size).load()
        return shape.keys_at(cache, block, kv_head, token % shape.block_size)

    with b.loop(first_token - first_token % tile, seq_len, tile) as token:
        found = keys_at(token)
        (keys, key_scales), (values, value_scales) = found, shape.values_beside(found)
        ahead = token + TILES_AHEAD * tile
        next_keys = keys_at(b.select(ahead < seq_len, ahead, token))
        nexts = next_keys, shape.values_beside(next_keys)
        if shape.element is not ElementType.FLOAT32 and shape.quantized is None and group > 1:
            keys, values = (widened(b, each, tile * dim) for each in (keys, values))
        lane_tokens = b.lane_numbers(tile) + token if tile > 1 else token
        visible = lane_tokens < seq_len
        if scores.window is not None:
            visible = visible & (lane_tokens >= first_token)
        # What is quantised is widened as it is multiplied, once for several heads.
        at_once = 1 if shape.quantized is None or tile != lanes_of(dim) else _most_heads(group, _MAX_WIDENING_HEADS)
        share = -(-tile * dim * at_once // group)  # asked for between products: more at once would wait for each other
        with b.loop(0, group, at_once) as first_head:
            for numbers, scales in nexts:
                b.prefetch(numbers.at(first_head // at_once * share), share, near=False)
                if scales is not None:
                    b.prefetch(scales, tile, near=False)
            own = queries.at(first_head * dim)
            products = [_dots(b, own, keys, dim, tile)] if at_once == 1 else _products(b, own, at_once, keys, dim)
            for place, dots in enumerate(products):
                if key_scales is not None:
                    dots = dots * key_scales.load(tile)
                if scores.softcap is not None:
                    dots = b.tanh(dots * (1.0 / scores.softcap)) * scores.softcap
                state.take(first_head + place, b.select(visible, dots, HIDDEN), visible, value_scales)
        heads = _most_heads(group, MAX_HEADS if shape.quantized is None else _MAX_WIDENING_HEADS)
        with b.loop(0, group, heads) as first_head:
            add_values(b, state, first_head, heads, values, dim)
    out = a.out.at((sequence * shape.num_heads + kv_head * group) * dim)
    sinks = a.sinks.at(kv_head * group) if scores.has_sinks else None
    with b.loop(0, group) as head:
        factor = state.final_factor(head, None if sinks is None else sinks.at(head).load())
        lanes = lanes_of(dim)
        with b.loop(0, dim, lanes) as i:
            out.at(head * dim + i).store(state.total.at(head * dim + i).load(lanes) * factor)


class SoftmaxState:
    """The state of a softmax under way, for each query head of a group; in memory of the thread, which stays in its
    cache."""

    def __init__(self, b: Builder, group: int, tile: int, dim: int) -> None:
        """`dim`: numbers of a value."""
        self._b = b
        self.tile = tile
        self.dim = dim
        self._maxima = b.scratch(group)  # of all scores
        self._sums = b.scratch(group * tile)  # of all weights, lane by lane
        self.weights = b.scratch(group * tile)  # of this tile
        self.factors = b.scratch(group)  # that shrink earlier weights as the maximum grows
        self.total = b.scratch(group * dim)  # of weighted values, up to the tile before
        lanes = lanes_of(dim)
        with b.loop(0, group) as head:
            self._maxima.at(head).store(b.number(HIDDEN))
            self._sums.at(head * tile).store(b.number(0.0, tile))
        with b.loop(0, group * dim, lanes) as i:
            self.total.at(i).store(b.number(0.0, lanes))

    def take(self, head: Value, scores: Value, visible: Value, scales: Pointer | None = None) -> None:
        """Turns a tile's scores into weights. `scales`: of the tile's values, by which what they are multiplied with is
        to be multiplied."""
        b = self._b
        before = self._maxima.at(head).load()
        maximum = b.maximum(before, b.max(scores))
        factor = b.exp(before - maximum)
        weights = b.select(visible, b.exp(scores - maximum), 0.0)
        self._maxima.at(head).store(maximum)
        self.factors.at(head).store(factor)
        scaled = weights if scales is None else b.select(visible, weights * scales.load(self.tile), 0.0)
        self.weights.at(head * self.tile).store(scaled)
        sums = self._sums.at(head * self.tile)
        sums.store(sums.load(self.tile) * factor + weights)

    def final_factor(self, head: Value, sink: Value | None) -> Value:
        """Returns the factor of a head's total in the end."""
        b = self._b
        sums = self._sums.at(head * self.tile).load(self.tile)
        total = b.sum(sums)
        if sink is None:
            return b.number(1.0) / total
        before = self._maxima.at(head).load()
        maximum = b.maximum(before, sink)
        factor = b.exp(before - maximum)
        return factor / (total * factor + b.exp(sink - maximum))


def widened(b: Builder, source: Pointer, count: int) -> Pointer:
    """A float32 copy of what several query heads will read."""
    copy = b.scratch(count)
    lanes = lanes_of(count)
    with b.loop(0, count, lanes) as i:
        copy.at(i).store(source.at(i).load(lanes))
    return copy


def _dots(b: Builder, query: Pointer, keys: Pointer, dim: int, tile: int) -> Value:
    """Products of the query with each key of a tile, as a vector."""
    lanes = lanes_of(dim)
    parts = [query.at(i).load(lanes) for i in range(0, dim, lanes)]

    def products(key: int) -> Value:
        """Returns numbers whose sum is the product with one key."""
        total = b.number(0.0, lanes)
        for i, part in enumerate(parts):
            total = b.fma(part, keys.at(key * dim + i * lanes).load(lanes), total)
        return total

    if tile == lanes:
        return b.sums(products, tile)
    return b.vector([b.sum(products(key)) for key in range(tile)])


def _products(b: Builder, queries: Pointer, num_heads: int, keys: Pointer, dim: int) -> list[Value]:
    """Products of each head's query with each key of a tile, as vectors of as many lanes as a tile has keys."""
    lanes = lanes_of(dim)
    at_once = min(lanes, 1 << (max(1, _MAX_VECTORS // num_heads).bit_length() - 1))  # keys whose sums are in registers
    parts: list[list[Value]] = [[] for _ in range(num_heads)]  # by head, of the sums of `at_once` keys each
    for start in range(0, lanes, at_once):
        sums = [[b.number(0.0, lanes)] * at_once for _ in range(num_heads)]
        for i in range(0, dim, lanes):
            found = [keys.at((start + key) * dim + i).load(lanes) for key in range(at_once)]
            for head, row in enumerate(sums):
                query = queries.at(head * dim + i).load(lanes)
                row[:] = [b.fma(query, each, total) for each, total in zip(found, row, strict=True)]
        for part, row in zip(parts, sums, strict=True):
            part.append(_merged(b, row, 1))
    return [_merged(b, part, at_once) for part in parts]


def _merged(b: Builder, vectors: list[Value], width: int) -> Value:
    """See Builder.merged, of a power of two of vectors."""
    while len(vectors) > 1:
        vectors = [b.merged(*pair, width) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
        width *= 2
    return vectors[0]


def _most_heads(group: int, most: int) -> int:
    return max(count for count in range(1, most + 1) if group % count == 0)


def add_values(
    b: Builder, state: SoftmaxState, first_head: Value, num_heads: int, values: Pointer, stride: int
) -> None:
    """total = total * factor + weights @ values, for some heads of a group. Values are `stride` numbers apart."""
    dim, tile = state.dim, state.tile
    lanes = lanes_of(dim)
    width = min(dim, max(1, _MAX_VECTORS // num_heads) * lanes)
    while dim % width:
        width -= lanes
    heads = [first_head + head for head in range(num_heads)]
    with b.loop(0, dim, width) as start:
        places = [start + i for i in range(0, width, lanes)]
        totals = [[state.total.at(head * dim + place).load(lanes) for place in places] for head in heads]
        factors = [state.factors.at(head).load() for head in heads]
        totals = [[each * factor for each in row] for row, factor in zip(totals, factors, strict=True)]
        for token in range(tile):
            parts = [values.at(place + token * stride).load(lanes) for place in places]
            for row, head in zip(totals, heads, strict=True):
                weight = b.number(state.weights.at(head * tile + token).load(), lanes)
                row[:] = [b.fma(weight, part, each) for part, each in zip(parts, row, strict=True)]
        for row, head in zip(totals, heads, strict=True):
            for place, each in zip(places, row, strict=True):
                state.total.at(head * dim + place).store(each)
