"""A GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.masks import BITS
from common.engine.devices.base import HostCopy
from common.engine.devices.gpu.fences import DeviceFences


class CudaMemory:
    """See Memory."""

    is_own = True
    default_fraction = 0.9

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See Memory."""
        return torch.zeros(*shape, dtype=dtype, device=self._device)

    def free_bytes(self) -> int:
        """See Memory."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def upload(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """See Memory."""
        packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        parts = torch.split(self._sent(packed), [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def unpack_bits(self, words: npt.NDArray[np.int32], num_bits: int) -> torch.Tensor:
        """See Memory."""
        shifts = torch.arange(BITS, device=self._device, dtype=torch.int32)
        bits = (self._sent(torch.from_numpy(words))[:, :, None] >> shifts) & 1
        return bits.flatten(1)[:, :num_bits].bool()

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """See Memory."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return HostCopy(copy, copied.synchronize)

    def fences(self) -> DeviceFences:
        """See Memory."""
        return DeviceFences()

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)
