"""Decode steps on a CPU as one call: their kernels are recorded once for each batch size, and then run without Python
in between, which takes as long as the kernels of a small model.

The inputs are copied to fixed places first. Batches of a size come again and again, so that each is recorded when it
is first met; it is computed as usual then, and compared.
"""

from __future__ import annotations

import logging

import torch

from common.engine.devices.cpu.kernels.compiled import CannotRecordError
from common.engine.devices.cpu.kernels.program import Program, Workspace, recording
from common.engine.devices.decode_inputs import DecodeInputs, FixedInputs, Forward, RecordedStepError

logger = logging.getLogger(__name__)

_SHORTEST = 256  # tokens of a sequence that recorded steps take at least
_MOST = 64  # sequences: each size is recorded by itself, and what a recording saves is little beside larger steps


class DecodePrograms:
    """Recorded decode steps of one model over one KV cache."""

    def __init__(self, forward: Forward, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._forward = forward
        self._max_model_len = max_model_len
        self._fixed = FixedInputs(max_num_seqs, max_model_len, block_size, torch.device("cpu"))
        self._workspace = Workspace(max_num_seqs)
        self._most = min(_MOST, max_num_seqs)  # decodes of a step that is recorded
        self._longest = min(_SHORTEST, max_model_len)  # sequence that the recorded steps take
        # By batch size and whether there are drafts; with the place of the logits.
        self._steps: dict[tuple[int, bool], tuple[Program, torch.Tensor]] = {}

    def run(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """See RecordedDecodes."""
        size = len(inputs.input_ids)
        if size > self._most or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001
            return None  # a profile shows each kernel
        self._make_room(max(inputs.attention.seq_lens))
        step = self._steps.get((size, inputs.attention.has_drafts))
        if step is None:
            return self._first(inputs)
        self._stage(inputs)
        program, logits = step
        program.run()
        return logits

    def _make_room(self, seq_len: int) -> None:
        if seq_len > self._longest:
            self._longest = min(max(seq_len, 2 * self._longest), self._max_model_len)
            self._steps.clear()  # their tables of rotary embeddings are shorter

    def _first(self, inputs: DecodeInputs) -> torch.Tensor:
        """Computes the first step of a size as usual, and records it."""
        size = len(inputs.input_ids)
        expected = self._forward(inputs)
        self._stage(inputs)
        try:
            step = self._record(size, has_drafts=inputs.attention.has_drafts)
        except CannotRecordError as error:
            logger.debug("decode steps run as one call for up to %d sequences: %s", size - 1, error)
            self._most = size - 1
            return expected
        program, logits = step
        expected = expected.clone()
        program.run()
        if not torch.equal(logits, expected):
            raise RecordedStepError(f"the recorded step of {size} sequences computes something else")
        self._steps[size, inputs.attention.has_drafts] = step
        return expected

    def _record(self, size: int, *, has_drafts: bool) -> tuple[Program, torch.Tensor]:
        with recording(self._workspace) as recorded:
            logits = self._forward(self._fixed.first(size, [self._longest] * size, has_drafts=has_drafts))
        return Program(recorded), logits

    def _stage(self, inputs: DecodeInputs) -> None:
        fixed, attention, size = self._fixed, inputs.attention, len(inputs.input_ids)
        fixed.input_ids[:size] = inputs.input_ids
        fixed.positions[:size] = inputs.positions
        fixed.slots[:size] = attention.slot_mapping
        fixed.seq_lens[:size] = attention.seq_lens_tensor
        fixed.block_tables[:size, : attention.block_tables.shape[1]] = attention.block_tables
