"""A model's own multi-token heads: decoder layers after its last one, in the same files.

A feature is what the model's last norm gives. `eh_proj` brings embedding and feature, each normed, to the size of the
layer, which is one of the model's family. (DeepSeek-V3, arXiv:2412.19437; GLM-4 MoE has the same.) Of several heads,
the first is used for all drafts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from common.engine.config import ModelConfig
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
from common.engine.model.heads import Files, FoundAttention, HeadModule, LoadedHead, as_model
from common.engine.model.hidden_states import final_states
from common.engine.model.meta_weights import MetaKernelsOnDemand, on_meta
from common.engine.model.probe import probe_model
from common.engine.model.stages import Stage
from common.engine.speculative import MtpOptions
from common.errors import ConfigError

_OF_HEAD = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
_RENAMED = {
    "shared_head.norm.weight": "model.norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "model.embed_tokens.weight",
}
_SHARED = ("lm_head.weight", "model.embed_tokens.weight")  # the model's, if the head has none


class MtpHead(HeadModule):
    """See HeadModule."""

    def __init__(self, model: Any, weights: dict[str, torch.Tensor]) -> None:
        """`model`: a transformers model of one layer, with the head's weights. `weights`: those of `_OF_HEAD`."""
        size = int(model.config.hidden_size)
        super().__init__(size, size, int(model.config.vocab_size))
        self.model = model
        self.embed_tokens = model.get_input_embeddings()
        self.enorm, self.hnorm = (copy.deepcopy(model.model.norm) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False, device="meta")
        own = {name.removesuffix(".weight"): weights[name] for name in _OF_HEAD}
        for name, weight in own.items():
            getattr(self, name).weight = nn.Parameter(weight, requires_grad=False)

    def keep_outputs(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """See HeadModule."""
        super().keep_outputs(num_tokens, dtype, device)
        self.model.model.norm.register_forward_pre_hook(lambda _, args: self._pass_on(args[0]))

    def forward(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: int | torch.Tensor, **_: Any
    ) -> CausalLMOutput:
        """Logits of the vocabulary, of the tokens `logits_to_keep`; 0: of all."""
        embeddings, features = self._take(inputs_embeds)
        hidden = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(features)], dim=-1))
        found: CausalLMOutput = self.model(
            inputs_embeds=hidden, position_ids=position_ids, use_cache=False, logits_to_keep=logits_to_keep
        )
        return found


def load_mtp(config: ModelConfig, options: MtpOptions, device_number: int) -> LoadedHead:
    """Loads the first head whole, however the model is cut, whose own layers are not read. Raises ConfigError that
    names the option, or the setting of the model."""
    device = DEVICES.find(config.device)(config, device_number)
    directory = model_directory(config)
    raw_config, weight_files = read_config(directory), find_weights(directory)
    with quiet_transformers(), unusable(directory):
        model_config = read_model_config(directory)
        dtype = resolve_dtype(config, model_config, device)
        if not getattr(model_config, "num_nextn_predict_layers", 0):
            raise _refused(f"{config.model} has no multi-token heads (num_nextn_predict_layers)")
        if raw_config.get("quantization_config"):
            raise _refused("not for checkpoints that are quantised")
        number = int(model_config.num_hidden_layers)
        weights = _read_weights(weight_files, number)
        missing = [name for name in (*_OF_HEAD, "model.norm.weight", *_SHARED) if name not in weights]
        if missing:
            raise _refused(f"{config.model} lacks the weights of layer {number}, such as {missing[0]}")
        own = {name: weights.pop(name).to(dtype) for name in _OF_HEAD}
        model = _one_layer(config.model, model_config, weights, dtype)
        module = MtpHead(model, own).to(device.torch_device).eval().requires_grad_(False)
        probed = probe_model(model, Stage([range(0), range(1)], 1, module.feature_size))
    found = FoundAttention(probed.spec, probed.num_heads, probed.attention_args, probed.attention_modules)
    max_model_len = int(model_config.max_position_embeddings)
    loaded = as_model(module, found, device, max_model_len, Files(raw_config, weight_files, directory))
    return LoadedHead(module, loaded, final_states, options.depth, fingerprint=b"mtp")  # the model's own states


def _read_weights(files: list[Path], number: int) -> dict[str, torch.Tensor]:
    """Reads the weights of the head that is layer `number`, named as those of a model whose only layer it is."""
    prefix, weights, shared = f"model.layers.{number}.", {}, {}
    for path in files:
        with safe_open(path, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  it is no mapping
                if key.startswith(prefix):
                    own = key.removeprefix(prefix)
                    name = own if own in _OF_HEAD else _RENAMED.get(own, f"model.layers.0.{own}")
                    weights[name] = opened.get_tensor(key)
                elif key in _SHARED:
                    shared[key] = opened.get_tensor(key)
    return shared | weights


def _one_layer(name: str, model_config: Any, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    own = copy.deepcopy(model_config)
    own.num_hidden_layers = 1
    own.first_k_dense_replace = 0  # it has experts, as the model's last layer
    own.architectures = None
    with on_meta():
        code = type(AutoModelForCausalLM.from_config(own, trust_remote_code=False))
    with MetaKernelsOnDemand():
        model, report = code.from_pretrained(
            None,
            config=own,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    for kind, found in (("lacks the weight", "missing_keys"), ("has a weight that is not known,", "unexpected_keys")):
        if report[found]:
            raise _refused(f"the multi-token head of {name} {kind} {min(report[found])}")
    return model


def _refused(reason: str) -> ConfigError:
    return ConfigError.of("speculative", f"mtp: {reason}")
