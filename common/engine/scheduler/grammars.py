"""The interface between the scheduler and the compiling of grammars, which takes place beside the step loop.
Implemented by `common.engine.grammar.compiler.GrammarCompiler`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from common.engine.contract.masks import RequestGrammar
from common.engine.scheduler.request import Request
from common.errors import BatonError, InvalidRequestError


class GrammarAnswer(NamedTuple):
    """Answer to `ask`, for a request that has not ended."""

    request: Request
    result: RequestGrammar | BatonError


class Grammars(Protocol):
    """Called on the scheduler's thread; every call returns at once."""

    def ask(self, request: Request) -> RequestGrammar | None:
        """Returns the grammar of a request that has a constraint. None: it is being compiled, and `collect` answers.
        Raises InvalidRequestError if it is known to be impossible, OverloadedError if too many are being compiled."""

    def withdraw(self, request: Request) -> None:
        """The request has ended: it no longer waits for its grammar."""

    def collect(self) -> Sequence[GrammarAnswer]:
        """Returns what was compiled, or not, since the last call."""

    @property
    def has_events(self) -> bool:
        """Whether `collect` would do something."""


class NoGrammars:
    """Grammars of an engine that cannot constrain output."""

    has_events = False

    def ask(self, request: Request) -> RequestGrammar | None:
        """See Grammars."""
        raise InvalidRequestError("this engine cannot constrain output", param="structured_outputs")

    def withdraw(self, request: Request) -> None:
        """See Grammars."""

    def collect(self) -> Sequence[GrammarAnswer]:
        """See Grammars."""
        return ()
