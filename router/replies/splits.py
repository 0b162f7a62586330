"""Tells reasoning from the answer proper, as an answer's text comes. Where the text is cut makes no difference."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol


class Split(NamedTuple):
    """The gain of a piece of an answer, in this order."""

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


class UnsettledTokens:
    """Tokens that may be reasoning, by where in the answer their text begins. Any number of them may begin at the same
    place: tokens without text."""

    def __init__(self) -> None:
        self._runs: deque[tuple[int, int]] = deque()  # an offset, and how many tokens begin there

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, offsets: Sequence[int]) -> None:
        """The next tokens begin here."""
        for offset in offsets:
            num_before = self._runs.pop()[1] if self._runs and self._runs[-1][0] == offset else 0
            self._runs.append((offset, num_before + 1))

    def settle(self, end: int) -> Iterator[tuple[int, int]]:
        """Settles all before `end`. Gives the offsets there, and how many tokens begin at each."""
        while self._runs and self._runs[0][0] < end:
            yield self._runs.popleft()

    def clear(self) -> None:
        """The rest is certain, too: it is no reasoning."""
        self._runs.clear()
