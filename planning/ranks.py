"""`baton plan ranks`: the memory of each rank of a model, by how many ranks there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from common.engine.config import KVCacheDType, ParallelConfig
from common.engine.contract.kv_groups import QUANTIZED_KV, row_numbers_of
from common.engine.model.parallel_plan import Heads, Place, heads_of
from common.engine.model.pooling import read_checkpoint
from common.engine.model.rank_loader import outline_of, weight_bytes
from common.errors import ConfigError, ModelLoadError

PROCESS_BYTES = 390 << 20  # of a rank on a CPU, beside its weights and KV cache
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MIB = 1 << 20


class StageSizes(NamedTuple):
    """Bytes of a rank of one stage."""

    weights: int
    kv_per_token: int


class RankSizes(NamedTuple):
    """The memory that ranks take, by how many there are."""

    parallel: ParallelConfig
    stages: list[StageSizes]

    @property
    def weights(self) -> int:
        """Bytes, of the rank that has most."""
        return max(each.weights for each in self.stages)

    @property
    def kv_per_token(self) -> int:
        """Bytes, of the rank that has most."""
        return max(each.kv_per_token for each in self.stages)

    @property
    def least(self) -> int:
        """Bytes without a KV cache."""
        return self.weights + PROCESS_BYTES

    def num_tokens(self, memory: int) -> int:
        """Tokens whose KV fits into what such a memory has left on each rank; below 1 if one does not fit."""
        return min((memory - each.weights - PROCESS_BYTES) // each.kv_per_token for each in self.stages)


class RankTable(NamedTuple):
    """Degrees of one model."""

    model: str
    dtype: str
    kv_dtype: str
    is_quantized: bool  # whether weights take less than `sizes` say
    handoff_per_token: int  # bytes, whatever the ranks of both pods
    sizes: list[RankSizes]
    refused: dict[int, str]  # why a model cannot have so many ranks

    def fewest(self, memory: int) -> RankSizes | None:
        """The fewest ranks that fit such a memory each, with KV for some tokens."""
        return next((each for each in self.sizes if each.num_tokens(memory) > 0), None)


def rank_table(
    model: str,
    degrees: Sequence[int],
    dtype: str | None,
    *,
    pipeline_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    kv_cache_dtype: KVCacheDType = "auto",
) -> RankTable:
    """Sizes by number of ranks in each stage. Reads the model's configuration only, and takes weights for as large as
    `dtype` says, though a checkpoint be quantised. Raises ConfigError if there is no configuration, the KV is not of
    that type, or the model cannot have any of the degrees."""
    config = _config_of(model)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    unknown = ("linear", "indexed") if _has_latents(text) else ("linear",)
    if not all(each.endswith("attention") and not each.startswith(unknown) for each in kinds):
        raise ConfigError(f"{model}: its KV cache is not one of heads, and is not known here", param="model")
    own = getattr(text, "dtype", None)
    name = dtype or str(own or torch.float32).removeprefix("torch.")
    if kv_cache_dtype != "auto" and _has_latents(text):
        raise ConfigError.of("kv_cache_dtype", f"{kv_cache_dtype}, but {model} keeps latents, which are not quantised")
    kind, kv_dtype = DTYPES[name], QUANTIZED_KV.get(kv_cache_dtype, name)
    has_text_head = read_checkpoint(Path(model), config.to_dict(), config).has_text_head
    whole = _kv_per_token(text, heads_of(config, 1), kv_dtype, text.num_hidden_layers)
    sizes, refused = [], {}
    for degree in degrees:
        try:
            parallel = ParallelConfig(
                tensor_parallel_size=degree,
                pipeline_parallel_size=pipeline_parallel_size,
                enable_expert_parallel=enable_expert_parallel,
            )
            sizes.append(_sizes_of(config, text, kind, kv_dtype, parallel, has_text_head=has_text_head))
        except (ConfigError, ValueError) as error:  # the latter from settings that exclude each other
            refused[degree] = str(error)
    if not sizes:
        raise ConfigError("; ".join(dict.fromkeys(refused.values())))
    method = getattr(config, "quantization_config", None)
    return RankTable(model, name, kv_dtype, method is not None, whole, sizes, refused)


def _sizes_of(
    config: Any, text: Any, dtype: torch.dtype, kv_dtype: str, parallel: ParallelConfig, *, has_text_head: bool
) -> RankSizes:
    size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    heads, experts = heads_of(config, size), Place(0, size) if parallel.enable_expert_parallel else None
    stages = []
    for stage in range(num_stages):
        place = Place(stage, num_stages)
        outline = outline_of(config, dtype, Place(0, size), experts, place, has_text_head=has_text_head)
        kv_per_token = _kv_per_token(text, heads, kv_dtype, len(outline.stage.layers))
        stages.append(StageSizes(weight_bytes(outline), kv_per_token))
    return RankSizes(parallel, stages)


def _kv_per_token(text: Any, heads: Heads, dtype: str, num_layers: int) -> int:
    itemsize = getattr(torch, dtype).itemsize
    if _has_latents(text):
        return int(num_layers * (text.kv_lora_rank + text.qk_rope_head_dim) * itemsize)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads.num_heads
    return int(2 * num_layers * heads.kv_of_rank * row_numbers_of(dtype, head_dim) * itemsize)


def _has_latents(text: Any) -> bool:
    return bool(getattr(text, "kv_lora_rank", None))


def _config_of(model: str) -> Any:
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelLoadError(f"{model}: {reason}", param="model") from error


def describe_ranks(table: RankTable, memory: int, block_size: int) -> str:
    """A line for each degree, and how many ranks it takes. Raises ConfigError for a memory that holds no rank's weights
    and no block, as of a size without its unit."""
    least = min(max(each.weights, each.kv_per_token * block_size) for each in table.sizes)
    if memory < least:
        reason = (
            f"{memory:,} bytes hold neither weights nor a block of any rank, which takes {least:,}; units are GB, GiB"
        )
        raise ConfigError.of("memory", reason)
    return "\n".join(_lines(table, memory, block_size))


def _lines(table: RankTable, memory: int, block_size: int) -> Iterator[str]:
    kv = f", KV in {table.kv_dtype}" if table.kv_dtype != table.dtype else ""
    yield f"model   {table.model}, {table.dtype}{kv}, {memory / _MIB:,.0f} MiB for each rank"
    if table.is_quantized:
        yield "        its checkpoint is quantised: weights take less than this table says"
    yield ""
    yield "ranks  weights of a rank  with process  KV of a token  of a block  tokens that fit"
    for each in table.sizes:
        fitting = each.num_tokens(memory)
        yield (
            f"{_ranks(each.parallel):>5}  {each.weights / _MIB:>13,.0f} MiB  {each.least / _MIB:>8,.0f} MiB"
            f"  {each.kv_per_token:>11,} B  {each.kv_per_token * block_size:>8,} B"
            f"  {f'{fitting:,}' if fitting > 0 else 'too small':>15}"
        )
    for degree, reason in table.refused.items():
        yield f"{degree:>5}  refused: {reason}"
    yield ""
    fewest = table.fewest(memory)
    if fewest is None:
        yield "No number of ranks that was tried fits."
    else:
        yield f"It takes {fewest.parallel.num_ranks} rank{'s' if fewest.parallel.num_ranks > 1 else ''}."
    yield f"A handoff moves {table.handoff_per_token:,} B for each token of the prompt, whatever the ranks."


def _ranks(parallel: ParallelConfig) -> str:
    """ "4", or "4x2" of two stages."""
    stages = parallel.pipeline_parallel_size
    return f"{parallel.tensor_parallel_size}x{stages}" if stages > 1 else str(parallel.tensor_parallel_size)
