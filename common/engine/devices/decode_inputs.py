"""Inputs of decode steps, and places for them that stay the same from step to step, which recorded steps read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from common.engine.devices.adapters import AdapterRows, StepAdapters, num_routes
from common.engine.devices.attention import AttentionMetadata, GroupTables


class DecodeInputs(NamedTuple):
    """Inputs of a forward pass over decodes."""

    tokens: torch.Tensor  # [num_decodes], their ids; or [num_decodes, size], what the stage before passes on
    positions: torch.Tensor  # [num_decodes], see PackedBatch
    attention: AttentionMetadata
    adapters: StepAdapters | None = None  # None: no row has one


class RecordedStepError(RuntimeError):
    """A recorded step computes something else than the forward pass that was recorded."""


Forward = Callable[[DecodeInputs], torch.Tensor]
"""Returns logits [num_decodes, vocabulary], or what goes to the next stage, [num_decodes, size]; reads nothing of the
host's that differs from step to step. It may overwrite inputs in fixed places."""


class DecodeLimits(NamedTuple):
    """How large decode steps become."""

    max_num_decodes: int  # where there are drafts, each is one
    max_model_len: int
    block_size: int
    token_shape: tuple[int, ...] = ()  # of each of DecodeInputs.tokens
    token_dtype: torch.dtype = torch.int64
    num_groups: int = 1  # of KV
    num_adapters: int = 0  # that are computed at once; 0: none


class RecordedDecodes(Protocol):
    """Decode steps that were recorded, to be run as one call each."""

    def run(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """The results, valid until the next run; None if the step cannot be run this way. Raises RecordedStepError; the
        step is to be computed again then, as it may have written wrong KV."""


class FixedInputs:
    """Inputs of up to `most` decodes in fixed places."""

    def __init__(self, most: int, limits: DecodeLimits, device: torch.device) -> None:
        self.tokens = torch.zeros((most, *limits.token_shape), dtype=limits.token_dtype, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(most, dtype=torch.int64, device=device)
        width = -(-(limits.max_model_len + 1) // limits.block_size)
        self.groups = [
            GroupTables(
                torch.zeros((most, width), dtype=torch.int64, device=device),
                torch.full((most,), -1, dtype=torch.int64, device=device),
            )
            for _ in range(limits.num_groups)
        ]
        self._num_adapters = limits.num_adapters
        self._routes = torch.zeros(num_routes(limits.num_adapters, most), dtype=torch.int64)

    def first(
        self, size: int, seq_lens: Sequence[int], *, has_drafts: bool = False, has_adapters: bool = False
    ) -> DecodeInputs:
        """The inputs of the first `size` decodes, which have at most `seq_lens` tokens."""
        (block_tables, slots), *others = [GroupTables(*(each[:size] for each in group)) for group in self.groups]
        metadata = AttentionMetadata(
            num_decodes=size,
            query_start=list(range(size + 1)),
            seq_lens=list(seq_lens),
            seq_lens_tensor=self.seq_lens[:size],
            block_tables=block_tables,
            slot_mapping=slots,
            has_drafts=has_drafts,
            other_groups=others,
        )
        no_slots = np.zeros(size, dtype=np.int64)
        adapters = StepAdapters(no_slots, no_slots, self._routes) if has_adapters else None
        return DecodeInputs(self.tokens[:size], self.positions[:size], metadata, adapters)

    def stage_adapters(self, adapters: StepAdapters) -> None:
        """Puts what kernels read of a step's adapters in its place."""
        AdapterRows(adapters.of_tokens, self._num_adapters, torch.device("cpu")).write_routes(self._routes)
