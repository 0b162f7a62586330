"""Markers in text that comes in pieces."""

from __future__ import annotations

SPACES = " \t\r\n"


def overlap_of(text: str, marker: str) -> int:
    """Length of the longest end of `text` that a `marker` may begin with, but for a whole one."""
    if marker[0] not in text[1 - len(marker) :]:
        return 0
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
