"""The host's memory, for devices that have none of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.engine.devices.base import HostCopy


class HostMemory:
    """See Memory."""

    is_own = False
    default_fraction = 0.1

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See Memory."""
        # calloc gives zero pages that take no memory until written; torch.zeros would touch them all.
        return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(*shape)

    def free_bytes(self) -> int:
        """See Memory: the machine's available memory, or less in a limited cgroup."""
        return min(_available_on_machine(), _available_in_cgroup())

    def upload(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """See Memory."""
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]  # kernels read them by address

    def unpack_bits(self, words: npt.NDArray[np.int32], num_bits: int) -> torch.Tensor:
        """See Memory."""
        unpacked = np.unpackbits(words.view(np.uint8), axis=1, count=num_bits, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """See Memory."""
        return HostCopy(tensor, None)

    def fences(self) -> None:
        """See Memory."""


def _available_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024  # kB
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _available_in_cgroup(root: Path = Path("/sys/fs/cgroup")) -> int:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((root / limit_name).read_text(encoding="ascii"))
            used = int((root / used_name).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, limit - used)
    return 1 << 62
