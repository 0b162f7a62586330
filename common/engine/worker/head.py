"""A head of the model, which proposes what it predicts from the model's own hidden states.

It is a draft model of one layer with one more input, see `Features`. At place t it takes the token after, t + 1, and
predicts t + 2. So it has the request's tokens without the first, in the places of those before them. It begins at the
first block from which on there are features, with positions from 0: before that it sees nothing.

Where the model has not come to a place, the head's own output of the place before stands for the feature. Once the
model has, the head computes these places again.
"""

from __future__ import annotations

from typing import Any

import torch

from common.engine.contract.step import Drafting, NewRequest, SchedulerOutput
from common.engine.model.loader import LoadedModel
from common.engine.speculation.base import Context
from common.engine.worker.batch import PackedBatch
from common.engine.worker.draft_model import Drafted, DraftModel
from common.engine.worker.features import Features
from common.engine.worker.model_runner import ModelRunner
from common.types import BlockHash


class HeadRunner(ModelRunner):
    """Runs a head. What it computes of a request's last token becomes the feature of the next place."""

    def __init__(self, features: Features, loaded: LoadedModel, kv_cache: torch.Tensor, **options: Any) -> None:
        """`options`: see ModelRunner."""
        self._features = features
        self._head = loaded.model
        super().__init__(loaded, kv_cache, inputs=self._take, on_computed=self._pass_on, **options)

    def _take(self, batch: PackedBatch) -> torch.Tensor:
        features = self._features.by_slot[batch.attention.slot_mapping]
        return torch.cat([self._head.embed(batch.input_ids), features], dim=-1)

    def _pass_on(self, batch: PackedBatch) -> None:
        """A place without a block is that of the null block."""
        if not batch.sampled_ids:
            return
        blocks, offsets = divmod(batch.sampled_lengths, self._block_size)
        slots = self._table.block_tables[0][batch.sampled_rows, blocks] * self._block_size + offsets
        (places,) = self._memory.upload([slots])
        self._features.by_slot[places] = self._head.outputs(batch.logits_index[: len(batch.sampled_ids)])


class Head(DraftModel):
    """See DraftModel. Two requests that share blocks and differ in the token after have one row in common there that
    is right for one of them: that which computed it last."""

    _num_again = 1  # what follows a block's last token is not in its hash

    def __init__(self, target: ModelRunner, features: Features, depth: int, runner: ModelRunner, *limits: Any) -> None:
        """`target` is the model's runner and `runner` the head's, see HeadRunner. `limits`: see DraftModel."""
        self._target = target
        self._features = features
        self._num_unseen = 0
        self._max_rows = depth + 1  # as many as the model may have computed since the last drafts
        super().__init__(runner, *limits)

    def begin_step(self, step: SchedulerOutput) -> None:
        """See DraftModel. Called before the model's runner is told of the step."""
        for context in self._target.table.contexts(step.dropped_request_ids):
            self._note_features(context)
        self._features.begin_step(step)
        super().begin_step(step)

    def take_drafting(self) -> Drafting | None:
        """See DraftModel."""
        drafting, num_unseen, self._num_unseen = super().take_drafting(), self._num_unseen, 0
        return (drafting or Drafting())._replace(num_unseen=num_unseen) if num_unseen else drafting

    def check(self) -> list[str]:
        """See Proposer."""
        violations = super().check()
        for request_id, request in self._requests.items():
            for block_id, block_hash in zip(request.block_ids, request.hashes[request.first :], strict=False):
                if self._features.key(block_id) not in (None, block_hash):
                    violations.append(f"{request_id} has block {block_id}, whose features are those of other tokens")
        return violations

    def _introduce(self, new: NewRequest) -> Drafted:
        request = Drafted(BlockHash(new.root), list(new.block_ids[0]), 0)
        request.add_hashes(new.token_ids[: new.num_computed_tokens + self._block_size], self._block_size)
        first = self._features.first_block(request.block_ids, request.hashes, new.num_computed_tokens)
        self._num_unseen += min(first * self._block_size, len(new.token_ids))
        request.first, request.shift = first, first * self._block_size + 1
        request.block_ids = request.block_ids[first:]
        request.num_known = 0
        return request

    def _take_tokens(self, context: Context) -> None:
        request = self._requests[context.request_id]
        num_known = self._note_features(context) + 1 - request.shift
        num_known = min(num_known, len(context.token_ids) - request.shift)
        if num_known <= 0:
            return
        table = self._runner.table
        # What comes after has been computed from the head's own outputs.
        table.set_computed(request.row, min(int(table.num_computed_tokens[request.row]), request.num_known))
        token_ids = context.token_ids[request.shift : request.shift + num_known]
        table.correct_tokens(context.request_id, token_ids, request.num_known)
        request.num_known = num_known
        self._set_keys(request)

    def _note_features(self, context: Context) -> int:
        """Returns how many tokens the model has computed."""
        request = self._requests[context.request_id]
        table = self._target.table
        (row,) = table.rows_of([context.request_id])
        num_computed = int(table.num_computed_tokens[row])
        while num_computed and context.token_ids[num_computed - 1] < 0:  # that are still being sampled
            num_computed -= 1
        request.add_hashes(context.token_ids[:num_computed], self._block_size)
        hashes = request.hashes[request.first : num_computed // self._block_size]
        self._features.set_keys(request.block_ids[: len(hashes)], hashes)
        return num_computed
