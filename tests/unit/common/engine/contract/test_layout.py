import itertools
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout, Part, map_layouts
from common.errors import IncompatiblePeerError

FULL = KVGroupSpec((0, 2), 8, 64, 48, "bfloat16")
WINDOW = KVGroupSpec((1, 3), 8, 64, 48, "bfloat16", "window", 128)
LAYOUT = KVLayout(16, (FULL, WINDOW))


DEGREES = (1, 2, 4, 8)
STAGES = ((), (1, 2), (2, 1), (1, 1, 1))
HEADS = (1, 2, 3, 4, 6, 8, 12)


def layout_of(num_heads: int, degree: int, layers_by_stage: tuple[int, ...] = ()) -> KVLayout:
    return KVLayout(4, (KVGroupSpec((0, 1, 2), num_heads, 5, 5, "float32"),), degree, layers_by_stage)


def divided(block: torch.Tensor, degree: int, layers_by_stage: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """What each rank has of a block [num_layers, 2, heads, block_size, head_dim]."""
    num_heads = block.shape[2]
    each = block.repeat_interleave(max(1, degree // num_heads), dim=2)
    stages = each.split(layers_by_stage or (3,))
    return [part.clone() for stage in stages for part in stage.chunk(degree, dim=2)]


def fits(num_heads: int, degree: int) -> bool:
    return num_heads % degree == 0 or degree % num_heads == 0


@pytest.mark.parametrize("degree", [1, 2])
def test_equal_layouts_map_rank_by_rank(degree):
    layout = replace(LAYOUT, tensor_parallel_size=degree)
    whole = Part(0, 2, 0, 8 // degree)
    assert map_layouts(layout, replace(layout)) == tuple((rank, rank, whole, whole) for rank in range(degree))


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize(("of_producer", "of_consumer"), list(itertools.product(DEGREES, DEGREES)))
def test_the_parts_are_those_of_the_whole_block(num_heads, of_producer, of_consumer):
    layouts = layout_of(num_heads, of_producer), layout_of(num_heads, of_consumer)
    if not fits(num_heads, of_producer) or not fits(num_heads, of_consumer):
        with pytest.raises(IncompatiblePeerError, match=f"{num_heads} KV heads cannot be divided among") as caught:
            map_layouts(*layouts)
        assert caught.value.param == "tensor_parallel_size"
        return
    check_parts(num_heads, (of_producer, ()), (of_consumer, ()))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HEADS), *[st.tuples(st.sampled_from(DEGREES), st.sampled_from(STAGES)) for _ in range(2)])
def test_parts_of_heads_and_layers(num_heads, of_producer, of_consumer):
    assume(fits(num_heads, of_producer[0]) and fits(num_heads, of_consumer[0]))
    check_parts(num_heads, of_producer, of_consumer)


def check_parts(num_heads, of_producer, of_consumer):
    """Cuts are (degree, layers by stage)."""
    whole = torch.arange(3 * 2 * num_heads * 4 * 5).view(3, 2, num_heads, 4, 5)
    sources, wanted = divided(whole, *of_producer), divided(whole, *of_consumer)
    found = [torch.full_like(part, -1) for part in wanted]
    for source_rank, rank, source, target in map_layouts(
        layout_of(num_heads, *of_producer), layout_of(num_heads, *of_consumer)
    ):
        place = narrowed(found[rank], target)
        assert (place == -1).all()  # once
        place.copy_(narrowed(sources[source_rank], source))
    assert all(map(torch.equal, found, wanted))
    for shard, part in zip(layout_of(num_heads, *of_consumer).shards, wanted, strict=True):
        own = whole[shard.layers.start : shard.layers.stop, :, shard.heads.start : shard.heads.stop]
        assert torch.equal(own, part)


def test_blocks_of_all_groups_have_as_many_planes():
    latents = replace(FULL, num_kv_heads=1, value_head_dim=0)
    assert [KVLayout(16, (group,)).num_planes for group in (FULL, latents)] == [2, 1]
    with pytest.raises(IncompatiblePeerError) as caught:
        assert KVLayout(16, (latents, replace(WINDOW, num_kv_heads=1))).num_planes
    assert caught.value.param == "value_head_dim"


def narrowed(block, part):
    return block.narrow(0, part.layer, part.num_layers).narrow(2, part.head, part.num_heads)


def test_features_go_along_where_both_have_as_many():
    with_features = replace(LAYOUT, num_feature_layers=3)
    for producer, consumer, num_layers in (
        (with_features, with_features, 5),
        (with_features, LAYOUT, 2),
        (LAYOUT, with_features, 2),
        (with_features, replace(LAYOUT, num_feature_layers=1), 2),
    ):
        whole = Part(0, num_layers, 0, 8)
        assert map_layouts(producer, consumer) == ((0, 0, whole, whole),)
    of_ranks = map_layouts(replace(LAYOUT, tensor_parallel_size=2), with_features)
    assert [part.target for part in of_ranks] == [Part(0, 2, 0, 4), Part(0, 2, 4, 4)]


@pytest.mark.parametrize("counts", [(1, 1), (4,), (3, 0), (2, 2), (4, -1)])
def test_layers_that_cannot_be_divided_are_named(counts):
    for mapped in ((layout_of(2, 1), layout_of(2, 1, counts)), (layout_of(2, 1, counts), layout_of(2, 1))):
        with pytest.raises(IncompatiblePeerError, match="3 layers cannot be divided into stages") as caught:
            map_layouts(*mapped)
        assert caught.value.param == "layers_by_stage"


@pytest.mark.parametrize(("num_heads", "of_producer", "of_consumer"), [(1, 4, 4), (2, 8, 4), (2, 8, 8), (2, 4, 8)])
def test_ranks_that_have_the_same_head_take_turns(num_heads, of_producer, of_consumer):
    parts = map_layouts(layout_of(num_heads, of_producer), layout_of(num_heads, of_consumer))
    writes = Counter(part.producer_rank for part in parts)
    assert set(writes.values()) == {max(1, of_consumer // of_producer)}


@pytest.mark.parametrize("degree", [0, 3, 1 << 31])
def test_heads_that_cannot_be_divided_are_named(degree):
    for mapped in ((layout_of(8, 1), layout_of(8, degree)), (layout_of(8, degree), layout_of(8, 1))):
        with pytest.raises(IncompatiblePeerError, match=f"8 KV heads cannot be divided among {degree} ranks"):
            map_layouts(*mapped)


def test_groups_of_other_heads_are_named():
    layout = KVLayout(16, (FULL, replace(WINDOW, num_kv_heads=4)))
    with pytest.raises(IncompatiblePeerError, match=r"blocks of \[4, 8\] KV heads") as caught:
        map_layouts(layout, layout)
    assert caught.value.param == "num_kv_heads"


@pytest.mark.parametrize(
    ("consumer", "says"),
    [
        (replace(LAYOUT, block_size=32), "block_size differs: 16 at the producer, 32 at the consumer"),
        (KVLayout(16, (FULL,)), "num_kv_groups differs: 2 at the producer, 1 at the consumer"),
        (KVLayout(16, (FULL, replace(WINDOW, window=64))), "window differs: 128 at the producer, 64 at the consumer"),
        (KVLayout(16, (replace(FULL, num_kv_heads=4), WINDOW)), "num_kv_heads differs: 8 at the producer, 4 at the"),
        (KVLayout(16, (replace(FULL, layers=(0,)), WINDOW)), r"layers differs: \(0, 2\) at the producer"),
        (KVLayout(16, (FULL, FULL)), r"layers differs: \(1, 3\) at the producer"),
    ],
)
def test_what_does_not_fit_is_named(consumer, says):
    with pytest.raises(IncompatiblePeerError, match=says) as caught:
        map_layouts(LAYOUT, consumer)
    assert caught.value.param == says.split()[0]


def test_a_store_has_the_same_layout_whatever_the_degree():
    stored = [replace(LAYOUT, tensor_parallel_size=degree).of_store for degree in (1, 2, 4)]
    stored.append(replace(LAYOUT, layers_by_stage=(1, 1)).of_store)
    assert stored == [LAYOUT] * 4


def test_a_digest_stands_for_all_of_the_layout():
    layouts = [
        LAYOUT,
        replace(LAYOUT, block_size=32),
        replace(LAYOUT, tensor_parallel_size=2),
        replace(LAYOUT, layers_by_stage=(1, 1)),
        KVLayout(16, (replace(FULL, layers=(0, 1)), replace(WINDOW, layers=(2, 3)))),
        KVLayout(16, (FULL, replace(WINDOW, window=64))),
        KVLayout(16, (FULL, replace(WINDOW, kind="chunked"))),
    ]
    digests = [layout.digest for layout in layouts]
    assert len(set(digests)) == len(layouts)
    assert {len(digest) for digest in digests} == {16}
    assert replace(LAYOUT).digest == LAYOUT.digest


def test_comes_back_from_a_message():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT), type=KVLayout) == LAYOUT
