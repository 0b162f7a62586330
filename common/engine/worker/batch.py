"""Packs one step's scheduled tokens into the arrays that the forward pass takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.kv_groups import Window
from common.engine.devices.adapters import StepAdapters
from common.engine.devices.attention import AttentionMetadata, GroupTables
from common.engine.devices.base import Memory
from common.engine.model.lora import RequestAdapters
from common.engine.worker.request_table import RequestTable
from common.types import RequestId


class PromptRun(NamedTuple):
    """Prompt tokens of one request whose logits, or hidden states, are wanted."""

    request_id: RequestId
    row: int  # in the request table
    start: int  # position of the first
    num_tokens: int
    is_last: bool = False  # the prompt ends with them


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Ready for the forward pass. Tensors are on the device, int64."""

    input_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens], or [dimensions, num_tokens] if the model's have several
    # Query tokens whose logits are wanted: the sampled ones, then those of prompts. After these, those of which the
    # hidden states are wanted, before they become logits.
    logits_index: torch.Tensor
    attention: AttentionMetadata
    sampled_ids: list[RequestId]  # requests that sample, in the order of logits_index
    sampled_rows: npt.NDArray[np.int64]  # their rows in the request table
    sampled_lengths: npt.NDArray[np.int64]  # tokens before those that are sampled
    prompt_runs: list[PromptRun]  # of requests that want log probabilities of their prompt, as in logits_index
    pooled_runs: list[PromptRun]  # of requests that pool, as in logits_index
    opened_blocks: list[int]  # blocks that the step begins to fill and leaves partly empty
    rows: npt.NDArray[np.int64]  # [num_seqs], of each sequence in the request table
    adapters: StepAdapters | None = None  # None: no token has one


class BatchPacker:
    """Packs the steps of one request table.

    Most steps compute the next token of the same requests as the step before: only positions and block tables change.
    """

    def __init__(
        self,
        table: RequestTable,
        block_size: int,
        memory: Memory,
        windows: Sequence[Window | None] = (None,),
        adapters: RequestAdapters | None = None,
    ) -> None:
        """`windows`: of each KV group. What has fallen out of one is another request's by now."""
        self._table = table
        self._adapters = adapters
        self._windows = windows
        self._block_size = block_size
        self._memory = memory
        self._last: _Layout | None = None

    def pack(
        self, num_scheduled_tokens: dict[RequestId, int], drafts: Mapping[RequestId, Sequence[int]]
    ) -> PackedBatch:
        """Builds the batch. The table knows the requests and how many of their tokens are computed; in it, those of
        the batch count as computed from here on. A request with drafts, or an entry for none, is as many decodes as it
        computes tokens."""
        table, block_size = self._table, self._block_size
        last = self._last
        if last is not None and not drafts and last.is_repeated(num_scheduled_tokens, table.version):
            layout = last.one_token_later()
        else:
            layout = _lay_out(table, num_scheduled_tokens, drafts)
        self._last = layout
        rows, positions = layout.rows, layout.positions
        starts = table.num_computed_tokens[rows]
        table.num_computed_tokens[rows] = layout.ends
        token_rows = rows[layout.sequences]
        blocks, offsets = np.divmod(positions, block_size)
        tables = table.block_tables[: len(self._windows)]
        block_ids = [block_table[token_rows, blocks] for block_table in tables]
        max_blocks = -(-max(layout.seq_lens) // block_size)
        token_positions = positions if table.position_dims == 1 else table.positions(token_rows, positions)
        arrays = [table.token_ids[token_rows, positions], token_positions, layout.wanted, layout.ends]
        for block_table, own_ids, window in zip(tables, block_ids, self._windows, strict=True):
            if window is not None:
                table.forget_fallen(block_table, rows, np.maximum(window.first(starts), 0) // block_size)
            arrays += [block_table[rows, :max_blocks], own_ids * block_size + offsets]
        input_ids, positions_tensor, logits_index, seq_lens, block_tables, slots, *others = self._memory.upload(arrays)
        # A block is opened by the token in its first slot. Those that the step also fills need no clearing.
        opened = (offsets == 0).nonzero()[0]
        opened_blocks: list[int] = []
        if len(opened):
            opened = opened[positions[opened] + block_size > layout.ends[layout.sequences[opened]]]
            opened_blocks = [block_id for own_ids in block_ids for block_id in own_ids[opened].tolist()]
        return PackedBatch(
            input_ids=input_ids,
            positions=positions_tensor,
            logits_index=logits_index,
            attention=AttentionMetadata(
                num_decodes=layout.num_decodes,
                query_start=layout.query_start,
                seq_lens=layout.seq_lens,
                seq_lens_tensor=seq_lens,
                block_tables=block_tables,
                slot_mapping=slots,
                has_drafts=bool(drafts),
                other_groups=list(map(GroupTables, others[::2], others[1::2])) if others else (),
            ),
            sampled_ids=layout.sampled_ids,
            sampled_rows=layout.sampled_rows,
            sampled_lengths=layout.sampled_lengths,
            prompt_runs=layout.prompt_runs,
            pooled_runs=layout.pooled_runs,
            opened_blocks=opened_blocks,
            rows=rows,
            adapters=None if self._adapters is None else self._adapters.of_step(token_rows, layout.wanted),
        )


class _Layout(NamedTuple):
    """The order of the sequences in a batch, the place of each query token, and which logits are wanted."""

    num_scheduled_tokens: dict[RequestId, int]
    table_version: int
    rows: npt.NDArray[np.int64]  # [num_seqs], in the request table
    sequences: npt.NDArray[np.intp]  # [num_tokens]: sequence, in batch order, of each token
    positions: npt.NDArray[np.int64]  # [num_tokens]: place of each token in its sequence
    ends: npt.NDArray[np.int64]  # [num_seqs]: length of each sequence after the step
    query_start: list[int]
    seq_lens: list[int]  # `ends`
    num_decodes: int
    sampled_ids: list[RequestId]
    sampled_rows: npt.NDArray[np.int64]
    sampled_lengths: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.int64]  # see PackedBatch.logits_index
    prompt_runs: list[PromptRun]
    pooled_runs: list[PromptRun]

    def is_repeated(self, num_scheduled_tokens: dict[RequestId, int], table_version: int) -> bool:
        """Whether the step after this one computes the tokens that this one samples, in the same rows."""
        num_seqs = len(self.rows)
        return (
            self.num_decodes == num_seqs == len(self.sampled_ids)
            and table_version == self.table_version
            and num_scheduled_tokens == self.num_scheduled_tokens
        )

    def one_token_later(self) -> _Layout:
        """Returns the layout of that step."""
        ends = self.ends + 1
        return self._replace(positions=self.ends, ends=ends, seq_lens=ends.tolist(), sampled_lengths=ends)


def _lay_out(
    table: RequestTable, num_scheduled_tokens: dict[RequestId, int], drafts: Mapping[RequestId, Sequence[int]]
) -> _Layout:
    """Sequences with one token first, longest first; then the others as they came."""
    request_ids = list(num_scheduled_tokens)
    rows = table.rows_of(request_ids)
    starts = table.num_computed_tokens[rows]
    counts = np.array(list(num_scheduled_tokens.values()))
    if drafts:
        each = [counts[number] if request_id in drafts else 1 for number, request_id in enumerate(request_ids)]
        places = np.arange(sum(each)) - np.repeat(np.cumsum(each) - each, each)  # of each row in its request
        request_ids = [request_id for request_id, times in zip(request_ids, each, strict=True) for _ in range(times)]
        rows, starts = np.repeat(rows, each), np.repeat(starts, each) + places
        counts = np.repeat(np.where(np.array(each) > 1, 1, counts), each)
        for request_id, token_ids in drafts.items():
            table.put_drafts(request_id, token_ids)
    is_chunk = counts > 1
    order = np.lexsort((np.where(is_chunk, 0, -starts), is_chunk))
    rows, starts, counts = rows[order], starts[order], counts[order]
    request_ids = [request_ids[i] for i in order.tolist()]
    ends = starts + counts
    query_ends = np.cumsum(counts)
    query_starts = query_ends - counts
    sequences = np.repeat(np.arange(len(counts)), counts)
    is_done = ends >= table.num_tokens[rows]  # after drafts, that is not the last known token
    samples = np.flatnonzero(is_done & ~np.isin(rows, list(table.pools)) if table.pools else is_done)
    wanted, prompt_runs, pooled_runs = query_ends[samples] - 1, list[PromptRun](), list[PromptRun]()
    if table.num_prompt_logits:
        prompt_runs, of_prompts = _prompt_runs(table, request_ids, rows, starts, ends, query_starts)
        wanted = np.concatenate([wanted, *of_prompts])
    if table.pools:
        pooled_runs, of_pooled = _pooled_runs(table, request_ids, rows, starts, ends, query_starts)
        wanted = np.concatenate([wanted, *of_pooled])
    return _Layout(
        num_scheduled_tokens=num_scheduled_tokens,
        table_version=table.version,
        rows=rows,
        sequences=sequences,
        positions=np.arange(len(sequences)) + (starts - query_starts)[sequences],
        ends=ends,
        query_start=[0, *query_ends.tolist()],
        seq_lens=ends.tolist(),
        num_decodes=len(counts) - int(np.count_nonzero(is_chunk)),
        sampled_ids=[request_ids[i] for i in samples.tolist()],
        sampled_rows=rows[samples],
        sampled_lengths=ends[samples],
        wanted=wanted,
        prompt_runs=prompt_runs,
        pooled_runs=pooled_runs,
    )


def _prompt_runs(
    table: RequestTable,
    request_ids: Sequence[RequestId],
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    query_starts: npt.NDArray[np.int64],
) -> tuple[list[PromptRun], list[npt.NDArray[np.int64]]]:
    """The prompt tokens whose logits are wanted, and their places in the batch. All arguments are in batch order."""
    runs, places = [], []
    for sequence, row in enumerate(rows.tolist()):
        start, first = int(starts[sequence]), int(query_starts[sequence])
        num_tokens = min(int(ends[sequence]), table.num_prompt_logits.get(row, 0)) - start
        if num_tokens > 0:
            runs.append(PromptRun(request_ids[sequence], row, start, num_tokens))
            places.append(np.arange(first, first + num_tokens))
    return runs, places


def _pooled_runs(
    table: RequestTable,
    request_ids: Sequence[RequestId],
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    query_starts: npt.NDArray[np.int64],
) -> tuple[list[PromptRun], list[npt.NDArray[np.int64]]]:
    """The tokens whose hidden states are pooled, and their places in the batch. All arguments are in batch order."""
    runs, places = [], []
    for sequence, row in enumerate(rows.tolist()):
        method = table.pools.get(row)
        if method is None:
            continue
        start, end = int(starts[sequence]), int(ends[sequence])
        is_last = end >= int(table.num_tokens[row])
        wanted = range(start, end)
        if method == "last":
            wanted = wanted[-1:] if is_last else wanted[:0]
        elif method == "cls":
            wanted = wanted[: int(start == 0)]
        if wanted or is_last:
            runs.append(PromptRun(request_ids[sequence], row, wanted.start, len(wanted), is_last))
            places.append(int(query_starts[sequence]) + np.array(wanted, dtype=np.int64) - start)
    return runs, places
