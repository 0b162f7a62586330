"""Features: the input of a model's head for each token that the model computes, beside the token itself.

They are under the block ids of the model's first KV group, as KV is. Where an engine has one rank they are in the KV
cache itself, in layers after the model's own (`KVLayout.num_feature_layers`): they travel with a block, and under the
same digests, wherever it goes. Other pods may do without a head, or have another one.

So each block ends with a tag, which names the head and the tokens, up to the last of the block, for which it has the
features of all. The model's runner takes it away from blocks that it writes to, and the tag of other tokens counts as
none. A block that came without features has what was there before, under the tag of that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.model.heads import LoadedHead
from common.engine.model.hidden_states import HiddenStates
from common.engine.worker.batch import PackedBatch
from common.engine.worker.request_table import RequestTable
from common.types import BlockHash, RequestId, hash_partial_block, hash_prompt

TAG_BYTES = 16


def feature_bytes_per_block(head: LoadedHead, block_size: int) -> int:
    """Bytes of the features of a block, with its tag."""
    return block_size * head.feature_bytes + TAG_BYTES


class Features:
    """Written by the model's runner, and read by that of its head."""

    def __init__(self, head: LoadedHead, states: HiddenStates, places: torch.Tensor, block_size: int) -> None:
        """`places`: bytes [num_blocks, at least `feature_bytes_per_block`], zeros."""
        self._head = head.module
        self._identity = head.fingerprint
        self._states = states
        self._block_size = block_size
        rows = places[:, : block_size * head.feature_bytes].view(head.loaded.dtype)
        self._rows = rows.view(len(rows), block_size, head.module.feature_size)  # [blocks, tokens of each, size]
        self._tags = places[:, -TAG_BYTES:]

    def write(self, batch: PackedBatch) -> None:
        """Writes the features of the tokens that the model has computed last."""
        states = self._states.of_last(len(batch.input_ids))
        self.put(batch.attention.slot_mapping, self._head.fuse(states))

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows [slots, size]."""
        self._rows[slots // self._block_size, slots % self._block_size] = rows

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns [slots, size]."""
        rows: torch.Tensor = self._rows[slots // self._block_size, slots % self._block_size]
        return rows

    def forget(self, step: SchedulerOutput) -> None:
        """Takes the tags away from blocks that the step writes to."""
        written = [new.block_ids[0][new.num_computed_tokens // self._block_size :] for new in step.new_requests]
        written += [block_ids[0] for block_ids in step.new_block_ids.values()]
        block_ids = [block_id for each in written for block_id in each]
        self._set_tags(block_ids, bytes(TAG_BYTES * len(block_ids)))

    def first_block(self, block_ids: Sequence[int], hashes: Sequence[Sequence[BlockHash]]) -> int:
        """The number of the first block from which on all have features, of tokens with one of these hashes each."""
        tags = self._read_tags(block_ids[: len(hashes)])
        first = len(hashes)
        while first and tags[first - 1] in map(self._tag, hashes[first - 1]):
            first -= 1
        return first

    def set_complete(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """These blocks have features of all these tokens."""
        self._set_tags(block_ids, b"".join(map(self._tag, hashes)))

    def stale(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Returns those of these blocks that have a tag of other tokens."""
        tags = zip(block_ids, self._read_tags(block_ids), hashes, strict=True)
        return [block_id for block_id, tag, each in tags if any(tag) and tag != self._tag(each)]

    def _tag(self, block_hash: BlockHash) -> bytes:
        return xxhash.xxh3_128_digest(self._identity + block_hash)

    def _read_tags(self, block_ids: Sequence[int]) -> list[bytes]:
        if not block_ids:
            return []
        found = self._tags[torch.tensor(block_ids, device=self._tags.device)]
        return [tag.tobytes() for tag in found.cpu().numpy()]

    def _set_tags(self, block_ids: Sequence[int], tags: bytes) -> None:
        if block_ids:
            values = torch.from_numpy(np.frombuffer(tags, dtype=np.uint8).copy()).view(-1, TAG_BYTES)
            places = torch.tensor(block_ids, device=self._tags.device)
            self._tags[places] = values.to(self._tags.device)


@dataclass(slots=True)
class Tagged:
    """A running request."""

    new: NewRequest  # as it came
    first: int = 0  # of its blocks from which on there are features of all tokens that are computed
    hashes: list[BlockHash] = field(default_factory=list)  # of its full blocks
    num_tagged: int = 0  # first blocks that are done with


class Tagger:
    """Tags the blocks of running requests as the model computes them, those without drafts as well: others may share
    them. What was computed in a step is tagged before its blocks go anywhere."""

    def __init__(self, features: Features, table: RequestTable, block_size: int) -> None:
        """`table`: of the model's runner."""
        self._features = features
        self._table = table
        self._block_size = block_size
        self.requests: dict[RequestId, Tagged] = {}

    def begin_step(self, step: SchedulerOutput) -> None:
        """Called before the model's runner is told of the step."""
        for request_id in step.dropped_request_ids:
            self.requests.pop(request_id, None)
        for new in step.new_requests:
            self.requests[new.request_id] = self._introduce(new)
        self._features.forget(step)

    def note_computed(self, request_ids: Collection[RequestId]) -> bool:
        """The model has computed further tokens of these requests. Returns whether blocks have got tags."""
        block_ids: list[int] = []
        hashes: list[BlockHash] = []
        known = [each for each in request_ids if each in self.requests]  # others have ended before the step
        for request_id, row in zip(known, self._table.rows_of(known).tolist(), strict=True):
            request, num_computed = self.requests[request_id], self._num_computed(row)
            num_full, num_in_last = divmod(num_computed, self._block_size)
            ends_prompt = num_in_last and num_computed == request.new.num_prompt_tokens and request.first <= num_full
            if num_full <= request.num_tagged and not ends_prompt:
                continue  # most decodes fill no block
            token_ids = self._table.token_ids[row, :num_computed]
            self._add_hashes(request, token_ids)
            own = request.hashes[request.num_tagged : num_full]
            if ends_prompt:
                own.append(self._hash_partial(token_ids, request))
            start = request.num_tagged
            block_ids += self._table.block_tables[0][row, start : start + len(own)].tolist()
            hashes += own
            request.num_tagged = max(start, num_full)
        self._features.set_complete(block_ids, hashes)
        return bool(block_ids)

    def num_computed(self, request_id: RequestId) -> int:
        """Returns how many tokens the model has computed that are known here, as some may still be being sampled."""
        (row,) = self._table.rows_of([request_id])
        return self._num_computed(row)

    def _num_computed(self, row: int) -> int:
        num_computed = int(self._table.num_computed_tokens[row])
        while num_computed and self._table.token_ids[row, num_computed - 1] < 0:
            num_computed -= 1
        return num_computed

    def check(self) -> list[str]:
        """See Proposer."""
        violations = []
        for request_id, request in self.requests.items():
            (row,) = self._table.rows_of([request_id])
            block_ids = self._table.block_tables[0][row, request.first : request.num_tagged].tolist()
            stale = self._features.stale(block_ids, request.hashes[request.first : request.num_tagged])
            violations += [f"{request_id} has block {each}, whose features are those of other tokens" for each in stale]
        return violations

    def _introduce(self, new: NewRequest) -> Tagged:
        """A last block that is partly computed may have been full: its tokens may all be known."""
        request, num_computed = Tagged(new), new.num_computed_tokens
        num_full, num_in_last = divmod(num_computed, self._block_size)
        self._add_hashes(request, new.token_ids[: num_computed + self._block_size - 1])
        held: list[Sequence[BlockHash]] = [[each] for each in request.hashes[:num_full]]
        if num_in_last:
            partial = self._hash_partial(new.token_ids[:num_computed], request)
            held.append([partial, *request.hashes[num_full : num_full + 1]])
        request.first = self._features.first_block(new.block_ids[0], held)
        request.num_tagged = max(request.first, num_full)
        return request

    def _add_hashes(self, request: Tagged, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
        new, start = request.new, len(request.hashes) * self._block_size
        if len(token_ids) >= start + self._block_size:
            parent = request.hashes[-1] if request.hashes else BlockHash(new.root)
            rest, keys = np.asarray(token_ids[start:]).tolist(), new.extra_keys
            request.hashes += hash_prompt(rest, self._block_size, parent, keys, start, new.positions)

    def _hash_partial(self, token_ids: Sequence[int] | npt.NDArray[np.int64], request: Tagged) -> BlockHash:
        """Hashes the last block of these tokens, of whose other blocks the request has the hashes."""
        new, full = request.new, request.hashes[: len(token_ids) // self._block_size]
        return hash_partial_block(
            np.asarray(token_ids).tolist(), self._block_size, full, BlockHash(new.root), new.extra_keys, new.positions
        )
