"""Linear layers whose rows do not depend on one another: cuBLAS chooses how to sum by the number of rows, which makes
results differ in their last bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    inputs,  # [num_rows, IN_FEATURES] element
    weights,  # [OUT_FEATURES, IN_FEATURES] element
    bias,  # [OUT_FEATURES] element, if there is one
    out,  # [num_rows, OUT_FEATURES] element
    num_rows,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    FACTOR_TYPE: tl.constexpr,  # of what is multiplied
):
    """out = inputs @ weight.T + bias, summed in one order in float32. Grid: (num_rows / ROWS, OUT_FEATURES / COLUMNS);
    programs that read the same weights are neighbours."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    is_row, is_column = rows < num_rows, columns < OUT_FEATURES
    input_addresses = inputs + rows[:, None] * IN_FEATURES + depths[None, :]
    weight_addresses = weights + columns[None, :] * IN_FEATURES + depths[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, IN_FEATURES, DEPTH):
        if IN_FEATURES % DEPTH == 0:
            left = tl.load(input_addresses + start, mask=is_row[:, None], other=0.0)
            right = tl.load(weight_addresses + start, mask=is_column[None, :], other=0.0)
        else:
            is_depth = depths < IN_FEATURES - start
            left = tl.load(input_addresses + start, mask=is_row[:, None] & is_depth[None, :], other=0.0)
            right = tl.load(weight_addresses + start, mask=is_column[None, :] & is_depth[:, None], other=0.0)
        total = tl.dot(left.to(FACTOR_TYPE), right.to(FACTOR_TYPE), acc=total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    offsets = rows[:, None] * OUT_FEATURES + columns[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
