"""Words of peers as values of a metric's label: bounded, as each value is a time series that stays."""

from __future__ import annotations

import re

_MAX_VALUES = 64
_WORD = re.compile(r"[a-z_]{1,40}")
_OTHER = "other"


class BoundedLabels:
    """Of one label."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def value_of(self, word: str) -> str:
        """The word, or "other" if it is none or there are too many."""
        if word not in self._known:
            if len(self._known) >= _MAX_VALUES or not _WORD.fullmatch(word):
                return _OTHER
            self._known.add(word)
        return word
