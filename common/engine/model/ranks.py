"""Ranks over gloo, which work everywhere: they find each other, and meet in other ways where these are faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from common.engine.devices.ranks import Ranks, collectives_of, joined
from common.errors import EngineDeadError

LOAD_TIMEOUT = timedelta(hours=1)  # a driver ends ranks earlier that wait for one that is gone
_LOOPBACK = "127.0.0.1"  # of ranks of one host; nothing of theirs is seen on the network


class GlooRanks:
    """See Ranks. Processes over gloo, which meet at a store of torch.distributed, for instance a
    FileStore."""

    can_record = False

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        address: str = _LOOPBACK,
        timeout_s: float = 30.0,
        join_timeout_s: float = 60.0,
    ) -> None:
        """`address`: of this host, for the others. Waits for them. Raises EngineDeadError if they do not come within
        `join_timeout_s`: processes that import much may start seconds apart. Each collective must end within
        `timeout_s`."""
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.sums_in_order = size <= 2  # sums of three numbers depend on their order, which depends on the batch
        self._store = store
        self._num_waits = 0
        timeout = timedelta(seconds=timeout_s)
        self._meet(timedelta(seconds=join_timeout_s))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        with self._failures():
            self._group: Any = ProcessGroupGloo(store, rank, size, options)
        self._meet(timedelta(seconds=join_timeout_s))  # else one that is soon done leaves others that still connect

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        tensor = tensor.contiguous()
        with self._failures():
            self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        with self._failures():
            self._group._allgather_base(gathered, tensor).wait()  # noqa: SLF001
        return joined(gathered, self.size)

    def wait_for_all(self) -> None:
        """See Ranks."""
        self._meet(LOAD_TIMEOUT)

    def open_store(self, name: str) -> Store:
        """See Ranks."""
        return PrefixStore(name, self._store)

    def close(self) -> None:
        """See Ranks."""
        self._group = None

    def _meet(self, timeout: timedelta) -> None:
        """At the store."""
        self._num_waits += 1
        keys = [f"{self._num_waits} {rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "")
        try:
            self._store.wait(keys, timeout)
        except RuntimeError as error:
            missing = " and ".join(f"rank {rank}" for rank, key in enumerate(keys) if not self._store.check([key]))
            seconds = f"{timeout.total_seconds():g} s"
            raise EngineDeadError(f"{missing} of {self.size} did not join within {seconds}") from error

    def _failures(self) -> AbstractContextManager[None]:
        return collectives_of(f"rank {self.rank} of {self.size}")


@contextlib.contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Makes code fail on all ranks if it fails on one, after whatever collectives it has."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised below
        failure = error
    num_failed = float(ranks.all_reduce(torch.tensor(float(failure is not None))))
    if failure is not None:
        raise failure
    if num_failed:
        raise RuntimeError("it failed on another rank")
