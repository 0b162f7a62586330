"""LoRA adapters of an engine of several ranks: each reads its part, beside steps, and all decide alike."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.engine.contract import adapters as contract_adapters
from common.engine.contract.adapters import AdapterFacts, no_such_layer, unusable
from common.engine.executor.multiproc.protocol import AdapterRead, InstallAdapter, ReadAdapter, RemoveAdapter
from common.errors import DeadlineExceededError, InvalidRequestError

_READ_TIMEOUT_S = 240.0  # from a slow disk; clients wait for little longer


class RankReads:
    """A rank's answers to what it was asked to read."""

    def __init__(self, name: str, send: Callable[[ReadAdapter], None]) -> None:
        self.send = send
        self._name = name
        self._answers: queue.SimpleQueue[AdapterRead | None] = queue.SimpleQueue()

    def put(self, answer: AdapterRead | None) -> None:
        """The rank has answered; None: it will not any more. Called on any thread."""
        self._answers.put(answer)

    def get(self, number: int, due: float) -> AdapterRead | None:
        """The answer to the read of this number; those to earlier ones, which came too late, are dropped. Raises
        DeadlineExceededError at `due`, of time.monotonic()."""
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty as error:
                raise DeadlineExceededError(f"{self._name} has not read the adapter in time") from error
            if answer is None or answer.number == number:
                return answer


class RankAdapter(NamedTuple):
    """See contract.adapters.ReadAdapter. Each rank has its part of it."""

    facts: AdapterFacts
    absent: frozenset[str] = frozenset()

    @classmethod
    def join(cls, by_rank: Sequence[AdapterRead]) -> RankAdapter:
        """The adapter that all ranks have read. Raises InvalidRequestError if one cannot use it, or has another, or if
        none has a layer that it changes."""
        first = by_rank[0].facts
        for rank, answer in enumerate(by_rank):
            if answer.facts is None or first is None:
                raise InvalidRequestError(answer.error, param="lora_path")
            if answer.facts != first:
                raise unusable(f"rank {rank} has read another one than rank 0")
        assert first is not None
        if nowhere := set[str].intersection(*(set(answer.absent) for answer in by_rank)):
            raise no_such_layer(min(nowhere))
        return cls(first)


class RankAdapters:
    """See contract.adapters.Adapters. Those of all ranks."""

    def __init__(
        self, broadcast: Callable[[InstallAdapter | RemoveAdapter], None], cause: Callable[[], Exception]
    ) -> None:
        """`broadcast` sends all ranks a message between steps; `cause` says why a rank does not answer any more."""
        self.ranks: list[RankReads] = []  # set once they have started
        self._broadcast = broadcast
        self._cause = cause
        self._num_reads = 0

    def read(self, directory: str) -> RankAdapter:
        """See Adapters. All ranks read it, at once."""
        self._num_reads += 1
        for rank in self.ranks:
            rank.send(ReadAdapter(self._num_reads, directory))
        due = time.monotonic() + _READ_TIMEOUT_S
        return RankAdapter.join([self._answer_of(rank, due) for rank in self.ranks])

    def install(self, adapter: contract_adapters.ReadAdapter) -> None:
        """See Adapters."""
        self._broadcast(InstallAdapter(adapter.facts.digest))

    def remove(self, digest: bytes) -> None:
        """See Adapters."""
        self._broadcast(RemoveAdapter(digest))

    def _answer_of(self, rank: RankReads, due: float) -> AdapterRead:
        answer = rank.get(self._num_reads, due)
        if answer is None:
            raise self._cause()
        return answer
