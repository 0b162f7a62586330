"""Latent attention (DeepSeek-V2, arXiv:2405.04434), whose KV stays compressed: of a token, a latent is cached, of which
keys and values of all heads are linear functions, and the rotary part that all keys share.

transformers' modules of this kind expand latents in a method of their own, `expand_kv`, right before they attend. Here
it passes them on as they are, and attention gets the matrix that expands them (`LatentExpansion`). The matrix is what
the method makes of unit vectors, so that it holds of quantised and packed layers, and of a rank's part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from common.engine.devices.attention import LatentExpansion
from common.engine.model.attention_hook import own_heads_of, set_expansion

_NUM_CHECKED = 8  # tokens
_MAX_RELATIVE_ERROR = 0.1  # that of layers that quantise what they get

_Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Latents:
    """The modules of a model that have been changed to keep latents; none, if one of them cannot."""

    def __init__(self, model: nn.Module) -> None:
        found: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
        expansions = [expansion for module in found if (expansion := _expansion(module)) is not None]
        self._modules: list[Any] = []
        if len(expansions) != len(found):
            return
        for module, expansion in zip(found, expansions, strict=True):
            heads = own_heads_of(module)
            own = expansion if heads is None else expansion._replace(weight=heads.take(expansion.weight, 0))
            set_expansion(module, own)
            self._modules.append(module)
            module.expand_kv = partial(_expand_if_eager, module, module.expand_kv)

    def __len__(self) -> int:
        return len(self._modules)

    def undo(self) -> None:
        """Lets the modules expand what they keep, as their own code does."""
        for module in self._modules:
            del module.expand_kv
            set_expansion(module, None)

    def settle(self) -> None:
        """Drops the layers that are not needed any more."""
        for module in self._modules:
            module.expand_kv = _as_they_are
            module.kv_b_proj = None


def _expand_if_eager(
    module: Any, own: _Expand, latents: torch.Tensor, rotary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return own(latents, rotary) if module.config._attn_implementation == "eager" else (latents, rotary)  # noqa: SLF001


def _as_they_are(latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotary


@torch.inference_mode()
def _expansion(module: Any) -> LatentExpansion | None:
    """The matrix of all heads that the module has; None if what it computes is not that."""
    norm = module.kv_a_layernorm.weight
    rank, rotary_dim = int(module.kv_lora_rank), int(module.qk_rope_head_dim)
    units = torch.eye(rank, dtype=norm.dtype, device=norm.device)[None, None]
    keys, values = module.expand_kv(units, units.new_zeros(1, 1, rank, rotary_dim))
    key_dim = keys.shape[3] - rotary_dim
    weight = torch.cat([keys[0, :, :, :key_dim], values[0]], dim=2).transpose(1, 2).contiguous()
    expansion = LatentExpansion(weight, key_dim)
    cached = torch.randn(_NUM_CHECKED, rank + rotary_dim, generator=torch.Generator().manual_seed(0)).to(norm)
    expected = module.expand_kv(cached[None, None, :, :rank], cached[None, None, :, rank:])
    for found, wanted in zip(expansion.expand(cached), expected, strict=True):
        if not (found - wanted[0]).norm() <= _MAX_RELATIVE_ERROR * wanted.norm():  # also of NaN
            return None
    return expansion
