"""Loads the weights of a model: the whole of it, or a rank's part."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from common.engine.config import AdapterConfig, ModelConfig
from common.engine.devices.base import Device
from common.engine.devices.ranks import Ranks
from common.engine.model.adapters import adapt, is_adapted, tell_layers
from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.model.checkpoint import read_config, read_model_config, resolve_dtype, unusable
from common.engine.model.expert_parallel import ExpertRanks
from common.engine.model.head_inputs import replace_head
from common.engine.model.lora import AdaptedLayers
from common.engine.model.meta_weights import MetaKernelsOnDemand
from common.engine.model.parallel_plan import refused
from common.engine.model.pooling import check_direction, read_checkpoint
from common.engine.model.rank_loader import load_rank
from common.engine.model.stage_links import StageLinks
from common.engine.model.stages import Stage, whole_model
from common.engine.quantization.absent_weight import keep_weights
from common.engine.quantization.base import QuantizedLinear, quantize_linears
from common.engine.quantization.checkpoints.base import CheckpointFormat
from common.errors import ConfigError, ModelLoadError

logger = logging.getLogger(__name__)

_LOADING = threading.Lock()  # transformers changes its own classes meanwhile, such as how weights are tied
_EXPECTED_SHARE = 0.5  # of the weights, that quantisation covers


class ModelSource(NamedTuple):
    """The source of a model, which is loaded perhaps more than once."""

    directory: Path
    weight_files: list[Path]
    weight_format: CheckpointFormat | None
    config: ModelConfig
    device: Device
    quantized: type[QuantizedLinear] | None
    ranks: Ranks
    experts: ExpertRanks | None
    links: StageLinks
    kv_dtype: torch.dtype | None  # to which KV is quantised; None: it is not
    adapters: AdapterConfig | None
    read_layers: frozenset[str] = frozenset()  # attributes of linear layers that stay as they are; see ReadLinear

    def adapted_layers(self) -> AdaptedLayers | None:
        """Returns the list of layers that adapters may change, still empty; None if there can be none."""
        if self.adapters is None or self.experts is not None:
            return None
        return AdaptedLayers(
            self.device,
            self.adapters.max_loras,
            self.adapters.max_lora_rank,
            is_cut=self.ranks.size > 1,
            is_staged=self.links.num_stages > 1,
        )

    @property
    def is_cut(self) -> bool:
        """Whether this rank has a part of the model."""
        return self.ranks.size > 1 or self.links.num_stages > 1 or self.experts is not None

    @property
    def all_ranks(self) -> Ranks:
        """The ranks that must decide alike."""
        return self.ranks if self.experts is None else self.experts.ranks


def load_weights(source: ModelSource) -> tuple[Any, Stage]:
    """Returns a transformers model in eval mode, on its device, and the stage of the whole that it is. Raises
    ModelLoadError, or ConfigError for a model that cannot be cut or quantised."""
    model, stage = _loaded(source)
    keep_weights(model, source.read_layers)
    if source.quantized is not None:
        share = quantize_linears(model, source.quantized)
        if share < _EXPECTED_SHARE:  # experts, or layers that are not torch's linear ones
            logger.warning("quantization covers only %.0f %% of the weights of %s", 100 * share, type(model).__name__)
    return model, stage


def _loaded(source: ModelSource) -> tuple[Any, Stage]:
    directory = source.directory
    with unusable(directory):
        model_config = read_model_config(directory)
        raw_config = read_config(directory)
        check_direction(raw_config, model_config)
        has_text_head = read_checkpoint(directory, raw_config, model_config).has_text_head
        dtype = resolve_dtype(source.config, model_config, source.device)
        if source.is_cut and is_adapted(model_config):
            raise refused(f"the attention of {model_config.model_type} is not cut among ranks or stages")
        if source.is_cut or source.weight_format is not None:
            model, stage = _load_parts(source, model_config, dtype, has_text_head=has_text_head)
        else:
            model = _from_pretrained(directory, model_config, dtype, has_text_head=has_text_head)
            stage = whole_model(model)
        tell_layers(model)
    return model.to(source.device.torch_device).eval().requires_grad_(False), stage


def _load_parts(
    source: ModelSource, model_config: Any, dtype: torch.dtype, *, has_text_head: bool
) -> tuple[Any, Stage]:
    """Loads a rank's part, or a model whose weights are quantised."""
    weight_format = source.weight_format
    if weight_format is not None and is_adapted(model_config):
        raise ConfigError.of("model", f"quantised weights of {model_config.model_type} are not supported")
    parts = (model_config, dtype, source.ranks, source.experts, source.links, weight_format)
    try:
        return load_rank(source.directory, source.weight_files, *parts, has_text_head=has_text_head)
    except ConfigError as error:
        if source.is_cut or isinstance(error, ModelLoadError):
            raise
        raise ConfigError.of("model", f"quantised weights of this model are not supported: {error.message}") from error


def _from_pretrained(directory: Path, model_config: Any, dtype: torch.dtype, *, has_text_head: bool) -> Any:
    with _LOADING, MetaKernelsOnDemand():
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=model_config,
            dtype=dtype,
            attn_implementation="eager" if is_adapted(model_config) else ATTENTION_NAME,
            use_safetensors=True,
            low_cpu_mem_usage=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    if not has_text_head:
        head = replace_head(model, torch.nn.Identity())
        report["missing_keys"] = {each for each in report["missing_keys"] if not each.startswith(f"{head}.")}
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{directory} lacks {len(missing)} weights of {type(model).__name__}, first {missing[0]}", param="model"
        )
    if is_adapted(model_config):
        adapt(model)
    return model
