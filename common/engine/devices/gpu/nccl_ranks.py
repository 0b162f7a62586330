"""Collectives of ranks on GPUs over NCCL, which CUDA graphs record."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from common.engine.devices.ranks import Ranks, collectives_of, joined

logger = logging.getLogger(__name__)


def meet_over_nccl(group: Ranks, device: torch.device) -> Ranks:
    """Ranks over NCCL, if that works for all in `group`; else the group. Called by all ranks. Two ranks on one GPU
    cannot. Raises EngineDeadError if another rank is gone, or late."""
    ranks, problem = None, ""
    try:
        ranks = NcclRanks(group, _process_group(group), device)
        total = float(ranks.all_reduce(torch.ones(1, device=device)))
        problem = "" if total == group.size else f"{group.size} times 1 is {total:g}"
    except Exception as error:  # noqa: BLE001  whatever NCCL raises
        problem = str(error).partition("\n")[0]
    is_usable = int(group.all_reduce(torch.tensor(float(not problem)))) == group.size
    if ranks is not None and is_usable:
        return ranks
    logger.warning("ranks do not use NCCL: %s", problem or "another rank cannot")
    return group


def _process_group(group: Ranks) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=group.timeout_s)  # noqa: SLF001  after it, NCCL ends the process
    return ProcessGroupNCCL(group.open_store("nccl"), group.rank, group.size, options)


class NcclRanks:
    """See Ranks."""

    can_record = True

    def __init__(self, group: Ranks, process_group: Any, device: torch.device) -> None:
        """`group`: the same ranks, for tensors of other devices. `process_group`: of torch.distributed."""
        self.rank = group.rank
        self.size = group.size
        self.timeout_s = group.timeout_s
        self.sums_in_order = group.sums_in_order
        self._group = group
        self._process_group = process_group
        self._device = device

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        if tensor.device.type != self._device.type:
            return self._group.all_reduce(tensor)
        tensor = tensor.contiguous()
        self._wait_for(self._process_group.allreduce, [tensor])
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        if tensor.device.type != self._device.type:
            return self._group.all_gather_last(tensor)
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self._wait_for(self._process_group._allgather_base, gathered, tensor)  # noqa: SLF001
        return joined(gathered, self.size)

    def wait_for_all(self) -> None:
        """See Ranks."""
        self._group.wait_for_all()

    def open_store(self, name: str) -> Store:
        """See Ranks."""
        return self._group.open_store(name)

    def close(self) -> None:
        """See Ranks."""
        self._process_group = None
        self._group.close()

    def _wait_for(self, collective: Any, *tensors: Any) -> None:
        """On the stream; the host goes on."""
        with collectives_of(f"rank {self.rank} of {self.size}"):
            collective(*tensors).wait()
