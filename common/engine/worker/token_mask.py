"""Masks of tokens on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.engine.devices.base import Memory


class TokenMask:
    """Tokens that some rows of a batch allow."""

    def __init__(self, rows: Sequence[int], words: npt.NDArray[np.int32], memory: Memory) -> None:
        """`words` [rows, words]: see `common.engine.contract.masks`. `memory` is that of the logits."""
        self._rows = rows
        self._words = words
        self._memory = memory

    def apply(self, logits: torch.Tensor) -> None:
        """Excludes other tokens from `logits` [batch, vocabulary], in place, on their device."""
        allowed = self._memory.unpack_bits(self._words, logits.shape[1])
        if len(self._rows) == len(logits):
            logits.masked_fill_(~allowed, -torch.inf)
        else:
            index = torch.tensor(self._rows, dtype=torch.int64).to(logits.device)
            logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)
