"""Copies to where CUDA graphs expect their inputs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_decodes", "width"],
    do_not_specialize_on_alignment=["input_ids", "positions", "slots", "seq_lens", "block_tables"],
)
def stage_decodes_kernel(
    input_ids,  # [num_decodes] int64, as are all
    positions,
    slots,
    seq_lens,
    block_tables,  # [num_decodes, width]
    to_input_ids,
    to_positions,
    to_slots,
    to_seq_lens,
    to_block_tables,  # [..., to_width]
    num_decodes,
    width,
    to_width,
    BLOCKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """Sequences from `num_decodes` on get no tokens and no slot. HAS_IDS: else the first and the sixth argument are not
    used. Grid: (sequences,)."""
    sequence = tl.program_id(0).to(tl.int64)
    is_real = sequence < num_decodes
    if HAS_IDS:
        tl.store(to_input_ids + sequence, tl.load(input_ids + sequence, mask=is_real, other=0))
    tl.store(to_positions + sequence, tl.load(positions + sequence, mask=is_real, other=0))
    tl.store(to_slots + sequence, tl.load(slots + sequence, mask=is_real, other=-1))
    tl.store(to_seq_lens + sequence, tl.load(seq_lens + sequence, mask=is_real, other=0))
    for first in range(0, width, BLOCKS):
        places = first + tl.arange(0, BLOCKS)
        is_place = is_real & (places < width)
        block_ids = tl.load(block_tables + sequence * width + places, mask=is_place, other=0)
        tl.store(to_block_tables + sequence * to_width + places, block_ids, mask=is_place)
