"""Stop strings over a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """The result of a piece."""

    text: str  # to be sent now
    stop: str = ""  # the stop string that is complete; all that follows it is dropped

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete."""
        return bool(self.stop)


class StopChecker:
    """Finds the first stop string to be complete, however the text is cut into pieces.

    Of two that end at the same character, the one that starts first counts. Only a possible beginning of a stop string
    is held back.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """`is_included`: the stop string is part of the text. Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._is_included = is_included
        self._held = ""

    def push(self, piece: str) -> StopResult:
        """Takes the next piece of text. Must not be called again after it has stopped."""
        if not self._stops:
            return StopResult(piece)
        text = self._held + piece
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            end, start = min(matches)
            return StopResult(text[: end if self._is_included else start], text[start:end])
        out = len(text) - self._longest_beginning(text)
        self._held = text[out:]
        return StopResult(text[:out])

    def finish(self) -> str:
        """Returns the text held back. Called at the end."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0:
                if stop.startswith(text[start:]):
                    longest = max(longest, len(text) - start)
                    break
                start = text.find(stop[0], start + 1)
        return longest
