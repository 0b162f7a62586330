"""Bounds the cardinality of a metric's label whose values come from peers: each value is a time series that stays."""

from __future__ import annotations

import re

_MAX_VALUES = 64
_WORD = re.compile(r"[a-z_]{1,40}")
_OTHER = "other"


class BoundedLabels:
    """The values of one label."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def value_of(self, word: str) -> str:
        """Returns the value, or "other" if it is invalid or there are too many."""
        if word not in self._known:
            if len(self._known) >= _MAX_VALUES or not _WORD.fullmatch(word):
                return _OTHER
            self._known.add(word)
        return word
