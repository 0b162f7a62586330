"""The vocabulary of a model, read from its tokenizer."""

from __future__ import annotations

from pathlib import Path

from common.engine.grammar.base import Vocabulary
from common.errors import ConfigError, InvalidRequestError
from common.tokenization import Tokenizer


def load_vocabulary(directory: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    """Raises InvalidRequestError if the model has no tokenizer: then no request can be constrained."""
    try:
        tokenizer = Tokenizer.from_directory(directory)
    except ConfigError as error:
        raise InvalidRequestError(f"structured output needs the model's tokenizer: {error.message}") from error
    special = tokenizer.special_ids
    return Vocabulary(
        tuple(b"" if token_id in special else tokenizer.token_bytes(token_id) for token_id in range(vocab_size)),
        eos_token_ids,
    )
