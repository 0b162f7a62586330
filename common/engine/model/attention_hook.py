"""Our attention as an attention implementation of transformers.

Importing this module registers `ATTENTION_NAME`; a model loaded with it calls `paged_attention` in every layer, which
passes on to the callable installed on that layer's module. No mask function is registered under the name, so
transformers builds no mask: the backend handles causality and sequence borders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionBackend, LatentExpansion
from common.engine.model.parallel_layers import OwnHeads

ATTENTION_NAME = "baton_paged"

_ATTRIBUTE = "baton_attention"
_OWN_HEADS = "baton_own_heads"
_EXPANSION = "baton_expansion"

LayerAttention = Callable[..., torch.Tensor]
"""(module, query, key, value, **arguments of the modelling code), tensors [1, heads, tokens, head_dim]
-> [1, tokens, heads, value head_dim]. Of a module with an expansion, keys and values are latents and rotary parts."""


def install(modules: Sequence[torch.nn.Module], backend: AttentionBackend) -> None:
    """Let the attention modules, in layer order, compute with `backend`."""
    for layer, module in enumerate(modules):
        set_layer_attention(module, _paged(layer, backend))


def set_layer_attention(module: torch.nn.Module, attention: LayerAttention) -> None:
    """Let one module compute its attention with `attention`."""
    object.__setattr__(module, _ATTRIBUTE, attention)


def clear_layer_attention(module: torch.nn.Module) -> None:
    """Undo `set_layer_attention`."""
    module.__dict__.pop(_ATTRIBUTE, None)


def set_own_heads(module: torch.nn.Module, heads: OwnHeads) -> None:
    """Let one module, which is given all heads, attend with those of a rank."""
    object.__setattr__(module, _OWN_HEADS, heads)


def own_heads_of(module: torch.nn.Module) -> OwnHeads | None:
    """Returns what `set_own_heads` has set."""
    found: OwnHeads | None = module.__dict__.get(_OWN_HEADS)
    return found


def set_expansion(module: torch.nn.Module, expansion: LatentExpansion | None) -> None:
    """Notes that one module gives latents to attention, and how they are expanded."""
    object.__setattr__(module, _EXPANSION, expansion)


def expansion_of(module: torch.nn.Module) -> LatentExpansion | None:
    """Returns what `set_expansion` has set."""
    found: LatentExpansion | None = module.__dict__.get(_EXPANSION)
    return found


def attention_args(
    head_dim: int,
    *,
    expansion: LatentExpansion | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **unused: Any,
) -> AttentionArgs:
    """A layer's constants, of the arguments that its modelling code passes."""
    scale = head_dim**-0.5 if scaling is None else scaling
    size = attention_chunk_size or sliding_window
    window = None if size is None else Window(size, is_chunked=attention_chunk_size is not None)
    return AttentionArgs(scale, window, softcap, s_aux, alibi_slopes, expansion)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a module as transformers calls it: queries, keys and values [1, heads, tokens, head_dim] -> [1,
    tokens, heads, value head_dim], and no weights."""
    attend: LayerAttention = module.__dict__[_ATTRIBUTE]
    heads = own_heads_of(module)
    if heads is None:
        return attend(module, query, key, value, **arguments), None
    if arguments.get("s_aux") is not None:
        arguments["s_aux"] = heads.take(arguments["s_aux"], 0)
    own = (heads.take(each, 1) for each in (query, key, value))
    return heads.collect(attend(module, *own, **arguments)), None


def _paged(layer: int, backend: AttentionBackend) -> LayerAttention:
    args_of_layer: AttentionArgs | None = None  # constants of the layer, as it gave them at its first call

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **arguments: Any,
    ) -> torch.Tensor:
        nonlocal args_of_layer
        if args_of_layer is None:
            args_of_layer = attention_args(query.shape[-1], expansion=expansion_of(module), **arguments)
        if args_of_layer.expansion is not None:
            cached = torch.cat([key, value], dim=-1).transpose(1, 2)
            return backend.attend(layer, query.transpose(1, 2), cached, cached[..., :0], args_of_layer)
        value_dim = value.shape[-1]
        padding = key.shape[-1] - value_dim
        if padding:
            value = functional.pad(value, (0, padding))
        # [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]
        out = backend.attend(layer, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), args_of_layer)
        return out[..., :value_dim] if padding else out

    return attend


AttentionInterface.register(ATTENTION_NAME, paged_attention)
