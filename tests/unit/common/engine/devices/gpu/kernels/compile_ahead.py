"""Compiles the Triton kernels for a GPU that need not be there, and prints what they take of it.

    python -m tests.unit.common.engine.devices.gpu.kernels.compile_ahead 90 [KERNEL ...]

One line of JSON for each: name, registers per thread, bytes of registers that were spilled, bytes of shared memory and
the most that a program may have.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.engine.contract.kv_groups import KV_SCALE_BYTES
from common.engine.devices.gpu.attention import batch_invariant_tile, chunk_tile, decode_tile
from common.engine.devices.gpu.kernels import (
    attention,
    elementwise,
    grouped_linear,
    latent_attention,
    linear,
    sampling,
    staging,
)
from common.engine.devices.gpu.latent_attention import latent_tile
from common.engine.devices.gpu.operators import linear_tile

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # that a program may have, by capability
ALIGNED = [["tt.divisibility", 16]]
UNALIGNED = {"tiles", "seq_lens", "block_tables", "positions", "slots", "input_ids"}  # see the kernels

INTEGERS = {
    "query_stride",
    "table_width",
    "block_stride",
    "num_numbers",
    "num_decodes",
    "num_rows",
    "width",
    "parts",
    "to_width",
}
INTEGERS |= {"key_stride", "key_head_stride", "value_stride", "value_head_stride", "row_stride"}
FLOATS = {"scale", "epsilon"}
KEPT = {"": ("", 0.0), ", int8": ("*i8", 127.0), ", fp8": ("*u8", 448.0)}  # type of the cache, if it is another; limit
CODES = {"int4": "*i32", "int8": "*i8", "float8": "*i8"}  # types of codes, by what they stand for
INT64S = {"tiles", "seq_lens", "block_tables", "positions", "slots", "keys", "part_winner", "tokens", "counts", "rows"}
INT64S |= {"order", "input_ids", "to_input_ids", "to_positions", "to_slots", "to_seq_lens", "to_block_tables"}
FLOAT32S = {"partial_out", "partial_weight", "hidden", "weight", "query_norm", "key_norm", "cosines", "sines"}
FLOAT32S |= {"scales", "shifts", "part_best", "draws", "sinks", "factors"}
FLOAT64S = {"part_value", "top_mass"}


def cases(capability: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Name, kernel, constants and options."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        factor = tl.bfloat16 if name == "bf16" else tl.float32
        for head_dim, kept in itertools.product((64, 128, 256), KEPT):
            for kind, find_tile in (("decode", decode_tile), ("chunk", chunk_tile), ("any", batch_invariant_tile)):
                is_decode, tile = kind == "decode", find_tile(4, head_dim, dtype, is_quantized=kept != "")
                constants = {
                    "NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "PADDED_DIM": head_dim, "BLOCK_SIZE": 16,
                    **kept_as(kept, head_dim),
                    "ROWS": tile.rows, "KEYS": tile.keys, "PARTS": 8 if is_decode else 1, "WINDOW": 0,
                    "IS_CHUNKED": False, "SOFTCAP": 0.0,
                    "HAS_SINKS": False, "FACTOR_TYPE": factor,
                    "IS_DECODE": is_decode,
                }  # fmt: skip
                options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
                yield f"attend {kind} {name} {head_dim}{kept}", attention.attend_kernel, constants, options
        for num_heads in (16, 128):
            tile = latent_tile(num_heads, dtype, capability)
            constants = {
                "NUM_HEADS": num_heads, "RANK": 512, "ROTARY_DIM": 64, "PADDED_RANK": 512, "PADDED_ROTARY": 64,
                "BLOCK_SIZE": 16, "ROWS": tile.rows, "KEYS": tile.keys, "HAS_PARTS": True, "FACTOR_TYPE": factor,
            }  # fmt: skip
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            yield f"latents {name} {num_heads}", latent_attention.attend_latents_kernel, constants, options
        linear_constants = {"IN_FEATURES": 4096, "OUT_FEATURES": 12288, "HAS_BIAS": False}
        tile = linear_tile(dtype)
        linear_constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "FACTOR_TYPE": factor}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        yield f"linear {name}", linear.linear_kernel, linear_constants, options
        for kind in CODES:
            own = linear_constants | {"GROUP": 128, "KIND": kind, "HAS_SHIFT": True, "HAS_ORDER": True}
            yield f"grouped linear {name}, {kind}", grouped_linear.grouped_linear_kernel, own, options
    parts = {"PARTS": 8, "PADDED_PARTS": 8, "HEAD_DIM": 128, "DIMS": 128}
    yield "join parts bf16", attention.join_parts_kernel, parts, {"num_warps": 4}
    yield "add norm bf16", elementwise.add_norm_kernel, {"SIZE": 4096, "PADDED_SIZE": 4096}, {"num_warps": 8}
    yield "silu mul bf16", elementwise.silu_mul_kernel, {"SIZE": 12288, "NUMBERS": 1024}, {"num_warps": 4}
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "PADDED_HEADS": 64, "HEAD_DIM": 128, "PADDED_HALF": 64}
    store = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "PADDED_DIM": 128, "BLOCK_SIZE": 16, "HAS_VALUES": True}
    for kept in KEPT:
        prepared = heads | {"BLOCK_SIZE": 16, "HAS_NORMS": True, **kept_as(kept, 128)}
        yield f"prepare bf16{kept}", elementwise.prepare_kernel, prepared, {"num_warps": 4}
        yield f"store bf16{kept}", elementwise.store_kernel, store | kept_as(kept, 128), {"num_warps": 1}
    sizes = {"NUM_TOKENS": 151936, "SIZE": sampling.NUMBERS}
    parts = {"PARTS": 38, "PADDED_PARTS": 64}
    yield "penalty fp32", sampling.penalty_kernel, sizes, {"num_warps": 4, "enable_fp_fusion": False}
    for name in ("bf16", "fp32"):
        yield f"best {name}", sampling.best_kernel, sizes, {"num_warps": 4}
        yield f"draw {name}", sampling.draw_kernel, sizes | parts, {"num_warps": 4}
        yield f"settle {name}", sampling.settle_kernel, sizes | parts, {"num_warps": 8}
    yield "stage decodes", staging.stage_decodes_kernel, {"BLOCKS": 128, "HAS_IDS": True}, {"num_warps": 4}


def kept_as(kept: str, head_dim: int) -> dict[str, Any]:
    """Constants of a cache with such numbers."""
    _, limit = KEPT[kept]
    return {"ROW": head_dim + (KV_SCALE_BYTES if limit else 0), "LIMIT": limit}


def type_of(argument: str, element: str, cache: str, codes: str) -> str:
    """In Triton's spelling."""
    if argument == "codes":
        return codes
    if argument == "cache" and cache:
        return cache
    if argument in INTEGERS:
        return "i32"
    if argument in FLOATS:
        return "fp32"
    for names, kind in ((INT64S, "i64"), (FLOAT32S, "fp32"), (FLOAT64S, "fp64")):
        if argument in names:
            return f"*{kind}"
    return f"*{element}"


def usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump says of the one kernel in it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def main() -> None:
    """Entry point."""
    capability, wanted = int(sys.argv[1]), sys.argv[2:]
    for name, kernel, constants, options in cases(capability):
        if wanted and name not in wanted:
            continue
        element = "fp32" if "fp32" in name else "bf16"
        names = kernel.arg_names
        cache, _ = KEPT.get(f", {name.partition(', ')[2]}", KEPT[""])
        codes = CODES.get(name.partition(", ")[2], "")
        signature = {each: "constexpr" if each in constants else type_of(each, element, cache, codes) for each in names}
        attributes = {
            (index,): ALIGNED
            for index, each in enumerate(names)
            if (signature[each].startswith("*") and each not in UNALIGNED) or each == "block_stride"
        }
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        shared = {"shared": compiled.metadata.shared, "most_shared": SHARED_BYTES[capability]}
        figures = {"kernel": name, **shared, **usage(compiled.asm["cubin"])}
        print(json.dumps(figures), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
