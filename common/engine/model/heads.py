"""The base of heads: small networks that predict a model's tokens from its own hidden states.

At each place a head takes the embedding of the next token and the place's *feature*, which comes from what the model
has computed there. It predicts the token after the next. Where the model has computed no feature yet, the head's own
output of the place before stands for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from common.engine.config import Kernels
from common.engine.devices.attention import AttentionArgs, KVSpec
from common.engine.devices.base import Device
from common.engine.devices.ranks import OneRank
from common.engine.model.hidden_states import HiddenStates
from common.engine.model.kernel_choice import find_row_sampler
from common.engine.model.kv_groups import all_in_one
from common.engine.model.loader import LoadedModel
from common.engine.model.stages import Stage

logger = logging.getLogger(__name__)


class HeadModule(nn.Module):
    """Called as a transformers model; its inputs are embeddings and features [1, tokens, sizes of both]."""

    fuses_with: frozenset[str] = frozenset()  # children that `fuse` needs

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
        """Returns the outputs for these tokens of the last call, before the norm: they stand for features of the next
        places."""
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
    fingerprint: bytes  # of what makes its features what they are, beside the model

    @property
    def feature_bytes(self) -> int:
        """Bytes of a token's feature."""
        return self.module.feature_size * self.loaded.dtype.itemsize

    def without_layers(self) -> LoadedHead:
        """Returns what features need of it. The head itself can be used no longer."""
        for name in [name for name, _ in self.module.named_children() if name not in self.module.fuses_with]:
            setattr(self.module, name, None)
        return self._replace(loaded=replace(self.loaded, attention_modules=[]))

    def keep_outputs(self, num_tokens: int) -> None:
        """From now on the head keeps its outputs, of steps of up to so many tokens."""
        self.module.keep_outputs(num_tokens, self.loaded.dtype, self.loaded.device.torch_device)


class FoundAttention(NamedTuple):
    """The attention of a head's only layer."""

    spec: KVSpec
    num_heads: Sequence[int]
    args: Sequence[AttentionArgs]
    modules: list[nn.Module]


class Files(NamedTuple):
    """The files that a head was loaded from."""

    config: dict[str, Any]  # config.json
    weight_files: list[Path]
    directory: Path


def as_model(
    module: HeadModule, attention: FoundAttention, device: Device, max_model_len: int, files: Files
) -> LoadedModel:
    """The head as a model that takes hidden states, embeddings and features side by side."""
    dtype = attention.spec.dtype
    kernels: Kernels = "torch"
    try:
        if device.can_attend(attention.spec, attention.num_heads, attention.args):
            kernels = "attention"
        kernels_failed = False
    except Exception as error:  # noqa: BLE001  the kernels differ, or whatever a compiler raises
        logger.warning("the head uses torch's operators instead of compiled kernels: %s", error)
        kernels_failed = True
    row_sampler, sampler_failed = find_row_sampler(device, module.vocab_size, dtype)
    return LoadedModel(
        model=module,
        stage=Stage([range(0), range(1)], 1, module.embedding_size + module.feature_size),
        decoder=None,
        kernels=kernels,
        kernels_failed=kernels_failed or sampler_failed,
        row_sampler=row_sampler,
        step_sampler=device.step_sampler(kernels),
        rounding="",
        device=device,
        ranks=OneRank(),
        dtype=dtype,
        kv_groups=all_in_one(attention.spec, [None]),
        kv_spec=attention.spec,
        attention_modules=attention.modules,
        vocab_size=module.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
        config=files.config,
        weight_files=files.weight_files,
        directory=files.directory,
        layers_by_stage=(),
    )
