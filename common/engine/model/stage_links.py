"""The stages of a pipeline: each has a run of a model's layers, and passes on what they compute to the next one."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

from common.engine.devices.ranks import collectives_of
from common.engine.model.ranks import LOAD_TIMEOUT

_LOOPBACK = "127.0.0.1"


class StageLinks(Protocol):
    """One rank's links to the ranks of the neighbouring stages that have the same part of their layers. Each stage
    computes the same steps in the same order. Calls raise EngineDeadError if a neighbour is gone, or late."""

    stage: int
    num_stages: int

    def join(self, name: str, own: Sequence[Any]) -> list[Any]:
        """Joins the values of all stages, as JSON has them, in their order. Each gives the same whenever it is called
        with the name.
        Waits for the others, also if that takes minutes, as loading weights may."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor that the stage before has sent, on the host."""

    def send(self, hidden: torch.Tensor) -> None:
        """Passes `hidden` on to the next stage, without waiting until that takes it. It must not be changed."""

    def close(self) -> None:
        """Leaves the others. Idempotent."""


class OneStage:
    """See StageLinks. There are no others."""

    stage = 0
    num_stages = 1

    def join(self, name: str, own: Sequence[Any]) -> list[Any]:
        """See StageLinks."""
        return list(own)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See StageLinks."""
        raise RuntimeError("there is no stage before")

    def send(self, hidden: torch.Tensor) -> None:
        """See StageLinks."""
        raise RuntimeError("there is no stage after")

    def close(self) -> None:
        """See StageLinks."""


class GlooStageLinks:
    """See StageLinks. Processes over gloo, which meet at a store of torch.distributed."""

    def __init__(
        self,
        store: Store,
        stage: int,
        num_stages: int,
        *,
        address: str = _LOOPBACK,
        timeout_s: float = 30.0,
        join_timeout_s: float = 60.0,
    ) -> None:
        """`address`: of this host, for the others. Waits for them. Raises EngineDeadError if they do not come within
        `join_timeout_s`. Each receipt must be over within `timeout_s`."""
        self.stage = stage
        self.num_stages = num_stages
        self._store = store
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()  # what the next stage may not have taken yet
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        store.set_timeout(timedelta(seconds=join_timeout_s))
        with self._failures():
            self._group: Any = ProcessGroupGloo(store, stage, num_stages, options)

    def join(self, name: str, own: Sequence[Any]) -> list[Any]:
        """See StageLinks. At the store."""
        keys = [f"{name} of stage {stage}" for stage in range(self.num_stages)]
        with self._failures():
            self._store.set(keys[self.stage], json.dumps(own))
            self._store.wait(keys, LOAD_TIMEOUT)
            return [each for key in keys for each in json.loads(self._store.get(key))]

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See StageLinks."""
        hidden = torch.empty(tuple(shape), dtype=dtype)
        with self._failures():
            self._group.recv([hidden], self.stage - 1, 0).wait()
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """See StageLinks. As many may be under way as there are stages."""
        hidden = hidden.cpu().contiguous()
        with self._failures():
            if len(self._sending) >= self.num_stages:
                self._sending.popleft()[0].wait()
            self._sending.append((self._group.send([hidden], self.stage + 1, 0), hidden))

    def close(self) -> None:
        """See StageLinks."""
        self._sending.clear()
        self._group = None

    def _failures(self) -> AbstractContextManager[None]:
        return collectives_of(f"stage {self.stage} of {self.num_stages}")
