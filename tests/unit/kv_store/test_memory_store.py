from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.types import BlockHash
from kv_store.memory_store import InMemoryStore, MemoryMedium, MemoryStoreOptions


def key(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def open_store(name: str, max_bytes: int = 300) -> InMemoryStore:
    store = InMemoryStore(MemoryStoreOptions(store=name, max_bytes=max_bytes))
    store.open("model", 100)
    return store


def test_stores_of_one_name_share_blocks():
    one, same, other = open_store("a"), open_store("a"), open_store("b")
    one.write([key(1)], [memoryview(bytes(100))])
    assert same.touch([key(1)]) == [True]
    assert other.touch([key(1)]) == [False]


def test_least_recently_used_blocks_go_first():
    store = open_store("lru")
    for index in range(3):
        store.write([key(index)], [memoryview(bytes(100))])
    assert store.touch([key(0)]) == [True]
    store.write([key(3)], [memoryview(bytes(100))])
    assert store.touch([key(index) for index in range(4)]) == [True, False, True, True]
    assert MemoryMedium.named("lru").num_bytes == 300


def test_a_discarded_block_leaves_room_for_one():
    store = open_store("discarded")
    for index in range(3):
        store.write([key(index)], [memoryview(bytes(100))])
    for _ in range(2):  # the second time it is not there
        store.discard(key(0))
    store.write([key(3)], [memoryview(bytes(100))])
    assert store.touch([key(index) for index in range(4)]) == [False, True, True, True]
    assert MemoryMedium.named("discarded").num_bytes == 300


def test_a_bound_below_one_block_is_refused():
    with pytest.raises(ConfigError) as caught:
        open_store("small", max_bytes=99)
    assert caught.value.param == "max_bytes"


def test_blocks_go_with_the_last_store_of_their_name():
    store = open_store("fleeting")
    store.write([key(1)], [memoryview(bytes(100))])
    del store
    assert open_store("fleeting").touch([key(1)]) == [False]
