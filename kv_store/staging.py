"""Between a KV cache and a medium: a few frames of host memory per transfer thread, pinned if the cache is on a GPU.

Every block passes through such a frame, both ways. That bounds the memory that transfers take; the stored bytes are the
ones that were digested, and the loaded bytes the ones that were verified, whatever other processes do meanwhile; and a
thread that hangs in its medium does not touch the KV cache, so its job can fail and the blocks can be reused.

The copy costs little, as frames stay in a core's cache. Measured on tmpfs, one thread: blocks of 64 KiB and 1 MiB are
saved at 1.7 and 2.4 GB/s with digest and copy, at 1.85 and 2.7 without the copy; they are loaded as fast as straight
into the KV cache, whose memory is cold. A whole handoff is 3 % faster without the copy that saves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from common.engine.contract.step import Fence
from common.engine.kv_connector import NO_FENCES, Fences
from common.errors import ConfigError
from kv_store.base import Buffer
from kv_store.block_format import HEADER_BYTES, SUPPORTED_DTYPES, BlockLayout


class Staging(Protocol):
    """One thread's frames, each header and payload. The methods return when the copies are done."""

    frames: Sequence[Buffer]

    def gather(self, block_ids: Sequence[int], fence: Fence) -> None:
        """Copies blocks of the KV cache into the payloads of the first frames."""

    def scatter(self, block_ids: Sequence[int], fence: Fence) -> None:
        """Copies the payloads of the first frames into blocks of the KV cache."""


def layout_of(kv_cache: torch.Tensor, num_feature_layers: int = 0) -> BlockLayout:
    """Layout of the blocks of `kv_cache` [num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim], of which
    the last layers are of features. Raises ConfigError if the dtype has no code on the medium."""
    dtype = str(kv_cache.dtype).removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(f"connectors move KV of {', '.join(SUPPORTED_DTYPES)}, not {dtype}", param="dtype")
    _, num_layers, num_planes, num_kv_heads, block_size, head_dim = kv_cache.shape
    if num_planes not in (1, 2) or not kv_cache.is_contiguous():
        raise ValueError(f"not a block-major KV cache: shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()}")
    num_kv_layers = num_layers - num_feature_layers
    return BlockLayout(dtype, num_kv_layers, num_kv_heads, block_size, head_dim, num_feature_layers, num_planes)


def create_staging(kv_cache: torch.Tensor, num_bytes: int, fences: Fences = NO_FENCES) -> Staging:
    """Creates as many frames as fit into `num_bytes`, but at least one, for the calling thread."""
    slabs = kv_cache.detach().flatten(start_dim=1).view(torch.uint8)  # [num_blocks, payload bytes]
    frame_bytes = HEADER_BYTES + slabs.shape[1]
    shape = (min(max(1, num_bytes // frame_bytes), slabs.shape[0]), frame_bytes)
    return HostStaging(slabs, shape) if kv_cache.is_cpu else CudaStaging(slabs, shape, fences)


class HostStaging:
    """Staging of a KV cache in host memory."""

    def __init__(self, slabs: torch.Tensor, shape: tuple[int, int]) -> None:
        self._slabs = slabs.numpy()
        frames = np.empty(shape, dtype=np.uint8)
        self._payloads = frames[:, HEADER_BYTES:]
        self.frames: Sequence[Buffer] = [frame.data for frame in frames]

    def gather(self, block_ids: Sequence[int], fence: Fence) -> None:
        """See Staging."""
        for frames, blocks in _runs(block_ids):
            np.copyto(self._payloads[frames], self._slabs[blocks])

    def scatter(self, block_ids: Sequence[int], fence: Fence) -> None:
        """See Staging."""
        for frames, blocks in _runs(block_ids):
            np.copyto(self._slabs[blocks], self._payloads[frames])


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Splits frames, counted from 0, and their blocks into runs that are adjacent in both. A run is one copy, so the
    GIL, for which threads compete, is taken once for all of it."""
    start = 0
    for stop in range(1, len(block_ids) + 1):
        if stop == len(block_ids) or block_ids[stop] != block_ids[stop - 1] + 1:
            yield slice(start, stop), slice(block_ids[start], block_ids[stop - 1] + 1)
            start = stop


class CudaStaging:
    """Staging of a KV cache in GPU memory: pinned, with a copy stream of its own."""

    def __init__(self, slabs: torch.Tensor, shape: tuple[int, int], fences: Fences) -> None:
        self._slabs = slabs
        self._fences = fences
        self._stream = torch.cuda.Stream(slabs.device)  # type: ignore[no-untyped-call]
        frames = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._payloads = list(frames[:, HEADER_BYTES:])
        self.frames: Sequence[Buffer] = [frame.data for frame in frames.numpy()]

    def gather(self, block_ids: Sequence[int], fence: Fence) -> None:
        """See Staging."""
        self._copy(((payload, self._slabs[block_id]) for payload, block_id in self._pairs(block_ids)), fence)

    def scatter(self, block_ids: Sequence[int], fence: Fence) -> None:
        """See Staging."""
        self._copy(((self._slabs[block_id], payload) for payload, block_id in self._pairs(block_ids)), fence)

    def _pairs(self, block_ids: Sequence[int]) -> Iterable[tuple[torch.Tensor, int]]:
        return zip(self._payloads, block_ids, strict=False)

    def _copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]], fence: Fence) -> None:
        with torch.cuda.stream(self._stream):
            self._fences.wait(fence)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()
