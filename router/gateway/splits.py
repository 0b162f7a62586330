"""What tells reasoning from the answer proper, as an answer's text comes. Where the text is cut makes no difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Split(NamedTuple):
    """What a piece of an answer adds, in this order."""

    reasoning: str
    rest: str
    is_cut: bool = False  # a tag stands before `rest`: white space beside it does not count


class Splitter(Protocol):
    """Splits one answer."""

    def push(self, text: str) -> list[Split]:
        """Takes the next piece."""

    def finish(self) -> list[Split]:
        """The answer has ended. Returns the rest."""

    def count(self, offsets: Sequence[int]) -> int:
        """Takes where in the answer the next tokens begin. Returns how many tokens, of these and of earlier ones that
        were not certain, are reasoning, tags included. Called after `push` and `finish`."""
