"""The ring between real processes."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.ring import NUM_SLOTS, SLOT_BYTES, RingWriter

MODULE = "tests.unit.common.engine.executor.multiproc.ring_reader"


@contextlib.contextmanager
def readers(num_readers: int, timeout_s: float = 60.0) -> Iterator[tuple[RingWriter, list[Channel]]]:
    pairs = [socket.socketpair() for _ in range(num_readers)]
    channels = [Channel(own) for own, _ in pairs]
    ring = RingWriter(channels, timeout_s)
    processes = []
    for reader, (_, others) in enumerate(pairs):
        descriptors = ring.descriptors(reader)
        command = [sys.executable, "-m", MODULE, *map(str, descriptors)]
        processes.append(subprocess.Popen(command, stdin=others.fileno(), pass_fds=descriptors))
        others.close()
    try:
        yield ring, channels
    finally:
        for process in processes:
            process.kill()
            process.wait()
        ring.close()
        for channel in channels:
            channel.close()


def digest(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


@pytest.mark.parametrize("num_readers", [1, 3])
def test_all_readers_get_all_messages_in_order(num_readers: int) -> None:
    chance = random.Random(num_readers)
    largest = SLOT_BYTES - 4
    sizes = [1, largest, largest + 1, 10 * SLOT_BYTES, *(chance.choice([7, 900, largest, 80_000]) for _ in range(200))]
    with readers(num_readers) as (ring, channels):
        for number, size in enumerate(sizes):
            message = chance.randbytes(size)
            ring.write(message)
            for channel in channels:
                assert channel.receive() == digest(message), number


def test_readers_that_lag_are_waited_for() -> None:
    messages = [b"sleep0.3", *(b"%d" % number for number in range(5 * NUM_SLOTS))]
    with readers(2) as (ring, channels):
        for message in messages:
            ring.write(message)
        for channel in channels:
            assert [channel.receive() for _ in messages] == [digest(message) for message in messages]


def test_a_reader_that_takes_nothing_is_an_error_in_time() -> None:
    with readers(2, timeout_s=0.2) as (ring, channels):
        ring.write(b"x")
        for channel in channels:
            assert channel.receive() == digest(b"x")
        for _ in range(NUM_SLOTS):
            ring.write(b"sleep3600")

        def write_two() -> None:
            for _ in range(2):  # the readers may have taken one
                ring.write(b"late")

        with pytest.raises(TimeoutError):
            write_two()
