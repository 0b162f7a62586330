"""A FakeEngine's KV cache and connector divided over ranks.

Each rank holds its share of every slot, and the shares add up, so that a slot is right only if it is on all ranks. Each
settles its part of a job on its own; what travels to ranks and back is encoded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import msgspec

from common.engine.contract.parts import decode_addresses
from common.engine.executor.ranked_connector import RankedConnector
from common.engine.kv_connector import BlockTransfer, Destination, TransferResult
from common.types import BlockHash

T = TypeVar("T")
Medium = dict[BlockHash, list[int]]


def sent(message: T) -> T:
    """What arrives in another process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


DIGEST_BYTES = 8


def part_of(transfer: BlockTransfer, rank: int, num_ranks: int) -> BlockTransfer:
    """The parts of addresses and digests, which are of all ranks, that concern one rank. Empty ones, which fit nothing,
    if they are not of as many."""
    to = transfer.destination
    if to is not None:
        addresses = decode_addresses(to.address)
        to = Destination(addresses[rank] if len(addresses) == num_ranks else b"", to.block_ids)
    digests = (digest if len(digest) == num_ranks * DIGEST_BYTES else b"" for digest in transfer.digests)
    start, stop = rank * DIGEST_BYTES, (rank + 1) * DIGEST_BYTES
    return replace(transfer, destination=to, digests=tuple(digest[start:stop] for digest in digests))


class RankedKV:
    """Slots of a KV cache: in use like a dict of whole values."""

    def __init__(self, num_ranks: int) -> None:
        self.parts: list[dict[int, int]] = [{} for _ in range(num_ranks)]

    def get(self, slot: int, default: int) -> int:
        shares = [part.get(slot) for part in self.parts]
        return default if None in shares else sum(share for share in shares if share is not None)

    def __setitem__(self, slot: int, value: int) -> None:
        for rank, part in enumerate(self.parts):
            part[slot] = (value + rank) // len(self.parts)

    def update(self, values: dict[int, int]) -> None:
        for slot, value in values.items():
            self[slot] = value

    def shares(self, values: Sequence[int], rank: int) -> list[int]:
        return [(value + rank) // len(self.parts) for value in values]


class RankMedium:
    """What one rank finds in the medium. A block that it saves is there once all ranks have saved theirs."""

    def __init__(self, medium: Medium, saved: dict[BlockHash, dict[int, list[int]]], kv: RankedKV, rank: int) -> None:
        self._medium = medium
        self._saved = saved
        self._kv = kv
        self._rank = rank

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._medium

    def __getitem__(self, key: BlockHash) -> list[int]:
        return self._kv.shares(self._medium[key], self._rank)

    def __setitem__(self, key: BlockHash, content: list[int]) -> None:
        parts = self._saved.setdefault(key, {})
        parts[self._rank] = content
        if len(parts) == len(self._kv.parts):
            del self._saved[key]
            self._medium[key] = [sum(shares) for shares in zip(*parts.values(), strict=True)]


class Engine(Protocol):
    """A FakeEngine as the connector of an engine with one rank."""

    def start_load(self, transfer: BlockTransfer) -> None: ...

    def start_save(self, transfer: BlockTransfer) -> None: ...

    def start_lookup(self, transfer: BlockTransfer) -> None: ...

    def cancel(self, job_id: int) -> None: ...


class RankPort:
    """See Connector. Of one rank; the engine hears from the first."""

    def __init__(self, engine: Engine, rank: int, num_ranks: int) -> None:
        self._engine = engine if rank == 0 else None
        self._rank = rank
        self._num_ranks = num_ranks
        self.asked: dict[int, BlockTransfer] = {}
        self.settled: list[TransferResult] = []

    def start_load(self, transfer: BlockTransfer) -> None:
        self._start(transfer, self._engine and self._engine.start_load)

    def start_save(self, transfer: BlockTransfer) -> None:
        self._start(transfer, self._engine and self._engine.start_save)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        self._start(transfer, self._engine and self._engine.start_lookup)

    def _start(self, transfer: BlockTransfer, start: Callable[[BlockTransfer], None] | None) -> None:
        self.asked[transfer.job_id] = transfer = part_of(sent(transfer), self._rank, self._num_ranks)
        if start is not None:
            start(transfer)

    def cancel(self, job_id: int) -> None:
        if self._engine is not None:
            self._engine.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        settled, self.settled = self.settled, []
        return [sent(result) for result in settled]


class FakeRanks:
    """The ranks of one engine."""

    def __init__(self, num_ranks: int, engine: Engine) -> None:
        self.kv = RankedKV(num_ranks)
        self._ports = [RankPort(engine, rank, num_ranks) for rank in range(num_ranks)]
        self.connector = RankedConnector(self._ports)
        self._saved: dict[BlockHash, dict[int, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._ports)

    def next_of(self, job_id: int) -> tuple[int, BlockTransfer]:
        """The rank that settles its part of the job next, and that part."""
        ranks = [(job_id + number) % len(self) for number in range(len(self))]
        rank = next(rank for rank in ranks if job_id in self._ports[rank].asked)
        return rank, self._ports[rank].asked[job_id]

    def medium_of(self, medium: Medium, rank: int) -> RankMedium:
        return RankMedium(medium, self._saved, self.kv, rank)

    def settle(self, rank: int, result: TransferResult) -> None:
        """The part of a rank settles."""
        del self._ports[rank].asked[result.job_id]
        self._ports[rank].settled.append(result)

    def settle_all(self, result: TransferResult) -> None:
        """All parts that are left settle as `result`."""
        for rank, port in enumerate(self._ports):
            if result.job_id in port.asked:
                start = rank * DIGEST_BYTES
                digests = tuple(digest[start : start + DIGEST_BYTES] for digest in result.digests)
                self.settle(rank, replace(result, digests=digests))
