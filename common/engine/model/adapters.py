"""Models whose code does not go through transformers' attention interface: in each attention module, what computes the
attention is replaced by a call of ours. As long as the model is set to "eager", it computes with its own code.

And models whose code does, but keeps something from it that the attention depends on: see `tell_layers`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface

from common.engine.model.attention_hook import ATTENTION_NAME, paged_attention
from common.errors import ModelLoadError

_WITH_MASK = "baton_paged_with_mask"  # for code that cannot do without a mask, which nothing reads
_EAGER = "eager"

AttentionMaskInterface.register(_WITH_MASK, lambda *_, **__: torch.zeros(1, dtype=torch.bool))


class _Family:
    """The models of one type."""

    def __init__(
        self, adapt: Callable[[Any, Any], None], *, attention: str = ATTENTION_NAME, needs_positions: bool = True
    ) -> None:
        """`adapt` is called with each module, and the model's configuration. `attention`: the name to set there."""
        self.adapt = adapt
        self.attention = attention
        self.needs_positions = needs_positions


def is_adapted(model_config: Any) -> bool:
    """Whether models of this configuration are loaded as "eager", and adapted."""
    return model_config.model_type in _FAMILIES


def adapt(model: Any) -> None:
    """Lets a loaded model compute its attention with ours."""
    for module in model.modules():
        _FAMILIES[model.config.model_type].adapt(module, model.config)
    set_attention(model, ATTENTION_NAME)


def set_attention(model: Any, name: str) -> None:
    """Has the model compute with this attention implementation."""
    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = family.attention if name == ATTENTION_NAME else name  # noqa: SLF001


def tell_layers(model: Any) -> None:
    """Lets the layers of Llama 4 tell their attention the size of its chunks, and count positions, by which some of
    them scale queries, from where a packed batch has them."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextDecoderLayer":
            module.register_forward_pre_hook(_tell_llama4, with_kwargs=True)


def _tell_llama4(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    config = layer.self_attn.config
    is_chunked = config.layer_types[layer.layer_idx] == "chunked_attention"
    told = {
        "past_key_values": _Positions(given["position_ids"][0]),
        "attention_chunk_size": config.attention_chunk_size if is_chunked else None,
    }
    return args, given | told


class _Positions:
    """Stands for a cache, of which the code takes how many tokens came before."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int) -> torch.Tensor:
        """How many came before each token but for those of the batch, [tokens]."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is kept."""
        return key, value


def needs_positions(model: Any) -> bool:
    """Whether the tokens' positions must be told to the model; else only their distances count."""
    family = _FAMILIES.get(model.config.model_type)
    return family is None or family.needs_positions


def _is_eager(config: Any) -> bool:
    return bool(config._attn_implementation == _EAGER)  # noqa: SLF001


def _core(scale_of: Callable[[Any], float], window_of: Callable[[Any, Any], int | None] = lambda *_: None) -> _Family:
    """Adapts modules with a method `_attn` that takes queries, keys and values [1, heads, tokens, head_dim] and a mask.
    `window_of`: of a module and the configuration."""

    def adapt(module: Any, config: Any) -> None:
        if own := getattr(module, "_attn", None):
            arguments = {"scaling": scale_of(module), "sliding_window": window_of(module, config)}
            setattr(module, own.__name__, partial(attend, config, own, module, arguments))

    def attend(
        config: Any,
        own: Any,
        module: nn.Module,
        arguments: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
    ) -> Any:
        if _is_eager(config):
            return own(query, key, value, mask)
        out, weights = paged_attention(module, query.to(value.dtype), key.to(value.dtype), value, **arguments)
        return out.transpose(1, 2), weights

    return _Family(adapt)


def _forward(class_name: str, forward: Callable[..., Any], **options: Any) -> _Family:
    """Adapts modules whose whole forward pass becomes ours."""

    def adapt(module: Any, config: Any) -> None:
        if type(module).__name__ == class_name:
            module.forward = partial(dispatch, config, module.forward, module)

    def dispatch(config: Any, own: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if _is_eager(config) else forward(module, *args, **kwargs)

    return _Family(adapt, **options)


def _falcon(module: Any, hidden: torch.Tensor, alibi: torch.Tensor | None, **given: Any) -> Any:
    """With rotary embeddings. Its own code repeats KV heads for each of their query heads."""
    if alibi is not None:
        raise ModelLoadError("falcon with ALiBi, whose terms it rounds to bfloat16, cannot be served", param="model")
    projected = module.query_key_value(hidden)
    if module.new_decoder_architecture:
        in_group = module.num_heads // module.num_kv_heads
        groups = projected.view(1, -1, module.num_kv_heads, in_group + 2, module.head_dim)
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        query, key, value = module._split_heads(projected)  # noqa: SLF001
    rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *given["position_embeddings"])
    out, weights = paged_attention(module, query, key, value.transpose(1, 2), scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)), weights


def _bloom(module: Any, hidden: torch.Tensor, residual: torch.Tensor, **_: Any) -> Any:
    slopes = _slopes(module, hidden.device)
    query, key, value = module._reshape(module.query_key_value(hidden))  # noqa: SLF001
    out, weights = paged_attention(module, query, key, value, scaling=module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(out.flatten(2)) + residual, weights


def _slopes(module: Any, device: torch.device) -> torch.Tensor:
    code = importlib.import_module(type(module).__module__)
    slopes: torch.Tensor = code._get_alibi_slopes(module.num_heads, device)  # noqa: SLF001
    return slopes.flatten().float()


def _mpt(module: Any, hidden: torch.Tensor, position_bias: torch.Tensor, **_: Any) -> Any:
    """`position_bias` [heads, 1, longest text] rises by the head's slope from token to token."""
    projected = module.Wqkv(hidden)
    if module.clip_qkv:
        projected = projected.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (
        each.view(1, -1, module.n_heads, module.head_dim).transpose(1, 2) for each in projected.chunk(3, dim=2)
    )
    slopes = (position_bias[:, 0, -1] - position_bias[:, 0, -2]).float()
    out, weights = paged_attention(module, query, key, value, scaling=module.softmax_scale, alibi_slopes=slopes)
    return module.out_proj(out.flatten(2)), weights


def _openai_gpt(module: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
    parts = module.c_attn(hidden).split(module.split_size, dim=2)
    query, key, value = (each.view(1, hidden.shape[1], module.n_head, -1).transpose(1, 2) for each in parts)
    out = paged_attention(module, query, key, value, scaling=None if module.scale else 1.0)[0]
    return [module.c_proj(out.flatten(2))]


def _xglm(module: Any, hidden: torch.Tensor, **_: Any) -> Any:
    parts = (project(hidden) for project in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (each.view(1, -1, module.num_heads, module.head_dim).transpose(1, 2) for each in parts)
    out, weights = paged_attention(module, query, key, value, scaling=module.scaling)
    return module.out_proj(out.flatten(2)), weights


def _local_window(module: Any, config: Any) -> int | None:
    return int(config.window_size) if module.attention_type == "local" else None


_FAMILIES = {
    "bloom": _forward("BloomAttention", _bloom, needs_positions=False),
    "codegen": _core(lambda module: 1 / float(module.scale_attn)),
    "falcon": _forward("FalconAttention", _falcon),
    "gpt_neo": _core(lambda _: 1.0, _local_window),
    "gpt_neox_japanese": _core(lambda module: 1 / float(module.norm_factor)),
    "gptj": _core(lambda module: 1 / float(module.scale_attn)),
    "mpt": _forward("MptAttention", _mpt, attention=_WITH_MASK, needs_positions=False),
    "openai-gpt": _forward("Attention", _openai_gpt),
    "xglm": _forward("XGLMAttention", _xglm),
}
