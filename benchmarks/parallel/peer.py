"""A process that meets others: a rank that sums, or a reader of a ring.

peer.py reduce RANK SIZE STORE   sizes on standard input, in bytes; answers with microseconds for both ways
peer.py read MEMORY FILLED FREE  answers each step, and then each message over the socket that is standard input, with
                                 the time it was read
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import sys
import time

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from common.engine.devices.cpu.shared_ranks import share_memory
from common.engine.devices.ranks import Ranks
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.protocol import Close, Decoder, ToRanks
from common.engine.executor.multiproc.ring import RingDescriptors, RingReader
from common.engine.model.ranks import GlooRanks

_SECONDS = 0.8  # of a figure, about
_MOST = 2000  # sums


def reduce(rank: int, size: int, store: str) -> None:
    """Sums as often as it is told to."""
    torch.set_num_threads(1)
    group = GlooRanks(FileStore(store, size), rank, size)
    shared = share_memory(group)
    for line in sys.stdin:
        numbers = torch.ones(int(line) // 4)
        print(*(_median_us(ranks, numbers) for ranks in (shared, group)), flush=True)


def _median_us(ranks: Ranks, numbers: torch.Tensor) -> float:
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < _MOST:
        numbers.fill_(1.0)
        began = time.perf_counter()
        ranks.all_reduce(numbers)
        seconds.append(time.perf_counter() - began)
        # Now and then they agree on whether to go on: all have to make the same calls.
        if len(seconds) % 8 == 0:
            is_over = torch.tensor(float(time.perf_counter() - started > _SECONDS))
            if float(ranks.all_reduce(is_over)):
                break
    return statistics.median(seconds) * 1e6


def read(memory: int, filled: int, free: int) -> None:
    """Reads steps until the end, then bytes until the socket is closed."""
    channel = Channel(socket.socket(fileno=0))
    ring, decode = RingReader(RingDescriptors(memory, filled, free), channel), Decoder[ToRanks](ToRanks)
    while not isinstance(decode(ring.read()), Close):
        channel.send(struct.pack("=d", time.monotonic()))
    with contextlib.suppress(EOFError):
        while channel.receive():
            channel.send(struct.pack("=d", time.monotonic()))


if __name__ == "__main__":
    if sys.argv[1] == "reduce":
        reduce(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        read(*map(int, sys.argv[2:]))
