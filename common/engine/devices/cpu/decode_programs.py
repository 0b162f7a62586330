"""Decode steps on a CPU as one call: their kernels are recorded once for each batch size, and then run without Python
in between, which takes as long as the kernels of a small model.

The inputs are copied to fixed places first. Batches of a size come again and again, so that each is recorded when it
is first met; it is computed as usual then, and compared.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from common.engine.devices.cpu.kernels.compiled import CannotRecordError
from common.engine.devices.cpu.kernels.program import Program, Workspace, recording
from common.engine.devices.decode_inputs import DecodeInputs, DecodeLimits, FixedInputs, Forward, RecordedStepError

logger = logging.getLogger(__name__)

_SHORTEST = 256  # tokens of a sequence that recorded steps take at least
_MOST = 64  # sequences: each size is recorded by itself, and what a recording saves is little beside larger steps


class _Kind(NamedTuple):
    """Steps that one recording is for."""

    size: int
    has_drafts: bool
    has_adapters: bool


class DecodePrograms:
    """Recorded decode steps of one model over one KV cache."""

    def __init__(self, forward: Forward, limits: DecodeLimits) -> None:
        self._forward = forward
        self._max_model_len = limits.max_model_len
        self._most = min(_MOST, limits.max_num_decodes)  # of a step that is recorded
        self._fixed = FixedInputs(self._most, limits, torch.device("cpu"))
        self._workspace = Workspace(self._most)
        self._longest = min(_SHORTEST, limits.max_model_len)  # sequence that the recorded steps take
        self._records_adapters = limits.num_adapters > 0
        self._steps: dict[_Kind, _Recorded] = {}

    def run(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """See RecordedDecodes."""
        size = inputs.attention.num_decodes
        if size > self._most or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001
            return None  # a profile shows each kernel
        kind = _Kind(size, inputs.attention.has_drafts, inputs.adapters is not None)
        if kind.has_adapters and not self._records_adapters:
            return None
        self._make_room(max(inputs.attention.seq_lens))
        step = self._steps.get(kind)
        if step is None:
            return self._first(kind, inputs)
        self._stage(step.places, inputs)
        step.program.run()
        return step.results

    def _make_room(self, seq_len: int) -> None:
        if seq_len > self._longest:
            self._longest = min(max(seq_len, 2 * self._longest), self._max_model_len)
            self._steps.clear()  # their tables of rotary embeddings are shorter

    def _stage(self, places: DecodeInputs, inputs: DecodeInputs) -> None:
        own, attention = places.attention, inputs.attention
        places.tokens.copy_(inputs.tokens)
        places.positions.copy_(inputs.positions)
        own.slot_mapping.copy_(attention.slot_mapping)
        own.seq_lens_tensor.copy_(attention.seq_lens_tensor)
        own.block_tables[:, : attention.block_tables.shape[1]] = attention.block_tables
        if inputs.adapters is not None:
            self._fixed.stage_adapters(inputs.adapters)

    def _first(self, kind: _Kind, inputs: DecodeInputs) -> torch.Tensor:
        """Computes the first step of a kind as usual, and records it."""
        size = kind.size
        expected = self._forward(inputs)
        places = self._fixed.first(
            size, [self._longest] * size, has_drafts=kind.has_drafts, has_adapters=kind.has_adapters
        )
        self._stage(places, inputs)
        try:
            step = self._record(places)
        except CannotRecordError as error:
            if kind.has_adapters:
                logger.debug("decode steps with adapters are computed kernel by kernel: %s", error)
                self._records_adapters = False
                return expected
            logger.debug("decode steps run as one call for up to %d sequences: %s", size - 1, error)
            self._most = size - 1
            return expected
        expected = expected.clone()
        step.program.run()
        if not torch.equal(step.results, expected):
            raise RecordedStepError(f"the recorded step of {size} sequences computes something else")
        self._steps[kind] = step
        return expected

    def _record(self, places: DecodeInputs) -> _Recorded:
        with recording(self._workspace) as recorded:
            results = self._forward(places)
        return _Recorded(Program(recorded), places, results)


class _Recorded(NamedTuple):
    program: Program
    places: DecodeInputs  # of the inputs
    results: torch.Tensor  # where they are afterwards
