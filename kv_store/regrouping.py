"""Loads of blocks that have another size than those of the KV cache: a producer's frames are read as they are on the
medium, and their tokens are then copied to where the consumer keeps them.

A token is not one run of bytes in a slab, [num_layers, 2, num_kv_heads, block_size, head_dim], so each piece is a copy
with strides. That is slower than to copy whole slabs, which equal block sizes allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.engine.kv_connector import BlockTransfer
from kv_store.base import Buffer
from kv_store.block_format import HEADER_BYTES
from kv_store.staging import Fence, layout_of


class RegroupingStaging:
    """One thread's frames for blocks of `block_size` tokens, whatever those of the KV cache have; for one load at a
    time."""

    def __init__(self, kv_cache: torch.Tensor, block_size: int, num_frames: int) -> None:
        """`num_frames` blocks can be loaded at once."""
        self.block_size = block_size
        layout = replace(layout_of(kv_cache), block_size=block_size)
        is_cuda = kv_cache.device.type == "cuda"
        shape = (num_frames, HEADER_BYTES + layout.payload_bytes)
        frames = torch.empty(shape, dtype=torch.uint8, pin_memory=is_cuda)
        # Both [blocks, num_layers, 2, num_kv_heads, block_size, bytes of a token in a head].
        self._payloads = frames[:, HEADER_BYTES:].view(num_frames, *layout.shape[:-1], -1)
        self._slabs = kv_cache.detach().view(torch.uint8)
        self._stream = torch.cuda.Stream(kv_cache.device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._transfer: BlockTransfer | None = None
        self.frames: Sequence[Buffer] = [frame.data for frame in frames.numpy()]

    def aim(self, transfer: BlockTransfer) -> None:
        """Fill the blocks of `transfer` from now on."""
        self._transfer = transfer

    def scatter(self, indices: Sequence[int], fence: Fence) -> None:
        """Copy the payloads of the first frames, the producer's blocks `indices` of the transfer, into the KV cache.
        Returns when the copies are done."""
        transfer = self._transfer
        assert transfer is not None
        assert transfer.regroup is not None
        last = len(transfer.block_hashes) - 1
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and fence is not None:
                self._stream.wait_event(fence)
            for frame, index in enumerate(indices):
                num_tokens = transfer.num_tokens_in_last if index == last else self.block_size
                payload = self._payloads[frame].to(self._slabs.device, non_blocking=True)
                for block, start, source, count in transfer.regroup.pieces(index, num_tokens, self._slabs.shape[-2]):
                    target = self._slabs[transfer.block_ids[block]]
                    target[..., start : start + count, :] = payload[..., source : source + count, :]
        if self._stream is not None:
            self._stream.synchronize()
