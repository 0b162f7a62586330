"""The matchers of the requests that a worker runs, and the masks of the tokens that they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.grammar.base import BITS, Matcher
from common.engine.scheduler.output import DeadEnd, NewRequest
from common.types import SamplingParams


@dataclass(slots=True)
class _Constrained:
    matcher: Matcher
    params: SamplingParams
    num_output_tokens: int
    is_lost: bool = False  # the output does not follow the grammar


class TokenMask:
    """Tokens that some rows of a batch allow."""

    def __init__(self, rows: Sequence[int], words: npt.NDArray[np.int32]) -> None:
        """`words` [rows, words]: see `common.engine.grammar.base`."""
        self._rows = rows
        self._words = words

    def apply(self, logits: torch.Tensor) -> None:
        """Excludes other tokens from `logits` [batch, vocabulary], in place, on their device."""
        allowed = self._unpacked(logits.device, logits.shape[1])
        if len(self._rows) == len(logits):
            logits.masked_fill_(~allowed, -torch.inf)
        else:
            index = torch.tensor(self._rows, dtype=torch.int64).to(logits.device)
            logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)

    def _unpacked(self, device: torch.device, vocab_size: int) -> torch.Tensor:
        """Whether each token is allowed, [rows, vocabulary]."""
        if device.type == "cpu":
            unpacked = np.unpackbits(self._words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(unpacked).view(torch.bool)
        words = torch.from_numpy(self._words).pin_memory().to(device, non_blocking=True)
        bits = (words[:, :, None] >> torch.arange(BITS, device=device, dtype=torch.int32)) & 1
        return bits.flatten(1)[:, :vocab_size].bool()


class Constraints:
    """By row of the request table; rows of requests without a grammar are not in it."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._num_words = -(-vocab_size // BITS)
        self._eos = np.zeros(self._num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            if token_id < vocab_size:
                self._eos.view(np.uint32)[token_id // BITS] |= np.uint32(1 << (token_id % BITS))
        self._by_row: dict[int, _Constrained] = {}

    def __len__(self) -> int:
        return len(self._by_row)

    def add(self, row: int, new: NewRequest) -> None:
        """Takes a request's grammar up, and follows the output that it has already."""
        if new.grammar is None:
            return
        outputs = new.token_ids[new.num_prompt_tokens :]
        entry = self._by_row[row] = _Constrained(new.grammar.matcher(), new.sampling, len(outputs))
        entry.is_lost = not all(entry.matcher.accept(token_id) for token_id in outputs)

    def drop(self, row: int) -> None:
        """Forgets a row. Idempotent."""
        self._by_row.pop(row, None)

    def has(self, row: int) -> bool:
        """Whether the row's request has a grammar."""
        return row in self._by_row

    def accept(self, row: int, token_id: int) -> None:
        """Takes a sampled token."""
        entry = self._by_row.get(row)
        if entry is not None:
            entry.num_output_tokens += 1
            entry.is_lost = entry.is_lost or not entry.matcher.accept(token_id)

    def mask(self, rows: Sequence[int]) -> tuple[TokenMask | None, dict[int, DeadEnd]]:
        """What rows of a batch allow next; and the positions, in `rows`, of those that allow nothing."""
        constrained = [(position, self._by_row[row]) for position, row in enumerate(rows) if row in self._by_row]
        if not constrained:
            return None, {}
        words = np.empty((len(constrained), self._num_words), dtype=np.int32)
        dead_ends: dict[int, DeadEnd] = {}
        for number, (position, entry) in enumerate(constrained):
            if entry.is_lost:
                dead_ends[position] = DeadEnd.MISMATCH
                words[number] = -1
                continue
            entry.matcher.fill(words[number])
            if entry.params.ignore_eos or entry.num_output_tokens < entry.params.min_tokens:
                words[number] &= ~self._eos
            if not words[number].any():
                dead_ends[position] = DeadEnd.COMPLETE
                words[number] = -1  # its token is not used
        return TokenMask([position for position, _ in constrained], words), dead_ends
