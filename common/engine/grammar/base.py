"""The interfaces to a library that constrains output, and to the processes that use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.engine.contract.masks import BITS
from common.engine.grammar.processes import GrammarProcess
from common.types import Constraint


class Vocabulary(NamedTuple):
    """The tokens of a model."""

    token_bytes: tuple[bytes, ...]  # by token id; empty: never allowed, as special and unused tokens are
    eos_token_ids: frozenset[int]

    @property
    def size(self) -> int:
        """Tokens that the model has logits for."""
        return len(self.token_bytes)

    def may_be_allowed(self, token_id: int) -> bool:
        """Whether a grammar may allow the token."""
        return bool(self.token_bytes[token_id]) or token_id in self.eos_token_ids

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-self.size // BITS)


class Matcher(Protocol):
    """Follows one answer, in the grammar's process."""

    def accept(self, token_id: int) -> bool:
        """Takes the next token. False: the grammar does not allow it, and the matcher is of no more use."""

    def rollback(self, num_tokens: int) -> None:
        """Gives up the last tokens that were accepted."""

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Writes the tokens that may come next into `mask` [words]. End-of-sequence tokens are among them where the
        answer may end; after one of these, no token is. Raises RuntimeError if the library gives up."""


class CompiledGrammar(Protocol):
    """A grammar over one vocabulary. Immutable; shared by the requests of the same constraint."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""


class GrammarBackend(Protocol):
    """A library over one vocabulary."""

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises InvalidRequestError that says what is wrong with the constraint, and where."""


class GrammarKey(NamedTuple):
    """The key of a compiled grammar. Tenants share none: neither its process nor, by the time that compiling takes, the
    knowledge that another one uses it."""

    tenant: str
    constraint: Constraint


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """The grammar of one request. Used on the step loop's thread."""

    constraint: Constraint
    tenant: str
    source: ProcessSource

    @property
    def key(self) -> GrammarKey:
        """The key that it shares with the grammars of equal requests."""
        return GrammarKey(self.tenant, self.constraint)

    def process(self) -> GrammarProcess | None:
        """Returns a process that has the grammar, which is the request's until `release`. None: not yet; ask again.
        Raises GrammarTooSlowError or InvalidRequestError if it cannot be compiled."""
        return self.source.acquire(self)

    def release(self) -> None:
        """The request needs no process any more. Idempotent."""
        self.source.release(self)


class ProcessSource(Protocol):
    """Keeps the processes of grammars."""

    def acquire(self, grammar: Grammar) -> GrammarProcess | None:
        """See Grammar.process."""

    def release(self, grammar: Grammar) -> None:
        """See Grammar.release."""
