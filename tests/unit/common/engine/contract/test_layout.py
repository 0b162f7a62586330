from dataclasses import replace

import msgspec
import pytest

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout, map_layouts
from common.errors import IncompatiblePeerError

FULL = KVGroupSpec((0, 2), 8, 64, 48, "bfloat16")
WINDOW = KVGroupSpec((1, 3), 8, 64, 48, "bfloat16", "window", 128)
LAYOUT = KVLayout(16, (FULL, WINDOW))


@pytest.mark.parametrize("degree", [1, 2])
def test_equal_layouts_map_rank_by_rank(degree):
    layout = replace(LAYOUT, tensor_parallel_size=degree)
    assert map_layouts(layout, replace(layout)) == tuple((rank, rank) for rank in range(degree))


@pytest.mark.parametrize(
    ("consumer", "says"),
    [
        (replace(LAYOUT, block_size=32), "block_size differs: 16 at the producer, 32 at the consumer"),
        (replace(LAYOUT, tensor_parallel_size=4), "tensor_parallel_size differs: 1 at the producer, 4 at the consumer"),
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
    assert stored == [LAYOUT] * 3


def test_a_digest_stands_for_all_of_the_layout():
    layouts = [
        LAYOUT,
        replace(LAYOUT, block_size=32),
        replace(LAYOUT, tensor_parallel_size=2),
        KVLayout(16, (replace(FULL, layers=(0, 1)), replace(WINDOW, layers=(2, 3)))),
        KVLayout(16, (FULL, replace(WINDOW, window=64))),
    ]
    digests = [layout.digest for layout in layouts]
    assert len(set(digests)) == len(layouts)
    assert {len(digest) for digest in digests} == {16}
    assert replace(LAYOUT).digest == LAYOUT.digest


def test_comes_back_from_a_message():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT), type=KVLayout) == LAYOUT
