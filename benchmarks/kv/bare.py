"""The media without us: the same blocks of the same KV caches between the same processes, as fast as the medium's own
interface goes in plain code.

    shared-storage   one file for each block, written with one call and read with one call into the target block
    redis            SET and GET of each block through the same client, in pipelines of about `_PIPELINE_BYTES`; what
                     GET returns is left where it is
    nixl             one write of the same descriptors through NIXL's bindings, its status polled
    memcpy           one copy of each block into memory that both processes see: what no medium can beat

On one thread; the stores also on as many as their connectors have, each with its part of the blocks.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from benchmarks.kv.wire import Mode, Setup

_HEADER = bytes(128)  # as many bytes as our frames have, so that both write the same
_PIPELINE_BYTES = 2 << 20  # measured: faster than one by one, and than less
# Microseconds. With zero, which NIXL's own Python class always sets, the progress thread spins: measured on two cores
# to cost up to ten times the CPU and to be the slower, the more the cores are used otherwise.
_PROGRESS_DELAY_US = 100_000
_POLL_S = 20e-6  # measured: as fast as without a pause in shared memory, faster over TCP
_THREADS = 2  # as many as our store connectors have

Slabs = npt.NDArray[np.uint8]  # [num_blocks, bytes per block]


@dataclass(frozen=True, slots=True)
class Move:
    """One handoff."""

    index: int
    keys: Sequence[bytes]
    block_ids: Sequence[int]  # the producer's
    to_ids: Sequence[int]  # the consumer's


class BareMedium(Protocol):
    """One side of a medium."""

    address: bytes

    def meet(self, address: bytes) -> None:
        """The other side's."""

    def send(self, moves: Sequence[Move]) -> Iterator[int]:
        """Producer: move all at once; the index of each as it is in the medium."""

    def receive(self, move: Move, *, check: bool) -> None:
        """Consumer: take it out of the medium. `check`: into the target blocks, even if that is not the medium's."""


def open_bare(setup: Setup, slabs: Slabs) -> dict[Mode, BareMedium]:
    """The media to compare the connector that `setup` names with."""
    memcpy = SharedMemory(Path(setup.scratch, "memcpy"), slabs)
    if setup.connector == "nixl":
        return {"bare": RawNixl(slabs), "memcpy": memcpy}
    store: _Threaded
    if setup.connector == "redis":
        store = RedisStrings(str(setup.options["url"]), slabs)
    else:
        store = Files(Path(setup.scratch, "bare"), slabs)
    return {"bare": store, "threaded": Divided(store), "memcpy": memcpy}


class _Threaded:
    """Moves on the calling thread, or on a few threads if there are several."""

    address = b""

    def meet(self, address: bytes) -> None:
        """See BareMedium."""

    def send(self, moves: Sequence[Move]) -> Iterator[int]:
        """See BareMedium."""
        if len(moves) == 1:
            self.put(moves[0])
            yield moves[0].index
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            futures = {pool.submit(self.put, move): move.index for move in moves}
            for future in as_completed(futures):
                future.result()
                yield futures[future]

    def put(self, move: Move) -> None:
        """Move one handoff's blocks into the medium."""
        raise NotImplementedError

    def receive(self, move: Move, *, check: bool) -> None:
        """See BareMedium."""
        raise NotImplementedError


class Files(_Threaded):
    """One file for each block."""

    def __init__(self, directory: Path, slabs: Slabs) -> None:
        self._directory = directory
        self._slabs = slabs
        directory.mkdir(exist_ok=True)

    def put(self, move: Move) -> None:
        """See _Threaded."""
        for key, block_id in zip(move.keys, move.block_ids, strict=True):
            file = os.open(f"{self._directory}/{key.hex()}.kv", os.O_CREAT | os.O_WRONLY, 0o600)
            _expect(os.writev(file, [_HEADER, self._slabs[block_id]]), len(_HEADER) + self._slabs.shape[1])
            os.close(file)

    def receive(self, move: Move, *, check: bool) -> None:
        """See BareMedium."""
        header = bytearray(_HEADER)
        for key, block_id in zip(move.keys, move.to_ids, strict=True):
            file = os.open(f"{self._directory}/{key.hex()}.kv", os.O_RDONLY)
            _expect(os.readv(file, [header, self._slabs[block_id]]), len(header) + self._slabs.shape[1])
            os.close(file)


class RedisStrings(_Threaded):
    """One string for each block."""

    def __init__(self, url: str, slabs: Slabs) -> None:
        import redis

        self._client: Any = redis.Redis.from_url(url, socket_read_size=1 << 18)
        self._slabs = slabs
        self._batch = max(1, _PIPELINE_BYTES // slabs.shape[1])
        self._client.ping()

    def put(self, move: Move) -> None:
        """See _Threaded."""
        for start in range(0, len(move.keys), self._batch):
            end = min(start + self._batch, len(move.keys))
            with self._client.pipeline(transaction=False) as pipeline:
                for key, block_id in zip(move.keys[start:end], move.block_ids[start:end], strict=True):
                    pipeline.set(key, self._slabs[block_id].data)
                pipeline.execute()

    def receive(self, move: Move, *, check: bool) -> None:
        """See BareMedium."""
        for start in range(0, len(move.keys), self._batch):
            end = min(start + self._batch, len(move.keys))
            with self._client.pipeline(transaction=False) as pipeline:
                for key in move.keys[start:end]:
                    pipeline.get(key)
                values = pipeline.execute()
            for value, block_id in zip(values, move.to_ids[start:end], strict=True):
                _expect(len(value), self._slabs.shape[1])
                if check:
                    self._slabs[block_id] = np.frombuffer(value, dtype=np.uint8)


class Divided(_Threaded):
    """A store to which each handoff's blocks go on several threads."""

    def __init__(self, store: _Threaded) -> None:
        self._store = store

    def put(self, move: Move) -> None:
        """See _Threaded."""
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._store.put, _divide(move)))

    def receive(self, move: Move, *, check: bool) -> None:
        """See BareMedium."""
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda part: self._store.receive(part, check=check), _divide(move)))


def _divide(move: Move) -> list[Move]:
    parts = [slice(start, None, _THREADS) for start in range(_THREADS)]
    return [Move(move.index, move.keys[part], move.block_ids[part], move.to_ids[part]) for part in parts]


class RawNixl:
    """One agent with the KV cache registered."""

    def __init__(self, slabs: Slabs) -> None:
        import nixl._bindings as nixl

        self._nixl: Any = nixl
        self._slabs = slabs
        self._name = f"bare-{os.getpid()}"
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        self._agent: Any = nixl.nixlAgent(self._name, config)
        self._agent.createBackend("UCX", {})
        base, size = slabs.ctypes.data, slabs.nbytes
        self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(base, size, 0, "")]))
        self._own = self._blocks(nixl.NIXL_INIT_AGENT, base)
        self.address = base.to_bytes(8, "little") + self._name.encode().ljust(32, b"\0") + self._agent.getLocalMD()
        self._peer: Any = None

    def meet(self, address: bytes) -> None:
        """See BareMedium."""
        base, name, metadata = int.from_bytes(address[:8], "little"), address[8:40].rstrip(b"\0"), address[40:]
        self._agent.loadRemoteMD(metadata)
        self._peer = self._blocks(name.decode(), base)

    def send(self, moves: Sequence[Move]) -> Iterator[int]:
        """See BareMedium."""
        nixl, agent = self._nixl, self._agent
        under_way = []
        for move in moves:
            own, to = np.array(move.block_ids, dtype=np.int32), np.array(move.to_ids, dtype=np.int32)
            handle = agent.makeXferReq(nixl.NIXL_WRITE, self._own, own, self._peer, to)
            status = agent.postXferReq(handle)
            under_way.append((move.index, handle, status))
        while under_way:
            left = []
            for index, handle, status in under_way:
                if status == nixl.NIXL_SUCCESS:
                    agent.releaseXferReq(handle)
                    yield index
                else:
                    left.append((index, handle, agent.getXferStatus(handle)))
            under_way = left
            if under_way:
                time.sleep(_POLL_S)

    def receive(self, move: Move, *, check: bool) -> None:
        """See BareMedium."""

    def _blocks(self, owner: Any, base: int) -> Any:
        count, size = self._slabs.shape
        strided = np.array([[base, size, 0, size, count]], dtype=np.uint64)
        return self._agent.prepXferDlist(owner, self._nixl.DRAM_SEG, strided)


class SharedMemory(_Threaded):
    """A file on a tmpfs, mapped by both sides."""

    def __init__(self, path: Path, slabs: Slabs) -> None:
        self._slabs = slabs
        with open(path, "a+b") as file:
            file.truncate(slabs.nbytes)
            self._map = mmap.mmap(file.fileno(), slabs.nbytes)
        self._shared: Slabs = np.frombuffer(self._map, dtype=np.uint8).reshape(slabs.shape)
        self._shared[:] = 0  # so that no page is missing when it is measured

    def put(self, move: Move) -> None:
        """See _Threaded."""
        for block_id, to_id in zip(move.block_ids, move.to_ids, strict=True):
            np.copyto(self._shared[to_id], self._slabs[block_id])

    def receive(self, move: Move, *, check: bool) -> None:
        """See BareMedium."""
        if check:
            self._slabs[list(move.to_ids)] = self._shared[list(move.to_ids)]


class Receiver:
    """Receives on the calling thread, or on a few threads if there are several handoffs. As a context manager it waits
    for all at its end."""

    def __init__(self, medium: BareMedium, num_handoffs: int, *, check: bool) -> None:
        self._medium = medium
        self._check = check
        self._pool = ThreadPoolExecutor(_THREADS) if num_handoffs > 1 else None

    def receive(self, move: Move, *, then: Callable[[], None]) -> None:
        """Take `move` out of the medium, then call `then`."""
        if self._pool is None:
            self._receive(move, then)
        else:
            self._pool.submit(self._receive, move, then)

    def _receive(self, move: Move, then: Callable[[], None]) -> None:
        self._medium.receive(move, check=self._check)
        then()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise OSError(f"{found} bytes moved, not {wanted}")
