"""The model that both sides serve: that of 100M parameters of `benchmarks.engine`, with a tokenizer for the router."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import WordLevel

from benchmarks.engine import make_100m_model
from common.demo_model import demo_model_path

_COPIES = 50


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

    def copy_time(self, num_tokens: int) -> float:
        """Seconds in which memory takes the KV of so many tokens from one place to another and back."""
        source = bytes(num_tokens * self.kv_bytes_per_token)
        target = bytearray(source)
        times = []
        for _ in range(_COPIES):
            started = time.perf_counter()
            target[:] = source
            times.append(time.perf_counter() - started)
        return 2 * statistics.median(times)


def demo_model() -> Model:
    """The one that ships with Baton."""
    return Model.read(demo_model_path())


def make_model(parent: Path) -> Model:
    """100M parameters, random; each token has a text of its own, so that each is an event of its own."""
    directory = make_100m_model(parent)
    model = Model.read(directory)
    words = {f"<{token_id}>": token_id for token_id in range(model.vocab_size)}
    tokenizers.Tokenizer(WordLevel(words, unk_token="<0>")).save(str(directory / "tokenizer.json"))  # noqa: S106
    return model
