"""What each rank of a model takes, by how many there are: `baton plan ranks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from common.engine.model.parallel_plan import Heads, Place, heads_of
from common.engine.model.rank_loader import outline_of, weight_bytes
from common.errors import ConfigError, ModelLoadError

PROCESS_BYTES = 426 << 20  # of a rank on a CPU, beside its weights and KV cache
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MIB = 1 << 20


class RankSizes(NamedTuple):
    """Bytes, of one of `num_ranks`."""

    num_ranks: int
    weights: int
    kv_per_token: int

    @property
    def least(self) -> int:
        """Without a KV cache."""
        return self.weights + PROCESS_BYTES

    def num_tokens(self, memory: int) -> int:
        """Tokens whose KV fits into what such a memory has left; below 1 if the rank does not fit."""
        return (memory - self.least) // self.kv_per_token


class RankTable(NamedTuple):
    """Degrees of one model."""

    model: str
    dtype: str
    handoff_per_token: int  # bytes, whatever the ranks of both pods
    sizes: list[RankSizes]
    refused: dict[int, str]  # why a model cannot have so many ranks

    def fewest(self, memory: int) -> RankSizes | None:
        """The fewest ranks that fit such a memory each, with KV for some tokens."""
        return next((each for each in self.sizes if each.num_tokens(memory) > 0), None)


def rank_table(model: str, degrees: Sequence[int], dtype: str | None) -> RankTable:
    """Sizes by number of ranks. Reads the model's configuration only. Raises ConfigError if there is none, or the model
    cannot have one of several degrees, or the only one that is asked for."""
    config = _config_of(model)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    if getattr(text, "kv_lora_rank", None) or not all(
        each.endswith("attention") and "linear" not in each for each in kinds
    ):
        raise ConfigError(f"{model}: its KV cache is not one of heads, and is not known here", param="model")
    own = getattr(text, "dtype", None)
    name = dtype or str(own or torch.float32).removeprefix("torch.")
    kind = DTYPES[name]
    whole = _kv_per_token(text, heads_of(config, 1), kind)
    sizes, refused = [], {}
    for degree in degrees:
        try:
            sizes.append(_sizes_of(config, text, kind, degree))
        except ConfigError as error:
            if len(degrees) == 1:
                raise
            refused[degree] = error.message
    return RankTable(model, name, whole, sizes, refused)


def _sizes_of(config: Any, text: Any, dtype: torch.dtype, degree: int) -> RankSizes:
    kv_per_token = _kv_per_token(text, heads_of(config, degree), dtype)
    return RankSizes(degree, weight_bytes(outline_of(config, dtype, Place(0, degree))), kv_per_token)


def _kv_per_token(text: Any, heads: Heads, dtype: torch.dtype) -> int:
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads.num_heads
    return int(2 * text.num_hidden_layers * heads.kv_of_rank * head_dim * dtype.itemsize)


def _config_of(model: str) -> Any:
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelLoadError(f"{model}: {reason}", param="model") from error


def describe_ranks(table: RankTable, memory: int, block_size: int) -> str:
    """A line for each degree, and how many ranks it takes."""
    return "\n".join(_lines(table, memory, block_size))


def _lines(table: RankTable, memory: int, block_size: int) -> Iterator[str]:
    yield f"model   {table.model}, {table.dtype}, {memory / _MIB:,.0f} MiB for each rank"
    yield ""
    yield "ranks  weights of a rank  with process  KV of a token  of a block  tokens that fit"
    for each in table.sizes:
        fitting = each.num_tokens(memory)
        yield (
            f"{each.num_ranks:>5}  {each.weights / _MIB:>13,.0f} MiB  {each.least / _MIB:>8,.0f} MiB"
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
        yield f"It takes {fewest.num_ranks} rank{'s' if fewest.num_ranks > 1 else ''}."
    yield f"A handoff moves {table.handoff_per_token:,} B for each token of the prompt, whatever the ranks."
