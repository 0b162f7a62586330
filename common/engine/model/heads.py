"""What heads have in common: small networks that predict a model's tokens from its own hidden states.

At each place a head takes the embedding of the next token and the place's *feature*, which comes from what the model
has computed there. It predicts the token after the next. Where the model has computed no feature yet, the head's own
output of the place before stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from common.engine.model.hidden_states import HiddenStates
from common.engine.model.loader import LoadedModel
from common.engine.model.stages import Stage


class HeadModule(nn.Module):
    """Called as a transformers model; its inputs are embeddings and features [1, tokens, sizes of both]."""

    def __init__(self, embedding_size: int, feature_size: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding_size = embedding_size
        self.feature_size = feature_size
        self.vocab_size = vocab_size
        self.embed_tokens: nn.Embedding | None = None
        self._outputs = torch.empty(0)

    def keep_outputs(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """From now on the outputs of up to so many tokens are kept, always in the same place."""
        self._outputs = torch.zeros((num_tokens, self.feature_size), dtype=dtype, device=device)

    def outputs(self, index: torch.Tensor) -> torch.Tensor:
        """Of these tokens of the last call, before the norm: what stands for features of the next places."""
        return self._outputs[index]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, embedding size]"""
        assert self.embed_tokens is not None
        return functional.embedding(token_ids, self.embed_tokens.weight)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Features [tokens, feature size] of what the model has kept."""
        return states

    def share_embedding(self, target: LoadedModel) -> bool:
        """Takes the model's own embedding, unless the head came with one. False if that is cut."""
        if self.embed_tokens is None:
            embedding = target.model.get_input_embeddings()
            if not isinstance(embedding, nn.Embedding) or len(embedding.weight) < self.vocab_size:
                return False
            self.embed_tokens = embedding
        return True

    def _take(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and features."""
        return inputs[..., : self.embedding_size], inputs[..., self.embedding_size :]

    def _pass_on(self, hidden: torch.Tensor) -> None:
        """Keeps the outputs [1, tokens, feature size]."""
        self._outputs[: hidden.shape[1]] = hidden[0]


class LoadedHead(NamedTuple):
    """A head that was loaded before its model."""

    module: HeadModule
    loaded: LoadedModel  # the head, as a model that takes hidden states
    keep_states: Callable[[LoadedModel, int], HiddenStates]  # of the model; see HiddenStates
    depth: int  # most drafts

    def keep_inputs(self, target: LoadedModel, num_tokens: int) -> HiddenStates:
        """From now on the model keeps what the head needs, of steps of up to so many tokens."""
        self.module.keep_outputs(num_tokens, self.loaded.dtype, self.loaded.device.torch_device)
        return self.keep_states(target, num_tokens)


def stage_of_head(module: HeadModule) -> Stage:
    """Of a model whose inputs are hidden states, and that has one layer."""
    return Stage([range(0), range(1)], 1, module.embedding_size + module.feature_size)
