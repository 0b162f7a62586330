from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.types import BlockHash
from kv_store.host_pool import HostPool

FRAME_BYTES = 64


def key(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def frame(index: int, num_bytes: int = FRAME_BYTES) -> memoryview:
    return memoryview(bytes([index % 256]) * num_bytes)


def open_pool(num_frames: int, frame_bytes: int = FRAME_BYTES) -> HostPool:
    pool = HostPool(num_frames * frame_bytes + frame_bytes - 1)
    pool.open("model", frame_bytes)
    return pool


def fill(pool: HostPool, *indices: int) -> None:
    pool.write([key(index) for index in indices], [frame(index) for index in indices])


def kept(pool: HostPool, *indices: int) -> list[bool]:
    return pool.touch([key(index) for index in indices])


def read(pool: HostPool, index: int, num_bytes: int = FRAME_BYTES) -> bytes | None:
    buffer = bytearray(num_bytes)
    (size,) = pool.read_into([key(index)], [memoryview(buffer)])
    return None if size is None else bytes(buffer)


def test_what_is_written_can_be_read_and_nothing_else():
    pool = open_pool(3)
    fill(pool, 1, 2)
    assert kept(pool, 1, 2, 3) == [True, True, False]
    assert read(pool, 2) == bytes(frame(2))
    assert read(pool, 3) is None
    assert pool.check_integrity() == []


def test_a_write_that_fails_leaves_no_block():
    pool = open_pool(1)
    with pytest.raises(ValueError, match="broadcast"):
        pool.write([key(1)], [frame(1, num_bytes=FRAME_BYTES + 1)])
    assert kept(pool, 1) == [False]
    assert pool.check_integrity() == []


@pytest.mark.parametrize("use", ["touch", "read", "write"])
def test_the_least_recently_used_block_gives_way(use):
    pool = open_pool(3)
    fill(pool, 0, 1, 2)
    {"touch": lambda: kept(pool, 0), "read": lambda: read(pool, 0), "write": lambda: fill(pool, 0)}[use]()
    fill(pool, 3)
    assert kept(pool, 0, 1, 2, 3) == [True, False, True, True]
    assert pool.check_integrity() == []


def test_a_buffer_of_another_size_takes_what_fits():
    pool = open_pool(1)
    fill(pool, 7)
    assert read(pool, 7, num_bytes=10) == bytes(frame(7, 10))
    assert read(pool, 7, num_bytes=100) == bytes(frame(7)) + bytes(36)


def test_a_discarded_block_can_be_written_anew():
    pool = open_pool(2)
    fill(pool, 1)
    pool.discard(key(1))
    pool.discard(key(9))
    assert read(pool, 1) is None
    pool.write([key(1)], [frame(5)])
    assert read(pool, 1) == bytes(frame(5))
    assert pool.check_integrity() == []


def test_a_bound_below_one_block_is_refused():
    with pytest.raises(ConfigError, match="host_bytes: 63 bytes cannot hold a block of 64") as caught:
        HostPool(63).open("model", 64)
    assert caught.value.param == "host_bytes"


def test_more_than_the_system_has_is_refused():
    with pytest.raises(ConfigError, match="host_bytes: cannot allocate") as caught:
        HostPool(1 << 60).open("model", 1 << 20)
    assert caught.value.param == "host_bytes"


def test_closed_it_holds_nothing_and_takes_nothing():
    pool = open_pool(2)
    pool.close()
    HostPool(100).close()
    fill(pool, 1)
    pool.close()
    assert kept(pool, 1) == [False]
    assert read(pool, 1) is None


Calls = st.lists(st.tuples(st.sampled_from(["write", "read", "touch", "discard"]), st.integers(0, 7)), max_size=60)


@given(calls=Calls, num_frames=st.integers(1, 5))
def test_it_is_a_bounded_dictionary(calls, num_frames):
    pool = open_pool(num_frames)
    expected: dict[int, bytes] = {}  # least recently used first
    for call, index in calls:
        if index in expected and call != "discard":
            expected[index] = expected.pop(index)
        if call == "write":
            fill(pool, index)
            expected.setdefault(index, bytes(frame(index)))
            if len(expected) > num_frames:
                del expected[next(iter(expected))]
        elif call == "read":
            assert read(pool, index) == expected.get(index)
        elif call == "touch":
            assert kept(pool, index) == [index in expected]
        else:
            pool.discard(key(index))
            expected.pop(index, None)
        assert pool.check_integrity() == []
    assert kept(pool, *range(8)) == [index in expected for index in range(8)]


@pytest.mark.parametrize("num_frames", [1, 2, 5, 20])
def test_threads_see_whole_frames_of_the_right_key(num_frames):
    """Many threads on few frames: each read yields the one key's frame, never a mixture, and no frame is lost."""
    frame_bytes = 1 << 16
    pool = open_pool(num_frames, frame_bytes)
    wrong: list[str] = []

    def use(seed: int) -> None:
        choose = random.Random(seed)
        buffer = np.empty(frame_bytes, dtype=np.uint8)
        for _ in range(300):
            index = choose.randrange(30)
            call = choose.randrange(5)
            if call < 2:
                pool.write([key(index)], [frame(index, frame_bytes)])
            elif call < 4:
                (size,) = pool.read_into([key(index)], [buffer.data])
                if size is not None and not (size == frame_bytes and (buffer == index).all()):
                    wrong.append(f"{size} bytes of {set(buffer)}, not of {index}")
            else:
                pool.discard(key(index))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.check_integrity() == []
    assert sum(kept(pool, *range(30))) <= num_frames


class _Stalling(np.ndarray):
    """A buffer of zeros whose size the pool gets to know only when the test wants it."""

    asked: threading.Event
    answer: threading.Event

    def __len__(self) -> int:
        self.asked.set()
        assert self.answer.wait(30)
        return FRAME_BYTES


def stalled_read(pool: HostPool, index: int) -> tuple[_Stalling, threading.Thread]:
    """A read that has found its frame and copies nothing yet."""
    buffer = np.zeros(FRAME_BYTES, dtype=np.uint8).view(_Stalling)
    buffer.asked, buffer.answer = threading.Event(), threading.Event()
    reader = threading.Thread(target=pool.read_into, args=([key(index)], [buffer]))
    reader.start()
    assert buffer.asked.wait(30)
    return buffer, reader


def test_a_frame_that_is_read_is_not_filled_again():
    pool = open_pool(2)
    fill(pool, 1, 2)
    buffer, reader = stalled_read(pool, 1)
    assert kept(pool, 2) == [True]  # so that 1 is the oldest
    fill(pool, 3, 4)
    assert kept(pool, 1, 2, 3, 4) == [True, False, False, True]
    buffer.answer.set()
    reader.join()
    assert buffer.tobytes() == bytes(frame(1))
    assert pool.check_integrity() == []


def test_a_frame_discarded_while_it_is_read_is_freed_after_that():
    pool = open_pool(1)
    fill(pool, 1)
    buffer, reader = stalled_read(pool, 1)
    pool.discard(key(1))
    fill(pool, 2)
    assert kept(pool, 1, 2) == [False, False]  # 2 is left out: there is no frame for it
    buffer.answer.set()
    reader.join()
    assert buffer.tobytes() == bytes(frame(1))
    assert pool.check_integrity() == []
    fill(pool, 2)
    assert read(pool, 2) == bytes(frame(2))


def test_a_frame_discarded_under_its_reader_is_not_filled_once_closed():
    pool = open_pool(1)
    fill(pool, 1)
    buffer, reader = stalled_read(pool, 1)
    pool.discard(key(1))
    pool.close()
    buffer.answer.set()
    reader.join()
    fill(pool, 2)
    assert kept(pool, 2) == [False]
    assert pool.check_integrity() == []


def test_closing_lets_a_read_end():
    pool = open_pool(1)
    fill(pool, 1)
    buffer, reader = stalled_read(pool, 1)
    pool.close()
    buffer.answer.set()
    reader.join()
    assert buffer.tobytes() == bytes(frame(1))
