"""The models that benchmarks serve: the one that ships with Baton, and random ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from tokenizers.models import BPE, WordLevel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from common.demo_model import demo_model_path


class Shape(NamedTuple):
    """The sizes of a Qwen3, or of a Qwen3-MoE."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_tied_embeddings: bool
    dtype: torch.dtype
    num_experts: int = 0  # of intermediate_size each; 0: no mixture
    num_experts_per_token: int = 0


SHAPES = {
    "100M": Shape(32000, 768, 2048, 12, 12, 4, 64, True, torch.float32),
    "60M": Shape(151936, 320, 960, 8, 5, 5, 64, True, torch.bfloat16),  # a tenth of the next
    "264M, 32 experts": Shape(32000, 768, 384, 8, 12, 4, 64, True, torch.float32, 32, 4),
    "0.6B": Shape(151936, 1024, 3072, 28, 16, 8, 128, True, torch.bfloat16),
    "8B": Shape(151936, 4096, 12288, 36, 32, 8, 128, False, torch.bfloat16),
    "much KV": Shape(1000, 128, 256, 8, 32, 32, 128, True, torch.float32),  # and little to compute
}


def make_random_model(parent: Path, name: str, max_tokens: int = 4096) -> Path:
    """Returns the directory of a random Qwen3 of one of the SHAPES; written below `parent` if it is not there yet."""
    directory = parent / f"qwen3-{name.lower().replace(',', '').replace(' ', '-')}"
    if directory.exists():
        return directory
    shape = SHAPES[name]
    mixture = {
        "moe_intermediate_size": shape.intermediate_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_token,
        "norm_topk_prob": True,
    }
    config = (Qwen3MoeConfig if shape.num_experts else Qwen3Config)(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=shape.has_tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        **(mixture if shape.num_experts else {}),
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
    model.save_pretrained(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A tokenizer for a model that has none: bytes, and pairs and triples of them."""
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = [char for char in alphabet if char.isascii()]
    spellings = itertools.chain(
        alphabet, map("".join, itertools.product(letters, repeat=2)), map("".join, itertools.product(letters, repeat=3))
    )
    vocab = {spelling: index for index, spelling in enumerate(itertools.islice(spellings, vocab_size))}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@dataclass(frozen=True, slots=True)
class Model:
    """A directory that pods and routers can load."""

    directory: Path
    vocab_size: int
    kv_bytes_per_token: int  # in float32

    @classmethod
    def read(cls, directory: Path) -> Model:
        """Takes the figures from the model's configuration."""
        config: Mapping[str, Any] = json.loads((directory / "config.json").read_bytes())
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        kv_size = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
        return cls(directory, config["vocab_size"], 4 * kv_size)

    @property
    def name(self) -> str:
        """Its name in the API."""
        return self.directory.name


def demo_model() -> Model:
    """Returns the one that ships with Baton."""
    return Model.read(demo_model_path())


def make_served_model(parent: Path) -> Model:
    """Returns one of 100M parameters, random; each token has a text of its own, so that each is an event of its own."""
    directory = make_random_model(parent, "100M")
    model = Model.read(directory)
    words = {f"<{token_id}>": token_id for token_id in range(model.vocab_size)}
    tokenizers.Tokenizer(WordLevel(words, unk_token="<0>")).save(str(directory / "tokenizer.json"))  # noqa: S106
    return model
