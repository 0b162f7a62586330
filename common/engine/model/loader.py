"""Loads a causal language model, ready to run with paged attention; errors are one line."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from common.engine.config import AdapterConfig, Kernels, KVCacheDType, ModelConfig, ParallelConfig
from common.engine.contract.kv_groups import QUANTIZED_KV, KVGroupSpec, Window
from common.engine.devices.attention import KVSpec
from common.engine.devices.base import Device, RowSampler, StepSampler
from common.engine.devices.ranks import OneRank, Ranks
from common.engine.devices.recurrences import Recurrences
from common.engine.devices.registry import DEVICES
from common.engine.model.checkpoint import (
    eos_token_ids_of,
    find_weights,
    max_model_len_of,
    model_directory,
    quiet_transformers,
    read_config,
    read_model_config,
    resolve_dtype,
    unusable,
)
from common.engine.model.expert_parallel import ExpertRanks
from common.engine.model.fingerprint import fingerprint_model
from common.engine.model.fused_decoder import FusedDecoder
from common.engine.model.head_inputs import HeadInputs
from common.engine.model.kernel_choice import PreparedModel, find_row_sampler, prepare_model
from common.engine.model.kv_groups import GroupLayers, all_in_one, by_window, share_blocks
from common.engine.model.lora import ModelAdapters
from common.engine.model.parallel_plan import Place, heads_of, refused
from common.engine.model.pooling import read_checkpoint, read_head
from common.engine.model.probe import ProbedModel
from common.engine.model.rank_loader import outline_of
from common.engine.model.source import ModelSource
from common.engine.model.stage_links import OneStage, StageLinks
from common.engine.model.stages import Stage
from common.engine.model.stages import refused as refused_stages
from common.engine.model.states import StateLayer, block_layers_of
from common.engine.quantization.base import QuantizedLinear
from common.engine.quantization.checkpoints.base import CheckpointFormat
from common.engine.quantization.checkpoints.registry import find_format
from common.engine.quantization.registry import QUANTIZATIONS
from common.errors import ConfigError, ModelLoadError
from common.types import PoolingFacts

logger = logging.getLogger(__name__)

_ONE_RANK = OneRank()
_ONE_STAGE = OneStage()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run with paged attention."""

    model: Any  # a transformers PreTrainedModel in eval mode; without layers if there is a `decoder`
    stage: Stage  # of the model, that is here
    decoder: FusedDecoder | None  # computes the same, on kernels of our own
    kernels: Kernels
    kernels_failed: bool  # compiled kernels would do, but computed something else
    row_sampler: RowSampler | None
    step_sampler: StepSampler | None
    rounding: str  # see fingerprint_model
    device: Device
    ranks: Ranks
    dtype: torch.dtype
    kv_groups: tuple[KVGroupSpec, ...]  # with the heads of the whole model
    kv_spec: KVSpec  # of the layers of each group, with this rank's heads
    attention_modules: list[torch.nn.Module]  # in layer order
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    config: dict[str, Any]  # config.json
    weight_files: list[Path]
    directory: Path
    layers_by_stage: tuple[int, ...]  # see KVLayout
    state_layers: Sequence[StateLayer] = ()  # of this stage, in layer order
    state_bytes: tuple[int, ...] = ()  # of all stages, by the layer of blocks that they lie in; empty: there are none
    recurrences: Recurrences | None = None  # kernels by which these decode
    adapters: ModelAdapters | None = None  # None: it takes none
    position_dims: int = 1  # dimensions of a token's position; 1 in all models that are served so far
    head_inputs: HeadInputs = field(default_factory=HeadInputs)  # of this model
    pooling: PoolingFacts = field(default_factory=PoolingFacts)
    classification_head: tuple[torch.Tensor, torch.Tensor | None] | None = None  # see read_head


def load_model(
    config: ModelConfig,
    device_number: int = 0,
    group_layers: GroupLayers = by_window,
    ranks: Ranks = _ONE_RANK,
    experts: ExpertRanks | None = None,
    links: StageLinks = _ONE_STAGE,
    kv_cache_dtype: KVCacheDType = "auto",
    adapters: AdapterConfig | None = None,
) -> LoadedModel:
    """Load the rank's part of `config.model`, a local directory or a hub id. `experts`: among which experts are cut
    whole. `adapters`: of which the model takes so many. Raises ModelLoadError, or ConfigError for a bad device, a model
    that cannot be cut, or KV that cannot be quantised."""
    device = DEVICES.find(config.device)(config, device_number)
    directory = model_directory(config)
    raw_config = read_config(directory)
    quantized = None if config.quantization is None else _quantization(config.quantization, raw_config, device)
    is_cut = ranks.size > 1 or links.num_stages > 1 or experts is not None
    weight_files = find_weights(directory)
    weight_format = find_format(raw_config, weight_files)
    if is_cut:
        _check_weights(raw_config, weight_format)
    if quantized is not None and weight_format is not None:
        reason = f"{config.quantization} is for float weights, and the file's are quantised"
        raise ConfigError.of("quantization", reason)
    own_ranks, ranks = ranks, device.collectives(ranks)
    if experts is not None:
        experts.ranks = ranks if experts.ranks is own_ranks else device.collectives(experts.ranks)
    if config.batch_invariant and not ranks.sums_in_order:
        reason = f"with 1 or 2 ranks, but there are {ranks.size} that do not share memory"
        raise ConfigError.of("batch_invariant", reason)
    with quiet_transformers():
        kv_dtype = None if kv_cache_dtype == "auto" else getattr(torch, QUANTIZED_KV[kv_cache_dtype])
        limits = kv_dtype, adapters
        source = ModelSource(
            directory, weight_files, weight_format, config, device, quantized, ranks, experts, links, *limits
        )
        found = prepare_model(source)
    model, stage, probed = found.model, found.stage, found.probed
    if quantized is not None or weight_format is not None or is_cut:  # else what was given up is of mapped files
        _return_freed_memory()
    kv_groups, layers_by_stage = _group(found, links, group_layers)
    if ranks.size > 1:
        kv_groups = _of_all_ranks(kv_groups, model, probed, ranks.size)
    state_layers, state_bytes = _place_states(probed.state_layers, layers_by_stage, links)
    text_config = model.config.get_text_config()
    vocab_size = min(int(text_config.vocab_size), int(model.get_input_embeddings().num_embeddings))
    row_sampler, sampler_failed = find_row_sampler(device, vocab_size, model.dtype)
    pooling = read_checkpoint(directory, raw_config, model.config).facts
    head = read_head(weight_files) if pooling.labels else None
    if head is not None and len(head[0]) != len(pooling.labels):
        problem = f"the classification head has {len(head[0])} outputs, and config.json {len(pooling.labels)} labels"
        raise ModelLoadError(problem, param="model")
    return LoadedModel(
        model=model,
        stage=stage,
        decoder=found.decoder,
        kernels=found.kernels,
        kernels_failed=found.kernels_failed or sampler_failed,
        row_sampler=row_sampler,
        step_sampler=device.step_sampler(found.kernels),
        rounding=_rounding(device, ranks.size) if config.batch_invariant else "",
        device=device,
        ranks=ranks,
        dtype=model.dtype,
        kv_groups=kv_groups,
        kv_spec=replace(probed.spec, num_layers=layers_by_stage[links.stage]),
        layers_by_stage=layers_by_stage if links.num_stages > 1 else (),
        attention_modules=[] if found.decoder else probed.attention_modules,
        state_layers=state_layers,
        state_bytes=state_bytes,
        recurrences=found.recurrences,
        adapters=_model_adapters(found, device),
        vocab_size=vocab_size,
        max_model_len=max_model_len_of(text_config),
        eos_token_ids=eos_token_ids_of(model, text_config),
        config=raw_config,
        weight_files=weight_files,
        directory=directory,
        head_inputs=_head_inputs(found),
        pooling=pooling,
        classification_head=None if head is None else _on_device(head, device),
    )


def check_ranks(config: ModelConfig, parallel: ParallelConfig, data_parallel_rank: int = 0) -> None:
    """Raises what load_model would on one of this machine's ranks, as far as their devices, the model's configuration
    and the plan in its code decide that."""
    last_device = max(parallel.device_of(rank, data_parallel_rank) for rank in range(parallel.ranks_per_node))
    device = DEVICES.find(config.device)(config, last_device)
    directory = model_directory(config, ["config.json"])
    raw_config = read_config(directory)
    if config.quantization is not None:
        _quantization(config.quantization, raw_config, device)
    _check_weights(raw_config, find_format(raw_config))
    experts = Place(0, parallel.world_size) if parallel.enable_expert_parallel else None
    num_stages = parallel.pipeline_parallel_size
    with quiet_transformers(), unusable(directory):
        model_config = read_model_config(directory)
        dtype = resolve_dtype(config, model_config, device)
        has_text_head = read_checkpoint(directory, raw_config, model_config).has_text_head
        for stage in range(num_stages):
            rank = Place(0, parallel.tensor_parallel_size)
            place = Place(stage, num_stages)
            outline_of(model_config, dtype, rank, experts, place, has_text_head=has_text_head)


def identify_model(config: ModelConfig, device_number: int = 0) -> bytes:
    """A digest of the model's files, before weights are loaded. Raises as load_model does."""
    DEVICES.find(config.device)(config, device_number)
    directory = model_directory(config)
    try:
        return fingerprint_model(find_weights(directory), read_config(directory), dtype="", kv_dtype="")
    except OSError as error:
        raise ModelLoadError(f"the weights cannot be read: {error}", param="model") from error


def _quantization(name: str, raw_config: dict[str, Any], device: Device) -> type[QuantizedLinear]:
    layer = QUANTIZATIONS.find(name)
    if not device.can_multiply(layer):
        raise ConfigError.of("quantization", f"no kernels for {name} on this device ({device.name})")
    if isinstance(own := raw_config.get("quantization_config"), dict):
        method = own.get("quant_method", "some other way")
        reason = f"{name} is for float weights, and the checkpoint's are quantised ({method})"
        raise ConfigError.of("quantization", reason)
    return layer


def _check_weights(raw_config: dict[str, Any], weight_format: CheckpointFormat | None) -> None:
    """Raises ConfigError for several ranks if weights are quantised by a method that is left to transformers."""
    if weight_format is None and (own := raw_config.get("quantization_config")):
        raise refused(f"checkpoints that are quantised by {own.get('quant_method')!r} are supported for one rank only")


def _of_all_ranks(
    groups: tuple[KVGroupSpec, ...], model: Any, probed: ProbedModel, size: int
) -> tuple[KVGroupSpec, ...]:
    """The groups with the heads of the whole model. Raises ConfigError if this rank has not its share of them."""
    heads = heads_of(model.config, size)
    if not probed.spec.value_head_dim:  # latents, which all heads share
        heads = heads._replace(num_kv_heads=probed.spec.num_kv_heads)
    if probed.spec.num_kv_heads != heads.kv_of_rank or set(probed.num_heads) != {heads.of_rank}:
        raise refused(f"the plan of {type(model).__name__} does not cut its attention by heads")
    return tuple(replace(group, num_kv_heads=heads.num_kv_heads) for group in groups)


def _rounding(device: Device, size: int) -> str:
    """Sums over ranks round as well."""
    return device.rounding if size == 1 else f"{device.rounding}; {size} ranks"


def _model_adapters(found: PreparedModel, device: Device) -> ModelAdapters | None:
    if found.adapted is None or not found.adapted.targets:
        return None
    return ModelAdapters(found.adapted, dtype=found.model.dtype, device=device.torch_device)


def _head_inputs(found: PreparedModel) -> HeadInputs:
    """Taken from the head of the model that is run. A stage without a head takes none."""
    if found.decoder is not None:
        return found.decoder.head_inputs
    inputs = HeadInputs()
    if found.stage.is_last:
        inputs.watch(found.model)
    return inputs


def _on_device(
    head: tuple[torch.Tensor, torch.Tensor | None], device: Device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = head
    return weight.to(device.torch_device), None if bias is None else bias.to(device.torch_device)


def _group(
    found: PreparedModel, links: StageLinks, group_layers: GroupLayers
) -> tuple[tuple[KVGroupSpec, ...], tuple[int, ...]]:
    """The groups of the layers of all stages, and how many layers of a block each stage has. One group if the model may
    be fused, as a fused decoder takes one block table, whether it is fused here or not: pods of a model hand over to
    each other. One group, too, if stages have different shares of the groups' blocks. A window that is as long as any
    text is none."""
    limit = max_model_len_of(found.model.config.get_text_config())
    own = [args.window for args in found.probed.attention_args]
    if links.num_stages > 1 and len(own) != len(found.stage.kv_layers):
        raise refused_stages(f"{type(found.model).__name__} has layers with a state and KV, or with neither")
    joined = links.join("windows", [None if window is None or window.size >= limit else window for window in own])
    windows = [None if window is None else Window(*window) for window in joined]
    spec = found.probed.spec
    groups = group_layers(spec, windows)
    if len(groups) <= 1 or not found.is_fusable:
        try:
            return groups, share_blocks(groups, found.stage.kv_runs)
        except ConfigError as error:
            logger.info("blocks of this model are kept beyond its windows: %s", error.message)
    groups = all_in_one(spec, windows)
    return groups, share_blocks(groups, found.stage.kv_runs)


def _place_states(
    own: Sequence[StateLayer], layers_by_stage: Sequence[int], links: StageLinks
) -> tuple[list[StateLayer], tuple[int, ...]]:
    """The layers of this stage in their places in its blocks, and the bytes of all stages' states in each layer of a
    block. Raises ConfigError if they are not in the stages that have these."""
    sizes = [size or 0 for size in links.join("bytes of states", [layer.num_bytes for layer in own])]
    if not sizes:
        return [], ()
    num_layers = max(1, sum(layers_by_stage))  # one, if nothing has KV
    places = block_layers_of(len(sizes), num_layers)
    first = sum(layers_by_stage[: links.stage])
    of_stage = [place - first for place in places if 0 <= place - first < max(1, layers_by_stage[links.stage])]
    if len(of_stage) != len(own):
        raise refused_stages(f"a stage has {len(own)} of {len(sizes)} states, and room for those of {len(of_stage)}")
    placed = [layer._replace(block_layer=place) for layer, place in zip(own, of_stage, strict=True)]
    by_layer = [0] * num_layers
    for size, place in zip(sizes, places, strict=True):
        by_layer[place] += size
    return placed, tuple(by_layer)


def _return_freed_memory() -> None:
    """Gives the memory of weights that were given up back to the system. glibc keeps it, other libraries may not."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
