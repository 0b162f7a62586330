"""EAGLE-3 heads: one decoder layer, whose attention takes embeddings and features side by side.

A feature is what the model's residual stream was before three of its layers, brought to the head's size by `fc`.
(EAGLE-3, arXiv:2503.01840; the files are those of its authors and of SpecForge.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from common.engine.config import ModelConfig
from common.engine.devices.attention import AttentionArgs, KVSpec
from common.engine.devices.registry import DEVICES
from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.model.checkpoint import (
    find_weights,
    model_directory,
    quiet_transformers,
    read_config,
    read_model_config,
    resolve_dtype,
    unusable,
)
from common.engine.model.fingerprint import fingerprint_model
from common.engine.model.heads import Files, FoundAttention, HeadModule, LoadedHead, as_model
from common.engine.model.hidden_states import can_keep_inputs, layer_inputs
from common.engine.model.meta_weights import on_meta
from common.engine.speculative import Eagle3Options
from common.errors import ConfigError, ModelLoadError

_NUM_LAYERS = 3  # of the model, whose inputs are fused
_ROPES = frozenset({"default", "linear", "llama3", "yarn"})  # that do not change with the length of a text


class Eagle3Head(HeadModule):
    """See HeadModule."""

    fuses_with = frozenset({"fc"})

    def __init__(self, config: LlamaConfig, fc_size: int, embedding_size: int, draft_size: int) -> None:
        super().__init__(embedding_size, int(config.hidden_size), int(config.vocab_size))
        self.fc = nn.Linear(fc_size, self.feature_size, bias=False)
        self.midlayer = _Layer(config, embedding_size)
        self.norm = LlamaRMSNorm(self.feature_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(self.feature_size, draft_size, bias=False)
        self.rotary_emb: nn.Module | None = None
        self.target_ids: torch.Tensor | None  # [draft_size]: the model's tokens that the head may propose; None: all
        self.register_buffer("target_ids", None, persistent=False)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See HeadModule. `states`: the inputs of three layers, side by side."""
        return functional.linear(states, self.fc.weight)

    def forward(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: int | torch.Tensor, **_: Any
    ) -> CausalLMOutput:
        """Logits of the vocabulary, of the tokens `logits_to_keep`; 0: of all."""
        embeddings, features = self._take(inputs_embeds)
        assert self.rotary_emb is not None
        hidden = self.midlayer(embeddings, features, self.rotary_emb(features, position_ids))
        self._pass_on(hidden)
        kept = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        logits = self.lm_head(self.norm(kept))
        if self.target_ids is not None:
            own, logits = logits, logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
            logits[..., self.target_ids] = own
        return CausalLMOutput(logits=logits)


class _Layer(LlamaDecoderLayer):  # type: ignore[misc]  # without types
    """A decoder layer whose attention takes two inputs side by side."""

    def __init__(self, config: LlamaConfig, embedding_size: int) -> None:
        super().__init__(config, 0)
        self.input_layernorm = LlamaRMSNorm(embedding_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._is_residual_normed = bool(getattr(config, "norm_before_residual", False))
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            size = embedding_size + config.hidden_size
            setattr(self.self_attn, name, nn.Linear(size, own.out_features, bias=own.bias is not None))

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[1, tokens, hidden size]"""
        normed = self.hidden_norm(features)
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(embeddings), normed], dim=-1),
            position_embeddings=position_embeddings,
            attention_mask=None,
        )
        hidden = attended + (normed if self._is_residual_normed else features)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def load_eagle3(config: ModelConfig, options: Eagle3Options, device_number: int) -> LoadedHead:
    """Loads it whole, however the model that `config` names is cut, whose weights are not read. Raises ConfigError that
    names the option, or the setting of the model."""
    device = DEVICES.find(config.device)(config, device_number)
    directory = model_directory(config, ["config.json"])
    read_config(directory)
    with quiet_transformers(), unusable(directory):
        target_config = read_model_config(directory)
        dtype = resolve_dtype(config, target_config, device)
    own = msgspec.structs.replace(config, model=options.model, revision=options.revision)
    try:
        directory = model_directory(own)
        raw_config, weight_files = read_config(directory), find_weights(directory)
        weights = _read_weights(options.model, weight_files)
    except ModelLoadError as error:
        raise _refused(error.message) from error
    text_config = target_config.get_text_config()
    try:
        layers = _layers_of(raw_config, config.model, text_config)
        with quiet_transformers():
            weights = {key: value.to(dtype) if value.is_floating_point() else value for key, value in weights.items()}
            module = _build(options.model, raw_config, weights, config.model, text_config)
    except ConfigError:
        raise
    except Exception as error:  # code over user files, ours and others': any exception means unusable
        reason = str(error).strip().partition("\n")[0]
        raise _refused(f"{options.model} cannot be built: {type(error).__name__}: {reason}") from error
    module = module.to(device.torch_device).eval().requires_grad_(False)
    attention = module.midlayer.self_attn
    num_heads, num_kv_heads = (each.out_features // attention.head_dim for each in (attention.q_proj, attention.k_proj))
    spec = KVSpec(1, num_kv_heads, attention.head_dim, attention.head_dim, dtype)
    found = FoundAttention(spec, [num_heads], [AttentionArgs(attention.scaling, None, None, None)], [attention])
    max_model_len = int(attention.config.max_position_embeddings)
    loaded = as_model(module, found, device, max_model_len, Files(raw_config, weight_files, directory))
    dtype_name = str(dtype).removeprefix("torch.")
    fingerprint = fingerprint_model(weight_files, raw_config, dtype=dtype_name, kv_dtype=dtype_name)
    return LoadedHead(module, loaded, partial(layer_inputs, layers), options.depth, fingerprint)


def _layers_of(raw_config: dict[str, Any], model: str, text_config: Any) -> tuple[int, ...]:
    if not can_keep_inputs(text_config):
        raise _refused(f"the code of {model} does not say which its layers are")
    num_layers = int(text_config.num_hidden_layers)
    eagle_config = raw_config.get("eagle_config") or {}
    named = eagle_config.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    layers = sorted(set(named))
    if len(layers) != _NUM_LAYERS or not all(layer in range(num_layers) for layer in layers):
        raise _refused(f"takes layers {named} of a model, and {model} has {num_layers}")
    return tuple(layers)


def _read_weights(name: str, files: list[Path]) -> dict[str, torch.Tensor]:
    """By names without the prefixes that differ."""
    weights = {}
    try:
        for path in files:
            with safe_open(path, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118  it is no mapping
                    own = key.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
                    weights[own] = opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{name} cannot be read: {error}", param="model") from error
    return weights


def _build(
    name: str, raw_config: dict[str, Any], weights: dict[str, torch.Tensor], model: str, text_config: Any
) -> Eagle3Head:
    """The head with its weights, once it fits the model. Raises ConfigError."""
    fc, query, head = (weights.get(f"{each}.weight") for each in ("fc", "midlayer.self_attn.q_proj", "lm_head"))
    if fc is None or query is None or head is None:
        missing = "fc" if fc is None else "midlayer" if query is None else "lm_head"
        raise _refused(f"{name} is no EAGLE-3 head with weights of its own: it has no {missing}")
    size, vocab_size = int(text_config.hidden_size), int(text_config.vocab_size)
    if fc.shape[1] != _NUM_LAYERS * size:
        raise _refused(
            f"{name} is for a model of hidden size {fc.shape[1] / _NUM_LAYERS:g}, and that of {model} is {size}"
        )
    t2d, d2t = weights.pop("t2d", None), weights.pop("d2t", None)
    draft_size = len(head)
    own_size = raw_config.get("vocab_size") if t2d is None else len(t2d)
    if own_size != vocab_size:
        raise _refused(f"{name} is for a vocabulary of {own_size} tokens, and {model} has one of {vocab_size}")
    if draft_size != (vocab_size if d2t is None else len(d2t)):
        raise _refused(f"{name} proposes {draft_size} tokens of {vocab_size}, and does not say which (d2t)")
    target_ids = torch.arange(draft_size) + (0 if d2t is None else d2t.long())
    if bool((target_ids < 0).any()) or bool((target_ids >= vocab_size).any()):
        raise _refused(f"{name} proposes tokens outside the vocabulary (d2t)")
    embedding = weights.pop("embed_tokens.weight", None)
    if embedding is not None and len(embedding) != vocab_size:
        raise _refused(f"{name} has embeddings of {len(embedding)} tokens, and {model} has {vocab_size}")
    embedding_size = size if embedding is None else embedding.shape[1]
    rope = (raw_config.get("rope_scaling") or raw_config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope not in _ROPES:
        raise _refused(f"{name} has rotary embeddings of type {rope!r}, which is none of {', '.join(sorted(_ROPES))}")
    config = LlamaConfig.from_dict(raw_config, attn_implementation=ATTENTION_NAME)
    with on_meta():
        module = Eagle3Head(config, fc.shape[1], embedding_size, draft_size)
    module.rotary_emb = LlamaRotaryEmbedding(config)  # which reads nothing, and stays float32
    _check_shapes(name, {key: value.shape for key, value in module.state_dict().items()}, weights)
    module.load_state_dict(weights, assign=True)
    if embedding is not None:
        module.embed_tokens = nn.Embedding(embedding.shape[0], embedding.shape[1], _weight=embedding)
    if d2t is not None:
        module.target_ids = target_ids
    return module


def _check_shapes(name: str, shapes: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]) -> None:
    for key in sorted(shapes.keys() ^ weights.keys()):
        what = "lacks the weight" if key in shapes else "has a weight that is not known here,"
        raise _refused(f"{name} {what} {key}")
    for key, shape in shapes.items():
        if weights[key].shape != shape:
            raise _refused(f"{name}: {key} is {list(weights[key].shape)}, and by the configuration {list(shape)}")
        if not weights[key].is_floating_point() or not bool(weights[key].isfinite().all()):
            raise _refused(f"{name}: {key} has other values than finite floating-point numbers")


def _refused(reason: str) -> ConfigError:
    return ConfigError.of("speculative", f"eagle3:model: {reason}")
