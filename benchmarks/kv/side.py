"""One side of a handoff in a process of its own: `python -m benchmarks.kv.side ROLE CONTROL_FD LINK_FD`.

It holds a KV cache with a connector, driven as an engine's worker drives it, and the bare medium beside it.

The life of a run, the same for every way of moving bytes:

1. Both sides get it from the benchmark. The consumer has reserved its blocks, and says so.
2. The producer's forward ends: it notes the time and starts its saves.
3. It is woken as each has settled, and tells the consumer on the socket between them.
4. The consumer loads, and is woken likewise. It notes the time: the request is runnable.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from benchmarks.kv.bare import BareMedium, Move, Receiver, Slabs, open_bare
from benchmarks.kv.wire import Close, Go, Link, Meet, Mode, Moved, OpenBare, Ran, Ready, Run, Setup
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.kv_connector import BlockTransfer, Destination, TransferResult
from common.types import BlockHash, RequestId
from kv_store.registry import create_connector

BLOCK_SIZE = 16
FINGERPRINT = bytes(range(32))


class HandoffError(Exception):
    """A handoff did not bring its blocks."""


class Side:
    """The base of producer and consumer."""

    def __init__(self, control: Link, link: Link, setup: Setup) -> None:
        self._control = control
        self._link = link
        self._setup = setup
        self._slabs = _slabs(setup)
        self._settled = os.eventfd(0)
        self._job_ids = itertools.count(1)
        self._peer_address = b""
        self._bare: dict[Mode, BareMedium] = {}
        self._connector = create_connector(setup.connector, setup.options)
        # num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim
        shape = (setup.num_blocks, 4, 2, 4, BLOCK_SIZE, setup.block_bytes // (4 * 2 * 4 * BLOCK_SIZE * 4))
        kv_cache = torch.from_numpy(self._slabs).view(torch.float32).view(shape)
        layout = KVLayout(BLOCK_SIZE, (KVGroupSpec(tuple(range(4)), 4, shape[-1], shape[-1], "float32"),))
        facts = self._connector.register_kv_cache(
            kv_cache, FINGERPRINT, layout, lambda: os.eventfd_write(self._settled, 1)
        )
        self._is_direct = facts.is_direct
        self._part_blocks = facts.part_blocks
        self._resident = _resident_bytes("VmRSS")
        control.send(Ready(facts.address))

    def serve(self) -> None:
        """Obey until told to close."""
        while True:
            match message := self._control.receive():
                case OpenBare():
                    self._control.send(Ready(self._open_bare()))
                case Meet():
                    self._meet(message)
                case Run():
                    self._control.send(self._run(message))
                case Close():
                    self._connector.close()
                    return
                case _:
                    raise TypeError(f"unexpected {type(message).__name__}")

    def _run(self, run: Run) -> Ran:
        moves = _moves(run, self._setup)
        if run.check:
            self._prepare_check(moves)
        digests = _free_digests(self._setup.block_bytes) if run.mode == "undigested" else _usual_digests()
        error = ""
        times: list[float] = []
        with digests as num_stubbed:
            cpu_s = time.process_time()
            try:
                times = self._hand_over(run, moves)
            except (HandoffError, OSError) as failure:
                error = f"{run.mode}: {failure!r}"
            cpu_s = time.process_time() - cpu_s
        growth = _resident_bytes("VmHWM") - self._resident if run.check else 0
        content = self._content(moves) if run.check else b""
        return Ran(times, cpu_s, error, content=content, num_stubbed=num_stubbed(), rss_growth=growth)

    def _hand_over(self, run: Run, moves: Sequence[Move]) -> list[float]:
        raise NotImplementedError

    def _prepare_check(self, moves: Sequence[Move]) -> None:
        _reset_peak()

    def _content(self, moves: Sequence[Move]) -> bytes:
        """Digest of the blocks of this side that `moves` name."""
        hasher = xxhash.xxh3_128()
        for move in moves:
            for block_id in self._own_ids(move):
                hasher.update(self._slabs[block_id].data)
        return hasher.digest()

    def _own_ids(self, move: Move) -> Sequence[int]:
        raise NotImplementedError

    def _open_bare(self) -> bytes:
        self._bare = open_bare(self._setup, self._slabs)
        return self._bare["bare"].address

    def _meet(self, peer: Meet) -> None:
        if peer.is_bare:
            self._bare["bare"].meet(peer.address)
        else:
            self._peer_address = peer.address

    def _wait_settled(self) -> list[TransferResult]:
        """Jobs that have settled since; waits for the first."""
        os.eventfd_read(self._settled)
        results = self._connector.poll()
        for result in results:
            if result.error:
                raise HandoffError(result.error)
        return results

    def _transfer(self, move: Move, part: slice, block_ids: Sequence[int], **fields: Any) -> BlockTransfer:
        hashes = tuple(BlockHash(key) for key in move.keys[part])
        request_id = RequestId(f"request-{move.index}")
        return BlockTransfer(next(self._job_ids), request_id, tuple(block_ids[part]), hashes, BLOCK_SIZE, **fields)


class Producer(Side):
    """Saves."""

    def _hand_over(self, run: Run, moves: Sequence[Move]) -> list[float]:
        assert isinstance(self._link.receive(), Go)
        try:
            if run.mode in self._bare:
                forward_end = time.monotonic()
                for index in self._bare[run.mode].send(moves):
                    self._link.send(Moved(index))
            else:
                forward_end = time.monotonic()
                self._save(moves)
        except (HandoffError, OSError) as error:
            self._link.send(Moved(0, error=repr(error)))
            raise
        return [forward_end]

    def _save(self, moves: Sequence[Move]) -> None:
        jobs: dict[int, Moved] = {}
        for move in moves:
            for part in _parts(move, self._part_blocks):
                to = Destination(self._peer_address, tuple(move.to_ids[part])) if self._is_direct else None
                transfer = self._transfer(move, part, move.block_ids, destination=to)
                jobs[transfer.job_id] = Moved(move.index, part.start, len(transfer.block_ids))
                self._connector.start_save(transfer)
        while jobs:
            for result in self._wait_settled():
                self._link.send(replace(jobs.pop(result.job_id), digests=list(result.digests)))

    def _own_ids(self, move: Move) -> Sequence[int]:
        return move.block_ids


class Consumer(Side):
    """Loads."""

    def _hand_over(self, run: Run, moves: Sequence[Move]) -> list[float]:
        self._link.send(Go())
        if run.mode in self._bare:
            return self._receive(run, moves)
        return self._load(moves)

    def _receive(self, run: Run, moves: Sequence[Move]) -> list[float]:
        times: list[float] = []
        with Receiver(self._bare[run.mode], len(moves), check=run.check) as receiver:
            for _ in moves:
                receiver.receive(moves[self._moved().index], then=lambda: times.append(time.monotonic()))
        if len(times) != len(moves):
            raise HandoffError("a thread failed")
        return times

    def _load(self, moves: Sequence[Move]) -> list[float]:
        times: list[float] = []
        events = select.poll()
        events.register(self._link.fileno(), select.POLLIN)
        events.register(self._settled, select.POLLIN)
        num_missing = [len(move.keys) for move in moves]  # blocks
        jobs: dict[int, Moved] = {}
        while any(num_missing):
            for source, _ in events.poll():
                if source == self._settled:
                    for result in self._wait_settled():
                        loaded = jobs.pop(result.job_id)
                        num_missing[loaded.index] -= loaded.num_blocks
                        times += [] if num_missing[loaded.index] else [time.monotonic()]
                else:
                    moved = self._moved()
                    transfer = self._load_of(moves[moved.index], moved)
                    jobs[transfer.job_id] = moved
                    self._connector.start_load(transfer)
        return times

    def _load_of(self, move: Move, moved: Moved) -> BlockTransfer:
        part = slice(moved.first, moved.first + moved.num_blocks)
        return self._transfer(move, part, move.to_ids, digests=tuple(moved.digests))

    def _moved(self) -> Moved:
        message = self._link.receive()
        assert isinstance(message, Moved)
        if message.error:
            raise HandoffError(f"the producer failed: {message.error}")
        return message

    def _prepare_check(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._slabs[list(move.to_ids)] = 0
        super()._prepare_check(moves)

    def _own_ids(self, move: Move) -> Sequence[int]:
        return move.to_ids


def _parts(move: Move, most: int | None) -> Iterator[slice]:
    """Runs of the blocks of a handoff, as the engine saves them."""
    num_blocks = len(move.keys)
    for first in range(0, num_blocks, most or num_blocks):
        yield slice(first, min(first + (most or num_blocks), num_blocks))


def _slabs(setup: Setup) -> Slabs:
    """[num_blocks, bytes] with every page in place. Each block differs from all others, on both sides."""
    slabs = np.empty((setup.num_blocks, setup.block_bytes), dtype=np.uint8)
    slabs[:] = np.random.default_rng(os.getpid()).integers(0, 256, setup.block_bytes, dtype=np.uint8)
    slabs[:, :8].view(np.uint64)[:, 0] = np.arange(setup.num_blocks)
    return slabs


def _moves(run: Run, setup: Setup) -> list[Move]:
    """Which blocks go where; both sides come to the same. Block 0 is the null block."""
    order = random.Random(run.num_blocks)  # the same in every run, as a pool's order changes little
    sources, targets = list(range(1, setup.num_blocks)), list(range(1, setup.num_blocks))
    order.shuffle(sources)
    order.shuffle(targets)
    moves = []
    for index in range(run.num_handoffs):
        part = slice(index * run.num_blocks, (index + 1) * run.num_blocks)
        keys = [_key(run.seed, number) for number in range(part.start, part.stop)]
        moves.append(Move(index, keys, sources[part], targets[part]))
    return moves


def _key(seed: int, number: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=16).digest()


@contextmanager
def _usual_digests() -> Iterator[Callable[[], int]]:
    yield lambda: 0


@contextmanager
def _free_digests(block_bytes: int) -> Iterator[Callable[[], int]]:
    """Inside, digests of whole blocks are zeros and cost nothing. Gives what counts them."""
    module: Any = xxhash
    real = module.xxh3_128_digest
    lock = threading.Lock()
    stubbed = 0

    def stub(content: Any, *seed: int) -> bytes:
        nonlocal stubbed
        if memoryview(content).nbytes < block_bytes:
            return bytes(real(content, *seed))
        with lock:
            stubbed += 1
        return bytes(16)

    module.xxh3_128_digest = stub
    try:
        yield lambda: stubbed
    finally:
        module.xxh3_128_digest = real


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: at most since the last reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    """Serve one benchmark."""
    role, *numbers = sys.argv[1:]
    control, link = (Link(socket.socket(fileno=int(number))) for number in numbers)
    setup = control.receive()
    assert isinstance(setup, Setup)
    torch.set_num_threads(1)
    side = Producer(control, link, setup) if role == "producer" else Consumer(control, link, setup)
    side.serve()


if __name__ == "__main__":
    main()
