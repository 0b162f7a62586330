"""Features: the input of a model's head for each token that the model computes, beside the token itself.

Features are under the block ids of the model's first KV group, as KV is, but never leave the pod. Those of a block are
there if the model has computed all of its tokens here. KV that came from elsewhere, by a handoff, a migration or from a
tier, has none. So each full block has a key here, the hash of the tokens up to its end for which it has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.engine.contract.step import SchedulerOutput
from common.engine.model.heads import LoadedHead
from common.engine.model.hidden_states import HiddenStates
from common.engine.worker.batch import PackedBatch
from common.types import BlockHash


class Features:
    """Written by the model's runner, and read by that of its head."""

    def __init__(self, head: LoadedHead, states: HiddenStates, num_blocks: int, block_size: int) -> None:
        """Raises MemoryError or torch.OutOfMemoryError."""
        self._head = head.module
        self._states = states
        self._block_size = block_size
        shape = (num_blocks * block_size, head.module.feature_size)
        self.by_slot = head.loaded.device.memory.zeros(shape, head.loaded.dtype)  # [slots, size]
        self._keys: list[BlockHash | None] = [None] * num_blocks

    def write(self, batch: PackedBatch) -> None:
        """Writes the features of the tokens that the model has computed last."""
        states = self._states.of_last(len(batch.input_ids))
        self.by_slot.index_copy_(0, batch.attention.slot_mapping, self._head.fuse(states))

    def begin_step(self, step: SchedulerOutput) -> None:
        """Forgets the features of blocks that will hold another request's, or are not complete."""
        if step.forgets_outputs:
            self._keys = [None] * len(self._keys)
        for new in step.new_requests:
            self._forget(new.block_ids[0][new.num_computed_tokens // self._block_size :])
        for block_ids in step.new_block_ids.values():
            self._forget(block_ids[0])

    def first_block(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], num_computed_tokens: int) -> int:
        """The first of a new request's blocks from which on there will be features of all tokens, if the model computes
        those after the first `num_computed_tokens`. `hashes`: of blocks that are full now."""
        first = -(-num_computed_tokens // self._block_size)
        while first and first <= len(hashes) and self._keys[block_ids[first - 1]] == hashes[first - 1]:
            first -= 1
        return first

    def set_keys(self, block_ids: Iterable[int], hashes: Iterable[BlockHash]) -> None:
        """The model has computed all tokens of these blocks here."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self._keys[block_id] = block_hash

    def key(self, block_id: int) -> BlockHash | None:
        """Hash of the tokens up to the block's end for which it holds features; None: not of all."""
        return self._keys[block_id]

    def _forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._keys[block_id] = None
