"""Packs one step's scheduled tokens into the arrays that the forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.attention.base import AttentionMetadata
from common.engine.worker.request_table import RequestTable
from common.types import RequestId


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Ready for the forward pass. Tensors are on the device, int64."""

    input_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    logits_index: torch.Tensor  # [num_sampled]: query tokens whose logits are wanted
    attention: AttentionMetadata
    sampled_ids: list[RequestId]  # requests that sample, in the order of logits_index
    sampled_rows: npt.NDArray[np.int64]  # their rows in the request table
    opened_blocks: list[int]  # blocks that the step begins to fill and leaves partly empty


def pack_batch(
    table: RequestTable, num_scheduled_tokens: dict[RequestId, int], block_size: int, device: torch.device
) -> PackedBatch:
    """Build the batch. `table` knows the requests and how many of their tokens are computed."""
    request_ids = list(num_scheduled_tokens)
    rows = table.rows_of(request_ids)
    counts = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
    starts = table.num_computed_tokens[rows]
    order = _batch_order(counts, starts + counts)
    rows, counts, starts = rows[order], counts[order], starts[order]
    ends = starts + counts
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    num_tokens = int(query_start[-1])

    if num_tokens == len(rows):  # only decodes
        token_rows, positions = rows, starts
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], counts)
    blocks, offsets = np.divmod(positions, block_size)
    slots = table.block_tables[token_rows, blocks] * block_size + offsets
    samples = np.flatnonzero(ends == table.num_tokens[rows])
    max_blocks = -(-int(ends.max()) // block_size)

    uploaded = _upload(
        [
            table.token_ids[token_rows, positions],
            positions,
            slots,
            query_start[1:][samples] - 1,
            ends,
            table.block_tables[rows, :max_blocks].reshape(-1),
        ],
        device,
    )
    attention = AttentionMetadata(
        num_decodes=int(np.count_nonzero(counts == 1)),
        query_start=query_start.tolist(),
        seq_lens=ends.tolist(),
        seq_lens_tensor=uploaded[4],
        block_tables=uploaded[5].view(len(rows), max_blocks),
        slot_mapping=uploaded[2],
    )
    # The last block of a request is opened if this step writes its first slot; full ones need no care.
    last_blocks, tails = np.divmod(ends, block_size)
    opened = np.flatnonzero((tails > 0) & (last_blocks * block_size >= starts))
    return PackedBatch(
        input_ids=uploaded[0],
        positions=uploaded[1],
        logits_index=uploaded[3],
        attention=attention,
        sampled_ids=[request_ids[i] for i in order[samples].tolist()],
        sampled_rows=rows[samples],
        opened_blocks=table.block_tables[rows[opened], last_blocks[opened]].tolist(),
    )


def _batch_order(counts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Requests with one token first, longest first; then the others as they came."""
    is_chunk = counts > 1
    return np.lexsort((np.where(is_chunk, 0, -ends), is_chunk))


def _upload(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int64 tensors on the device, in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays]
    packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return list(torch.split(packed, [len(array) for array in arrays]))
