"""Positions of tokens in more than one dimension, as models of images have them (M-RoPE: time, height, width)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Positions of a prompt's tokens. Tokens after the prompt go on from the largest, one by one, in all dimensions."""

    values: list[list[int]]  # [dimensions][prompt tokens]
    delta: int  # position of a token after the prompt, less its index

    @classmethod
    def of(cls, values: Sequence[Sequence[int]]) -> PromptPositions:
        """Returns the positions of a prompt of at least one token."""
        return cls([list(each) for each in values], max(map(max, values)) + 1 - len(values[0]))

    def of_tokens(self, start: int, stop: int) -> list[list[int]]:
        """Positions [dimensions][tokens] of tokens [start, stop) of prompt and output."""
        num_prompt_tokens = len(self.values[0])
        later = range(max(start, num_prompt_tokens) + self.delta, stop + self.delta)
        return [[*each[start:stop], *later] for each in self.values]
