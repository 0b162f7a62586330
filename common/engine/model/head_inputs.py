"""The final hidden states of a model on their way to its head, some of which are wanted as they are."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


class HeadInputs:
    """Called with the hidden states [rows, size] of a forward pass, after the last norm; returns those that the head
    multiplies, and keeps the others."""

    def __init__(self) -> None:
        self._num_logits: int | None = None
        self._kept = torch.empty(0)

    def keep_after(self, num_logits: int) -> None:
        """The head gets the first `num_logits` rows of the next forward pass only."""
        self._num_logits = num_logits

    def take(self) -> torch.Tensor:
        """Returns the other rows, [rows, size] in float32."""
        kept, self._kept = self._kept, torch.empty(0)
        return kept

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the rows for the head."""
        num_logits, self._num_logits = self._num_logits, None
        if num_logits is None:
            return hidden
        self._kept = hidden[num_logits:].float().clone()  # the memory of `hidden` may be the next step's
        return hidden[:num_logits]

    def watch(self, model: Any) -> None:
        """From now on, takes the rows on their way to the head of a transformers model."""
        head = model.get_output_embeddings()
        replace_head(model, _WatchedHead(head, self))


class _WatchedHead(nn.Module):
    """Not a hook: some linear layers do without what calls hooks."""

    def __init__(self, head: nn.Module, inputs: HeadInputs) -> None:
        super().__init__()
        self.head = head
        self._inputs = inputs

    @property
    def weight(self) -> torch.Tensor:
        """The head's, for whose type the code of some models asks."""
        return cast("torch.Tensor", self.head.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, rows, size] -> [1, rows, vocabulary], of the rows for the head."""
        found: torch.Tensor = self.head(self._inputs(hidden[0])[None])
        return found


def replace_head(model: Any, head: nn.Module) -> str:
    """Puts `head` in the place of the model's. Returns the name of that place."""
    own = model.get_output_embeddings()
    name: str = next(name for name, module in model.named_modules() if module is own)
    model.set_submodule(name, head)
    return name
