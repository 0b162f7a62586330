"""A rank's blocks, as places of states.

A state has the same place in blocks as in those of a model that is not cut: in each layer of the blocks are the states
of a run of the model's layers, in as many blocks as they take. A rank has the part that is where its own layers and KV
heads are, so that handoffs and stores need not know what is in a block. All ranks of a stage compute the same states;
each copies its part to its blocks, and gets those of the others from them.
"""

from __future__ import annotations

import torch

from common.engine.devices.ranks import Ranks


class StateBlocks:
    """Copies states to blocks and back."""

    def __init__(self, kv_cache: torch.Tensor, ranks: Ranks, *, num_kv_heads: int, blocks_per_state: int) -> None:
        """`kv_cache`: this rank's blocks, [num_blocks, layers, planes, KV heads, block_size, head_dim]. `num_kv_heads`:
        of all ranks."""
        self._ranks = ranks
        self._blocks = kv_cache.flatten(4).view(torch.uint8)  # [num_blocks, layers, planes, KV heads, bytes]
        num_layers, num_planes, num_own_heads, head_bytes = self._blocks.shape[1:]
        first = ranks.rank * num_kv_heads // ranks.size
        self._own_heads = slice(first, first + num_own_heads)
        self._num_parts = num_kv_heads // num_own_heads
        self.shape = num_layers, blocks_per_state, num_planes, num_kv_heads, head_bytes

    def save(self, state: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Copies this rank's part of a state, which has `shape` and is of bytes."""
        self._blocks[block_ids] = state.transpose(0, 1)[..., self._own_heads, :]

    def load(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Returns a state, of which each rank has its part in these blocks. Called by all ranks of a stage."""
        own = self._blocks[block_ids]  # [blocks, layers, planes, KV heads, bytes]
        if self._num_parts > 1:
            dtype = torch.float32 if own.numel() % 4 == 0 else torch.uint8  # the former may go through shared memory
            gathered = self._ranks.all_gather_last(own.view(1, -1).view(dtype)).view(torch.uint8)
            copies = self._ranks.size // self._num_parts  # ranks that have the same head
            own = gathered.view(self._ranks.size, *own.shape)[::copies].movedim(0, 3).flatten(3, 4)
        return own.transpose(0, 1)
