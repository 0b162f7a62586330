"""Packs one step's scheduled tokens into the arrays that the forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.engine.attention.base import AttentionMetadata
from common.engine.worker.request_table import RequestTable
from common.types import RequestId


class PromptRun(NamedTuple):
    """Prompt tokens of one request whose logits are wanted."""

    request_id: RequestId
    row: int  # in the request table
    start: int  # position of the first
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Ready for the forward pass. Tensors are on the device, int64."""

    input_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    logits_index: torch.Tensor  # query tokens whose logits are wanted: the sampled ones, then those of prompts
    attention: AttentionMetadata
    sampled_ids: list[RequestId]  # requests that sample, in the order of logits_index
    sampled_rows: npt.NDArray[np.int64]  # their rows in the request table
    prompt_runs: list[
        PromptRun
    ]  # of requests that want log probabilities of their prompt, in the order of logits_index
    opened_blocks: list[int]  # blocks that the step begins to fill and leaves partly empty


def pack_batch(
    table: RequestTable, num_scheduled_tokens: dict[RequestId, int], block_size: int, device: torch.device
) -> PackedBatch:
    """Build the batch. `table` knows the requests and how many of their tokens are computed; in it, those of the batch
    count as computed from here on."""
    request_ids = list(num_scheduled_tokens)
    rows = table.rows_of(request_ids)
    starts = table.num_computed_tokens[rows]
    counts = list(num_scheduled_tokens.values())
    layout = _lay_out_decodes(starts) if max(counts) == 1 else _lay_out(starts, np.array(counts))
    rows = rows[layout.order]
    table.num_computed_tokens[rows] = layout.ends
    token_rows = rows[layout.sequences]
    blocks, offsets = np.divmod(layout.positions, block_size)
    block_ids = table.block_tables[token_rows, blocks]
    max_blocks = -(-max(layout.seq_lens) // block_size)
    samples = np.flatnonzero(layout.ends == table.num_tokens[rows])
    sampled_rows = rows[samples]
    wanted, prompt_runs = layout.last_tokens[samples], list[PromptRun]()
    if table.num_prompt_logits[rows].any():
        prompt_runs, of_prompts = _prompt_runs(table, [request_ids[i] for i in layout.order.tolist()], rows, layout)
        wanted = np.concatenate([wanted, *of_prompts])

    input_ids, positions, slots, logits_index, seq_lens, block_tables = _upload(
        [
            table.token_ids[token_rows, layout.positions],
            layout.positions,
            block_ids * block_size + offsets,
            wanted,
            layout.ends,
            table.block_tables[rows, :max_blocks].reshape(-1),
        ],
        device,
    )
    # A block is opened by the token in its first slot. Those that the step also fills need no clearing.
    opened = np.flatnonzero(offsets == 0)
    if len(opened):
        opened = opened[layout.positions[opened] + block_size > layout.ends[layout.sequences[opened]]]
    return PackedBatch(
        input_ids=input_ids,
        positions=positions,
        logits_index=logits_index,
        attention=AttentionMetadata(
            num_decodes=layout.num_decodes,
            query_start=layout.query_start,
            seq_lens=layout.seq_lens,
            seq_lens_tensor=seq_lens,
            block_tables=block_tables.view(len(rows), max_blocks),
            slot_mapping=slots,
        ),
        sampled_ids=[request_ids[i] for i in layout.order[samples].tolist()],
        sampled_rows=sampled_rows,
        prompt_runs=prompt_runs,
        opened_blocks=block_ids[opened].tolist(),
    )


class _Layout(NamedTuple):
    """Order of the sequences in the batch and the place of each query token."""

    order: npt.NDArray[np.intp]  # [num_seqs], into the scheduled requests
    sequences: npt.NDArray[np.intp]  # [num_tokens]: sequence, in batch order, of each token
    positions: npt.NDArray[np.int64]  # [num_tokens]: position of each token in its sequence
    ends: npt.NDArray[np.int64]  # [num_seqs]: length of each sequence after the step
    last_tokens: npt.NDArray[np.int64]  # [num_seqs]: last query token of each sequence
    query_start: list[int]
    seq_lens: list[int]  # `ends`
    num_decodes: int


def _prompt_runs(
    table: RequestTable, request_ids: Sequence[RequestId], rows: npt.NDArray[np.int64], layout: _Layout
) -> tuple[list[PromptRun], list[npt.NDArray[np.int64]]]:
    """The prompt tokens whose logits are wanted, and their places in the batch. `request_ids` are in batch order."""
    runs, places = [], []
    for sequence in np.flatnonzero(table.num_prompt_logits[rows]).tolist():
        row, first = int(rows[sequence]), layout.query_start[sequence]
        start = int(layout.positions[first])
        num_tokens = min(int(layout.ends[sequence]), int(table.num_prompt_logits[row])) - start
        if num_tokens > 0:
            runs.append(PromptRun(request_ids[sequence], row, start, num_tokens))
            places.append(np.arange(first, first + num_tokens))
    return runs, places


def _lay_out_decodes(starts: npt.NDArray[np.int64]) -> _Layout:
    """One token for each sequence: what most steps are."""
    num_seqs = len(starts)
    order = np.argsort(-starts, kind="stable")
    positions = starts[order]
    ends = positions + 1
    tokens = np.arange(num_seqs)
    return _Layout(order, tokens, positions, ends, tokens, list(range(num_seqs + 1)), ends.tolist(), num_seqs)


def _lay_out(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> _Layout:
    """Sequences with one token first, longest first; then the others as they came."""
    is_chunk = counts > 1
    order = np.lexsort((np.where(is_chunk, 0, -starts), is_chunk))
    starts, counts = starts[order], counts[order]
    ends = starts + counts
    query_ends = np.cumsum(counts)
    query_starts = query_ends - counts
    sequences = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(sequences)) + (starts - query_starts)[sequences]
    num_decodes = len(counts) - int(np.count_nonzero(is_chunk))
    query_start = [0, *query_ends.tolist()]
    return _Layout(order, sequences, positions, ends, query_ends - 1, query_start, ends.tolist(), num_decodes)


def _upload(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return list(torch.split(packed, [len(array) for array in arrays]))
