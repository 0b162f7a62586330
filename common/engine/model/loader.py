"""Loads a causal language model from safetensors; errors are one line."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from common.engine.config import AdapterConfig, Kernels, KVCacheDType, ModelConfig, ParallelConfig
from common.engine.contract.kv_groups import QUANTIZED_KV, KVGroupSpec, Window
from common.engine.devices.attention import KVSpec
from common.engine.devices.base import Device, RowSampler, StepSampler
from common.engine.devices.ranks import OneRank, Ranks
from common.engine.devices.recurrences import NoKernelError, Recurrences
from common.engine.devices.registry import DEVICES
from common.engine.model.adapters import adapt, is_adapted, tell_layers
from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.model.expert_parallel import ExpertRanks
from common.engine.model.fingerprint import fingerprint_model
from common.engine.model.fused_decoder import FusedDecoder, can_fuse, fuse_decoder, has_known_parts
from common.engine.model.head_inputs import HeadInputs, replace_head
from common.engine.model.kv_groups import GroupLayers, all_in_one, by_window, share_blocks
from common.engine.model.lora import AdaptedLayers, ModelAdapters
from common.engine.model.parallel_plan import Place, heads_of, refused
from common.engine.model.pooling import check_direction, read_checkpoint, read_head
from common.engine.model.probe import ProbedModel, check_linears, check_recurrences, probe_model, quantize_kv
from common.engine.model.rank_loader import load_rank, outline_of
from common.engine.model.ranks import together
from common.engine.model.stage_links import OneStage, StageLinks
from common.engine.model.stages import Stage, whole_model
from common.engine.model.stages import refused as refused_stages
from common.engine.model.states import StateLayer, block_layers_of
from common.engine.quantization.base import QuantizedLinear, quantize_linears
from common.engine.quantization.checkpoints.base import CheckpointFormat
from common.engine.quantization.checkpoints.gguf import GGUF_SUFFIX
from common.engine.quantization.checkpoints.registry import find_format
from common.engine.quantization.registry import QUANTIZATIONS
from common.errors import ConfigError, EngineDeadError, ModelLoadError
from common.types import PoolingFacts

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOADING = threading.Lock()  # transformers changes its own classes meanwhile, such as how weights are tied
_DEFAULT_MAX_MODEL_LEN = 2048  # of models that state no limit
_EXPECTED_SHARE = 0.5  # of the weights, that quantisation covers
_ONE_RANK = OneRank()
_ONE_STAGE = OneStage()
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


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
        source = _Source(
            directory, weight_files, weight_format, config, device, quantized, ranks, experts, links, *limits
        )
        found = _load_and_probe(source)
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
        max_model_len=_max_model_len(text_config),
        eos_token_ids=_eos_token_ids(model, text_config),
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
        for stage in range(num_stages):
            rank = Place(0, parallel.tensor_parallel_size)
            outline_of(model_config, dtype, rank, experts, Place(stage, num_stages))


def identify_model(config: ModelConfig, device_number: int = 0) -> bytes:
    """A digest of the model's files, before weights are loaded. Raises as load_model does."""
    DEVICES.find(config.device)(config, device_number)
    directory = model_directory(config)
    try:
        return fingerprint_model(find_weights(directory), read_config(directory), dtype="", kv_dtype="")
    except OSError as error:
        raise ModelLoadError(f"the weights cannot be read: {error}", param="model") from error


def vocabulary_size(config: ModelConfig) -> int:
    """The number of tokens, by the model's configuration. Raises ModelLoadError."""
    directory = model_directory(config, ["config.json"])
    read_config(directory)
    with quiet_transformers(), unusable(directory):
        return int(read_model_config(directory).get_text_config().vocab_size)


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
        method = own.get("quant_method") if isinstance(own, dict) else own
        raise refused(f"checkpoints that are quantised by {method!r} are supported for one rank only")


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


def find_row_sampler(device: Device, vocab_size: int, dtype: torch.dtype) -> tuple[RowSampler | None, bool]:
    """And whether it failed."""
    try:
        return device.row_sampler(vocab_size, dtype), False
    except Exception as error:  # noqa: BLE001  the kernels differ, or whatever a compiler raises
        logger.warning("sampling with torch's operators: %s", _first_line(error))
        return None, True


def model_directory(config: ModelConfig, files: Sequence[str] = _HUB_FILES) -> Path:
    """The local directory of the model. Of a hub id, these `files` are downloaded."""
    path = Path(config.model).expanduser()
    if path.is_dir():
        return path
    if not config.model:
        raise ModelLoadError("no model given", param="model")
    if path.exists():
        raise ModelLoadError(f"{path} is not a directory", param="model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise ModelLoadError(f"{config.model} does not exist", param="model")
    try:
        return Path(snapshot_download(config.model, revision=config.revision, allow_patterns=[*files]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{config.model} is neither a local directory nor a model on the hub: {_first_line(error)}",
            param="model",
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Its config.json. Raises ModelLoadError."""
    path = directory / "config.json"
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{directory} has no config.json", param="model") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {_first_line(error)}", param="model") from error
    if not isinstance(parsed, dict):
        raise ModelLoadError(f"{path} is not a JSON object", param="model")
    return parsed


def find_weights(directory: Path) -> list[Path]:
    """The safetensors files that transformers will load, or the GGUF file where there are none."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file() and len(found := sorted(directory.glob(f"*{GGUF_SUFFIX}"))) == 1:
        return found
    if not index.is_file():
        raise ModelLoadError(f"{directory} has no safetensors weights (model.safetensors)", param="model")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} cannot be read: {_first_line(error)}", param="model") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory} has no weight file {missing[0]}", param="model")
    return [directory / name for name in names]


class _Source(NamedTuple):
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


class _Probed(NamedTuple):
    model: Any
    stage: Stage
    probed: ProbedModel
    decoder: FusedDecoder | None
    kernels: Kernels
    kernels_failed: bool
    is_fusable: bool  # whatever the device can do
    recurrences: Recurrences | None = None
    adapted: AdaptedLayers | None = None  # layers that adapters may change


def _load_and_probe(source: _Source) -> _Probed:
    device, batch_invariant = source.device, source.config.batch_invariant
    model, stage = _load(source)
    is_fusable = has_known_parts(model, stage)
    operators = device.operators()
    probed = probe_model(model, stage) if operators is not None and can_fuse(model, operators, stage) else None
    if batch_invariant and probed is None:
        raise ConfigError.of("batch_invariant", "only with compiled kernels, for models of the Llama kind")
    failed = False
    if operators is not None and probed is not None:
        probed = _with_kv_dtype(source, model, stage, probed)
        try:
            adapted = source.adapted_layers()
            decoder = fuse_decoder(model, probed, operators, source.ranks, stage, adapted)
            return _Probed(
                model, stage, probed, decoder, "fused", kernels_failed=False, is_fusable=True, adapted=adapted
            )
        except EngineDeadError:
            raise
        except Exception as error:  # the decoder differs, or whatever a compiler raises
            if batch_invariant:
                reason = f"the compiled kernels cannot be used: {_first_line(error)}"
                raise ConfigError.of("batch_invariant", reason) from error
            _warn_of_kernels(error)
            failed = True
            model, stage = _load(source)
    if not failed:
        try:
            device.compile_linears(model)
        except Exception as error:  # noqa: BLE001  the kernels differ, or whatever a compiler raises
            _warn_of_kernels(error)
            failed = True
            model, stage = _load(source)
    model, stage, probed = _probe_packed(source, model, stage, compiles=not failed)
    probed = _with_kv_dtype(source, model, stage, probed)
    attends = False
    if not failed:
        try:
            with together(source.all_ranks):
                has_slopes = any(args.slopes is not None for args in probed.attention_args)  # kernels take none
                attends = not has_slopes and device.can_attend(probed.spec, probed.num_heads, probed.attention_args)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  the kernels differ, or whatever a compiler raises
            _warn_of_kernels(error)
            failed = True
    if probed.spec.quantized is not None and not attends:
        _check_quantized(device, probed)
    recurrences = device.recurrences() if probed.state_layers and not failed else None
    if recurrences is not None:
        try:
            with together(source.all_ranks):
                check_recurrences(model, stage, probed, recurrences)
        except EngineDeadError:
            raise
        except NoKernelError as error:
            logger.info("decoding with torch's operators, as there are no kernels for %s", error)
            recurrences = None
        except Exception as error:  # noqa: BLE001  the kernels differ, or whatever a compiler raises
            _warn_of_kernels(error)
            failed, recurrences = True, None
    adapted = _wrap_linears(source, model, stage, probed)
    kernels: Kernels = "attention" if attends else "torch"
    return _Probed(model, stage, probed, None, kernels, failed, is_fusable, recurrences, adapted)


def _wrap_linears(source: _Source, model: Any, stage: Stage, probed: ProbedModel) -> AdaptedLayers | None:
    """Lets adapters change the linear layers of a model that runs its own code; None if that changes the model."""
    adapted = source.adapted_layers()
    if adapted is None or adapted.is_cut:
        return None
    adapted.wrap_modules(model)
    try:
        check_linears(model, stage, probed)
    except Exception as error:  # noqa: BLE001  third-party code: whatever it raises, the model is served without
        logger.warning("%s takes no adapters: %s", type(model).__name__, _first_line(error))
        adapted.unwrap_modules(model)
        return None
    adapted.settle(model, len(probed.inputs))
    return adapted


def _model_adapters(found: _Probed, device: Device) -> ModelAdapters | None:
    if found.adapted is None or not found.adapted.targets:
        return None
    return ModelAdapters(found.adapted, dtype=found.model.dtype, device=device.torch_device)


def _with_kv_dtype(source: _Source, model: Any, stage: Stage, probed: ProbedModel) -> ProbedModel:
    return probed if source.kv_dtype is None else quantize_kv(model, stage, probed, source.kv_dtype)


def _check_quantized(device: Device, probed: ProbedModel) -> None:
    """Raises ConfigError if the device's attention without kernels does not take quantised KV."""
    try:
        device.check_quantized(probed.spec, probed.num_heads, probed.attention_args)
    except Exception as error:
        reason = f"the attention of this device ({device.name}) does not take such KV: {_first_line(error)}"
        raise ConfigError.of("kv_cache_dtype", reason) from error


def _head_inputs(found: _Probed) -> HeadInputs:
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
    found: _Probed, links: StageLinks, group_layers: GroupLayers
) -> tuple[tuple[KVGroupSpec, ...], tuple[int, ...]]:
    """The groups of the layers of all stages, and how many layers of a block each stage has. One group if the model may
    be fused, as a fused decoder takes one block table, whether it is fused here or not: pods of a model hand over to
    each other. One group, too, if stages have different shares of the groups' blocks. A window that is as long as any
    text is none."""
    limit = _max_model_len(found.model.config.get_text_config())
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


def _warn_of_kernels(error: Exception) -> None:
    logger.warning("using torch's operators instead of compiled kernels: %s", _first_line(error))


def _probe_packed(source: _Source, model: Any, stage: Stage, *, compiles: bool) -> tuple[Any, Stage, ProbedModel]:
    """With the model's norms, experts and linear layers replaced where that is possible."""
    try:
        if source.device.pack(model):
            return model, stage, probe_model(model, stage)
    except EngineDeadError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a compiler raises, or the architecture reads a layer's weight
        if not isinstance(error, ModelLoadError):
            _warn_of_kernels(error)
        model, stage = _load(source)
        if compiles:
            source.device.compile_linears(model)
    return model, stage, probe_model(model, stage)


def _load(source: _Source) -> tuple[Any, Stage]:
    model, stage = _loaded(source)
    if source.quantized is not None:
        share = quantize_linears(model, source.quantized)
        if share < _EXPECTED_SHARE:  # experts, or layers that are not torch's linear ones
            logger.warning("quantization covers only %.0f %% of the weights of %s", 100 * share, type(model).__name__)
    return model, stage


def _loaded(source: _Source) -> tuple[Any, Stage]:
    directory = source.directory
    with unusable(directory):
        model_config = read_model_config(directory)
        raw_config = read_config(directory)
        check_direction(raw_config, model_config)
        has_text_head = read_checkpoint(directory, raw_config, model_config).has_text_head
        dtype = resolve_dtype(source.config, model_config, source.device)
        if source.is_cut and is_adapted(model_config):
            raise refused(f"the attention of {model_config.model_type} is not cut among ranks or stages")
        if not has_text_head and (source.is_cut or source.weight_format is not None):
            problem = "are supported for one rank only" if source.is_cut else "are not read from quantised checkpoints"
            raise ModelLoadError(f"models that only pool {problem}", param="model")
        if source.is_cut or source.weight_format is not None:
            model, stage = _load_parts(source, model_config, dtype)
        else:
            model = _from_pretrained(directory, model_config, dtype, has_text_head=has_text_head)
            stage = whole_model(model)
        tell_layers(model)
    return model.to(source.device.torch_device).eval().requires_grad_(False), stage


def _load_parts(source: _Source, model_config: Any, dtype: torch.dtype) -> tuple[Any, Stage]:
    """Loads a rank's part, or a model whose weights are quantised."""
    weight_format = source.weight_format
    if weight_format is not None and is_adapted(model_config):
        raise ConfigError.of("model", f"quantised weights of {model_config.model_type} are not supported")
    parts = (model_config, dtype, source.ranks, source.experts, source.links, weight_format)
    try:
        return load_rank(source.directory, source.weight_files, *parts)
    except ConfigError as error:
        if source.is_cut or isinstance(error, ModelLoadError):
            raise
        raise ConfigError.of("model", f"quantised weights of this model are not supported: {error.message}") from error


def read_model_config(directory: Path) -> Any:
    """The same for transformers. Raises ModelLoadError, and whatever transformers raises; see `unusable`."""
    model_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if getattr(model_config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{model_config.model_type} is an encoder-decoder, not a causal LM", param="model")
    return model_config


@contextlib.contextmanager
def unusable(directory: Path) -> Iterator[None]:
    """Turns what goes wrong with a model into a ModelLoadError."""
    try:
        yield
    except ConfigError:
        raise
    except KeyError as error:
        no_interface = error.args == (ATTENTION_NAME,)  # looked up in a table of the architecture's own
        reason = "its attention implementation cannot be replaced" if no_interface else f"it lacks {error}"
        raise ModelLoadError(f"{directory} cannot be served: {reason}", param="model") from error
    except Exception as error:  # third-party code over user files: any exception means unusable
        raise ModelLoadError(f"{directory} cannot be loaded: {_first_line(error)}", param="model") from error


def _from_pretrained(directory: Path, model_config: Any, dtype: torch.dtype, *, has_text_head: bool) -> Any:
    with _LOADING:
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


def _return_freed_memory() -> None:
    """Gives the memory of weights that were given up back to the system. glibc keeps it, other libraries may not."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resolve_dtype(config: ModelConfig, model_config: Any, device: Device) -> torch.dtype:
    """Returns the type of the setting; for "auto", one that suits checkpoint and device."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    own = getattr(model_config.get_text_config(), "dtype", None)
    return device.default_dtype(own if isinstance(own, torch.dtype) and own in _DTYPES.values() else torch.float32)


def _max_model_len(text_config: Any) -> int:
    """The model's limit; where rotary frequencies change with the length of the text, the length at which they do.

    Frequencies of a batch follow its longest sequence in transformers, so that beyond that length a request would
    answer differently beside a longer one, and keys cached before would not fit those computed after.
    """
    named = (getattr(text_config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    limit = int(next(filter(None, named), _DEFAULT_MAX_MODEL_LEN))
    rope = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in per_layer_type or [rope]:
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, int(parameters.get("original_max_position_embeddings") or limit))
    return limit


def _eos_token_ids(model: Any, text_config: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off progress bars and warnings; errors are raised."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
