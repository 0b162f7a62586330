"""Masks of tokens on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.masks import BITS


class TokenMask:
    """Tokens that some rows of a batch allow."""

    def __init__(self, rows: Sequence[int], words: npt.NDArray[np.int32]) -> None:
        """`words` [rows, words]: see `common.engine.contract.masks`."""
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
