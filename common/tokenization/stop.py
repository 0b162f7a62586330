"""Stop strings over a text that arrives in pieces."""

from __future__ import annotations

import functools
from array import array
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
    is held back. Takes time linear in the text, for each stop string.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """`is_included`: the stop string is part of the text. Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._is_included = is_included
        self._held = ""

    def push(self, piece: str) -> StopResult:
        """Takes the next piece of text. Must not be called again after it has stopped."""
        if not self._matchers:
            return StopResult(piece)
        ends = [(end, end - len(matcher.stop)) for matcher in self._matchers if (end := matcher.push(piece))]
        text = self._held + piece
        if ends:
            end, start = (len(self._held) + at for at in min(ends))
            self._held = ""
            return StopResult(text[: end if self._is_included else start], text[start:end])
        out = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[out:]
        return StopResult(text[:out])

    def finish(self) -> str:
        """Returns the text held back. Called at the end."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Looks for one stop string, as Knuth, Morris and Pratt do."""

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # characters of it with which the text ends
        self._borders = _borders(stop)

    def push(self, piece: str) -> int:
        """Returns how many characters of the piece it takes to complete the stop string; 0: it is not complete."""
        stop, borders, num_matched = self.stop, self._borders, self.num_matched
        at = 0
        while at < len(piece):
            if not num_matched:
                at = piece.find(stop[0], at)
                if at < 0:
                    break
            while num_matched and piece[at] != stop[num_matched]:
                num_matched = borders[num_matched - 1]
            num_matched += piece[at] == stop[num_matched]
            at += 1
            if num_matched == len(stop):
                return at
        self.num_matched = num_matched
        return 0


@functools.lru_cache(maxsize=256)
def _borders(stop: str) -> Sequence[int]:
    """Returns for each beginning of `stop` the length of its longest end that `stop` begins with, but for the whole."""
    borders = array("L", [0])
    length = 0
    for character in stop[1:]:
        while length and character != stop[length]:
            length = borders[length - 1]
        length += character == stop[length]
        borders.append(length)
    return borders
