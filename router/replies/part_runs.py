"""Answers as runs of parts of one kind, which some APIs stream as items of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from router.replies.reply import Call, Part, Reasoning, Text

Run = Text | Reasoning | Call
"""All text, or all reasoning, up to the next part of another kind; or one call."""


def runs_of(parts: Sequence[Part]) -> Iterator[Run]:
    """The parts of a whole answer, joined where they belong together."""
    for kind, run in groupby(parts, type):
        if kind is Text:
            yield Text("".join(part.text for part in run if isinstance(part, Text)))
        elif kind is Reasoning:
            yield Reasoning("".join(part.text for part in run if isinstance(part, Reasoning)))
        else:
            yield from run
