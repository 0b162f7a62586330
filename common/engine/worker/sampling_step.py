"""A step whose tokens are sampled on the device, while the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from common.engine.contract.step import ModelRunnerOutput, Outcome, outcomes_of
from common.engine.devices.base import HostCopy
from common.engine.sampling.sampler import samples_of
from common.engine.speculation.guard import Proposed
from common.engine.worker.batch import PackedBatch
from common.engine.worker.request_table import RequestTable
from common.types import RequestId


class SamplingStep:
    """See RunningStep. In the request table, placeholders stand for its tokens until they are known."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        copy: HostCopy,
        batch: PackedBatch,
        table: RequestTable,
        propose: Callable[[Mapping[RequestId, Outcome]], Proposed],
    ) -> None:
        """`token_ids` [sampled requests], on the device; -1: no token. `propose`: once they are known."""
        self.is_settled = False
        self._token_ids = token_ids
        self._request_ids = batch.sampled_ids
        self._rows = batch.sampled_rows
        self._table = table
        self._places = table.expect_tokens(self._rows)
        self._on_host, self._wait = copy
        self._propose = propose

    def fill_in(self, batch: PackedBatch) -> PackedBatch:
        """`batch`, packed after this step, with this step's tokens in place of the placeholders."""
        ids = batch.input_ids
        own = self._token_ids.clamp(min=0)[(-1 - ids).clamp(min=0)]  # a request without a token ends: any will do
        return replace(batch, input_ids=torch.where(ids < 0, own, ids))

    def settle(self) -> None:
        """Waits for the tokens and notes them in the request table. Idempotent."""
        if not self.is_settled:
            if self._wait is not None:
                self._wait()
            self.is_settled = True
            self._table.settle_tokens(self._rows, self._places, self._on_host.clamp(min=0).numpy())

    def result(self) -> ModelRunnerOutput:
        """See RunningStep."""
        self.settle()
        outcomes = outcomes_of(self._request_ids, samples_of(self._on_host.tolist()))
        proposed = self._propose(outcomes)
        return ModelRunnerOutput(outcomes, drafts=proposed.drafts, proposer_failure=proposed.failure)
