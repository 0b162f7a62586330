"""Linear layers whose weights are codes of 4 or 8 bits with a scale for each group of inputs.

Codes stay packed in memory and become numbers in registers, so that few rows take as long as reading them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights_at(
    codes,
    scales,
    shifts,
    depths,  # [DEPTH] inputs
    columns,  # [COLUMNS] outputs
    is_weight,  # [DEPTH, COLUMNS]
    OUT_FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    """float32 [DEPTH, COLUMNS]: number * scales + shifts."""
    if KIND == "int4":
        words = tl.load(codes + (depths // 8)[:, None] * OUT_FEATURES + columns[None, :], mask=is_weight, other=0)
        numbers = (((words >> ((depths % 8) * 4)[:, None]) & 15) - 8).to(tl.float32)
    else:
        raw = tl.load(codes + depths[:, None] * OUT_FEATURES + columns[None, :], mask=is_weight, other=0)
        if KIND == "int8":
            numbers = raw.to(tl.float32)
        else:  # e4m3 by way of float16, whose exponents are 8 larger; older GPUs have no such numbers
            bits = raw.to(tl.int32) & 255
            halves = ((bits & 128) << 8) | ((bits & 127) << 7)
            numbers = halves.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    places = (depths // GROUP)[:, None] * OUT_FEATURES + columns[None, :]
    weights = numbers * tl.load(scales + places, mask=is_weight, other=0.0)
    if HAS_SHIFT:
        weights += tl.load(shifts + places, mask=is_weight, other=0.0)
    return weights


@triton.jit(do_not_specialize=["num_rows"])
def grouped_linear_kernel(
    inputs,  # [num_rows, IN_FEATURES] element
    codes,  # int32 [IN_FEATURES / 8, OUT_FEATURES] of KIND int4, else int8 [IN_FEATURES, OUT_FEATURES]
    scales,  # [IN_FEATURES / GROUP, OUT_FEATURES] float32
    shifts,  # the same, if there is one
    order,  # [IN_FEATURES] int64: inputs in the order of the codes, if it is not their own
    bias,  # [OUT_FEATURES] element, if there is one
    out,  # [num_rows, OUT_FEATURES] element
    num_rows,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_ORDER: tl.constexpr,
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
    is_row, is_column = rows < num_rows, columns < OUT_FEATURES
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, IN_FEATURES, DEPTH):
        depths = start + tl.arange(0, DEPTH)
        is_depth = depths < IN_FEATURES
        places = tl.load(order + depths, mask=is_depth, other=0) if HAS_ORDER else depths
        addresses = inputs + rows[:, None] * IN_FEATURES + places[None, :]
        left = tl.load(addresses, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        is_weight = is_depth[:, None] & is_column[None, :]
        right = weights_at(codes, scales, shifts, depths, columns, is_weight, OUT_FEATURES, GROUP, KIND, HAS_SHIFT)
        total = tl.dot(left.to(FACTOR_TYPE), right.to(FACTOR_TYPE), acc=total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    offsets = rows[:, None] * OUT_FEATURES + columns[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
