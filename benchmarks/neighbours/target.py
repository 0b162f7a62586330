"""The model under attack, as attacks need to know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from common.tokenization import Tokenizer

_LETTERS = "bcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?+-*/=()[]{}<>"


class Target(NamedTuple):
    """A served model."""

    model: str  # its name in the API
    context: int  # tokens
    vocab_size: int
    tokenizer: Tokenizer

    @classmethod
    def of(cls, name: str, directory: Path) -> Target:
        """The model of this directory."""
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_directory(directory)
        return cls(name, config["max_position_embeddings"], config["vocab_size"], tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def token_id(self, text: str) -> int:
        """The token of a text that is one. Raises ValueError."""
        (token_id,) = self.encode(text)
        return token_id

    @property
    def letters(self) -> list[str]:
        """Characters that are tokens."""
        return [letter for letter in _LETTERS if len(self.encode(letter)) == 1]
