"""A head of the model, which proposes what it predicts from the model's own hidden states.

It is a draft model of one layer with one more input, see `Features`. At place t it takes the token after, t + 1, and
predicts t + 2. So it has the request's tokens without the first, in the places of those before them. It begins at the
first block from which on there are features, with positions from 0: before that it sees nothing.

Where the model has not come to a place, the head's own output of the place before stands for the feature. Once the
model has, the head computes these places again.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from common.engine.contract.step import Drafting, NewRequest
from common.engine.model.loader import LoadedModel
from common.engine.speculation.base import Context
from common.engine.worker.batch import PackedBatch
from common.engine.worker.draft_model import Drafted, DraftModel
from common.engine.worker.features import Features, Tagger
from common.engine.worker.model_runner import ModelRunner
from common.types import BlockHash

logger = logging.getLogger(__name__)


class HeadRunner(ModelRunner):
    """Runs a head. What it computes of a request's last token becomes the feature of the next place."""

    def __init__(self, features: Features, loaded: LoadedModel, kv_cache: torch.Tensor, **options: Any) -> None:
        """`options`: see ModelRunner."""
        self._features = features
        self._head = loaded.model
        super().__init__(loaded, kv_cache, inputs=self._take, on_computed=self._pass_on, **options)

    def _take(self, batch: PackedBatch) -> torch.Tensor:
        features = self._features.take(batch.attention.slot_mapping)
        return torch.cat([self._head.embed(batch.input_ids), features], dim=-1)

    def _pass_on(self, batch: PackedBatch) -> None:
        """A place without a block is that of the null block."""
        if not batch.sampled_ids:
            return
        blocks, offsets = divmod(batch.sampled_lengths, self._block_size)
        slots = self._table.block_tables[0][batch.sampled_rows, blocks] * self._block_size + offsets
        (places,) = self._memory.upload([slots])
        self._features.put(places, self._head.outputs(batch.logits_index[: len(batch.sampled_ids)]))


class Head(DraftModel):
    """See DraftModel. Two requests that share blocks and differ in the token after have one row in common there that
    is right for one of them: that which computed it last."""

    _num_again = 1  # what follows a block's last token is not in its hash

    def __init__(self, tagger: Tagger, depth: int, runner: ModelRunner, *limits: Any) -> None:
        """`tagger` is told of steps and `runner` is the head's, see HeadRunner. `limits`: see DraftModel."""
        self._tagger = tagger
        self._num_unseen = 0
        self._has_warned = False
        self._max_rows = depth + 1  # as many as the model may have computed since the last drafts
        super().__init__(runner, *limits)

    def take_drafting(self) -> Drafting | None:
        """See DraftModel."""
        drafting, num_unseen, self._num_unseen = super().take_drafting(), self._num_unseen, 0
        return (drafting or Drafting())._replace(num_unseen=num_unseen) if num_unseen else drafting

    def _introduce(self, new: NewRequest) -> Drafted:
        tagged = self._tagger.requests[new.request_id]
        first = tagged.first
        num_unseen = min(first * self._block_size, len(new.token_ids))
        self._num_unseen += num_unseen
        if num_unseen and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the head does without %d tokens of request %s, as the pod that computed them, or later ones, has not "
                "this head; further ones are counted in baton_pod_head_unseen_tokens_total",
                num_unseen,
                new.request_id,
            )
        block_ids, shift = new.block_ids[0][first:], first * self._block_size + 1
        return Drafted(BlockHash(new.root), block_ids, 0, shift=shift, first=first, hashes=tagged.hashes)

    def _take_tokens(self, context: Context) -> None:
        request = self._requests[context.request_id]
        num_known = self._tagger.num_computed(context.request_id) + 1 - request.shift
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
