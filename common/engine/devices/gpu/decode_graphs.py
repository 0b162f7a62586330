"""CUDA graphs of decode steps: the forward pass as one launch, where Python would take longer than the GPU.

One graph for each of a few batch sizes; a step uses the smallest that holds it, filled up with sequences that have no
tokens. The inputs are copied to fixed places first, and the results are found at a fixed place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from common.engine.devices.decode_inputs import DecodeInputs, DecodeLimits, FixedInputs, Forward, RecordedStepError

logger = logging.getLogger(__name__)

_BLOCKS_PER_COPY = 128


class Recorder(Protocol):
    """Records work on a device."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], Any]:
        """Returns what does the same work again."""


class DecodeGraphs:
    """Graphs of one model over one KV cache."""

    def __init__(
        self,
        forward: Forward,
        record: Recorder,
        limits: DecodeLimits,
        *,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """Records them. Raises RecordedStepError, or whatever torch raises if the forward pass cannot be recorded."""
        self._most = most = max(sizes)
        self._max_model_len = limits.max_model_len
        self._fixed = FixedInputs(most, limits, device)
        self._results: torch.Tensor | None = None
        self._replays: dict[int, Callable[[], Any]] = {}
        for size in sorted(sizes, reverse=True):  # the first takes the memory that all share
            self._replays[size] = self._record(forward, record, size)
        self._sizes = sorted(sizes)

    def run(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """See RecordedDecodes. None if there are too many decodes, or some with adapters."""
        if inputs.adapters is not None:
            return None
        num_decodes = len(inputs.tokens)
        size = next((size for size in self._sizes if size >= num_decodes), None)
        if size is None:
            return None
        self._stage(inputs, size)
        self._replays[size]()
        assert self._results is not None
        return self._results[:num_decodes]

    def _record(self, forward: Forward, record: Recorder, size: int) -> Callable[[], Any]:
        inputs = self._fixed.first(size, [self._max_model_len] * size)

        def work() -> None:
            results = forward(inputs)
            if self._results is None:
                self._results = results.new_empty((self._most, results.shape[1]))
            self._results[:size].copy_(results)

        work()  # compiles kernels, which must not happen while recording
        assert self._results is not None
        expected = self._results[:size].clone()
        replay = record(work)
        self._results.fill_(torch.nan)
        replay()
        if not torch.equal(self._results[:size], expected):
            raise RecordedStepError(f"a CUDA graph of {size} decodes computes something else")
        return replay

    def _stage(self, inputs: DecodeInputs, size: int) -> None:
        from common.engine.devices.gpu.kernels.staging import stage_decodes_kernel

        attention, fixed, num_decodes = inputs.attention, self._fixed, len(inputs.tokens)
        has_ids = inputs.tokens.dim() == 1
        if not has_ids:  # what other places hold is not attended to
            fixed.tokens[:num_decodes].copy_(inputs.tokens)
        for own, place in zip(attention.by_group(), fixed.groups, strict=True):
            stage_decodes_kernel[(size,)](
                inputs.tokens,
                inputs.positions,
                own.slot_mapping,
                own.seq_lens_tensor,
                own.block_tables,
                fixed.tokens,
                fixed.positions,
                place.slot_mapping,
                fixed.seq_lens,
                place.block_tables,
                num_decodes,
                own.block_tables.shape[1],
                place.block_tables.shape[1],
                BLOCKS=_BLOCKS_PER_COPY,
                HAS_IDS=has_ids,
            )


def graph_sizes(max_num_decodes: int) -> list[int]:
    """Batch sizes that get a graph: denser where a sequence more costs a larger share."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 513, 32)]
    return sorted({min(size, max_num_decodes) for size in sizes})


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], Any]:
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay
