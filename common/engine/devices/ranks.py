"""The ranks that compute a model together, and what they tell each other while they do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from common.errors import EngineDeadError

_PLACE = re.compile(r"^\[\S+:\d+\] ")  # in the source of torch
_GUESS = ". This is typically caused by"  # what gloo adds for people who have not read the other's log


class Ranks(Protocol):
    """One rank's end of the collectives. All ranks make the same calls in the same order, each on its worker's
    thread. Calls raise EngineDeadError if another rank is gone, or late."""

    rank: int
    size: int
    timeout_s: float  # most seconds that a call waits for the others
    can_record: bool  # collectives may be part of recorded decode steps
    sums_in_order: bool  # a sum does not depend on what else is summed beside it

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same to the last bit on each. `tensor` may be overwritten."""

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, [..., n] each of two or more dimensions, joined in the order of ranks to
        [..., size * n]."""

    def wait_for_all(self) -> None:
        """Returns when all ranks have called it, also if that takes minutes, as loading weights may."""

    def open_store(self, name: str) -> Store:
        """A store for a further way to meet, with keys of its own."""

    def close(self) -> None:
        """Leaves the others. Idempotent."""


class OneRank:
    """See Ranks. There are no others."""

    rank = 0
    size = 1
    timeout_s = 0.0
    can_record = True
    sums_in_order = True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        return tensor

    def wait_for_all(self) -> None:
        """See Ranks."""

    def open_store(self, name: str) -> Store:
        """See Ranks."""
        return HashStore()

    def close(self) -> None:
        """See Ranks."""


def joined(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """From tensors of so many ranks one after the other, [size * first, ..., n], to [first, ..., size * n]."""
    return gathered.view(size, len(gathered) // size, *gathered.shape[1:]).movedim(0, -2).flatten(-2)


@contextlib.contextmanager
def collectives_of(name: str) -> Iterator[None]:
    """Turns an error of torch.distributed into EngineDeadError. `name`: whose collectives they are, such as "rank 0 of
    2"."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        reason = _PLACE.sub("", line).partition(_GUESS)[0]
        raise EngineDeadError(f"{name} has lost another: {reason}") from error
