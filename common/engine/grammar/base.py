"""The interface to a library that constrains output."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.types import Constraint

BITS = 32  # tokens in a word of a mask; token t is bit t % 32 of word t // 32


class Vocabulary(NamedTuple):
    """The tokens of a model."""

    token_bytes: tuple[bytes, ...]  # by token id; empty: never allowed, as special and unused tokens are
    eos_token_ids: frozenset[int]

    @property
    def size(self) -> int:
        """Tokens that the model has logits for."""
        return len(self.token_bytes)

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-self.size // BITS)


class Matcher(Protocol):
    """Follows one answer. Used by the step loop's thread, once per token."""

    def accept(self, token_id: int) -> bool:
        """Takes the next token. False: the grammar does not allow it, and the matcher is of no more use."""

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Writes the tokens that may come next into `mask` [words]. End-of-sequence tokens are among them where the
        answer may end; after one of these, no token is."""


class CompiledGrammar(Protocol):
    """A grammar over one vocabulary. Immutable; shared by the requests of the same constraint."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, roughly."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""


class GrammarBackend(Protocol):
    """A library over one vocabulary. May be called from several threads; compiling does not hold the GIL."""

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises InvalidRequestError that says what is wrong with the constraint, and where."""
