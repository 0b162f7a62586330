"""Chooses the kernels by which a model runs: the fastest that compute what its own code does."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from common.engine.config import Kernels
from common.engine.devices.base import Device, RowSampler
from common.engine.devices.recurrences import NoKernelError, Recurrences
from common.engine.model.checkpoint import first_line
from common.engine.model.fused_decoder import FusedDecoder, can_fuse, fuse_decoder, has_known_parts
from common.engine.model.lora import AdaptedLayers
from common.engine.model.probe import ProbedModel, check_linears, check_recurrences, probe_model, quantize_kv
from common.engine.model.ranks import together
from common.engine.model.source import ModelSource, load_weights
from common.engine.model.stages import Stage
from common.engine.quantization.absent_weight import WeightReadError
from common.errors import ConfigError, EngineDeadError, ModelLoadError

logger = logging.getLogger(__name__)


class PreparedModel(NamedTuple):
    """A model with the kernels by which it runs."""

    model: Any
    stage: Stage
    probed: ProbedModel
    decoder: FusedDecoder | None
    kernels: Kernels
    kernels_failed: bool
    is_fusable: bool  # whatever the device can do
    recurrences: Recurrences | None = None
    adapted: AdaptedLayers | None = None  # layers that adapters may change


def prepare_model(source: ModelSource) -> PreparedModel:
    """Loads a model and compares what each kind of kernels computes with what its own code does. Kernels that differ,
    or that cannot be compiled, are not used, and a log line says so. Raises ModelLoadError, or ConfigError if a setting
    asks for kernels that there are not."""
    while True:
        try:
            return _prepare(source)
        except WeightReadError as error:
            if error.layer in source.read_layers:  # the checkpoint's own weights are quantised
                reason = f"quantised weights of this model are not supported: {error}"
                raise ModelLoadError(reason, param="model") from None
            logger.info("some linear layers are neither packed nor quantised: %s", error)
            source = source._replace(read_layers=source.read_layers | {error.layer})


def _prepare(source: ModelSource) -> PreparedModel:
    device, batch_invariant = source.device, source.config.batch_invariant
    model, stage = load_weights(source)
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
            return PreparedModel(
                model, stage, probed, decoder, "fused", kernels_failed=False, is_fusable=True, adapted=adapted
            )
        except EngineDeadError:
            raise
        except Exception as error:  # the decoder differs, or whatever a compiler raises
            if batch_invariant:
                reason = f"the compiled kernels cannot be used: {first_line(error)}"
                raise ConfigError.of("batch_invariant", reason) from error
            _warn_of_kernels(error)
            failed = True
            model, stage = load_weights(source)
    if not failed:
        try:
            device.compile_linears(model)
        except Exception as error:  # noqa: BLE001  the kernels differ, or whatever a compiler raises
            _warn_of_kernels(error)
            failed = True
            model, stage = load_weights(source)
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
    return PreparedModel(model, stage, probed, None, kernels, failed, is_fusable, recurrences, adapted)


def _wrap_linears(source: ModelSource, model: Any, stage: Stage, probed: ProbedModel) -> AdaptedLayers | None:
    """Lets adapters change the linear layers of a model that runs its own code; None if that changes the model."""
    adapted = source.adapted_layers()
    if adapted is None or adapted.is_cut:
        return None
    adapted.wrap_modules(model)
    try:
        check_linears(model, stage, probed)
    except Exception as error:  # noqa: BLE001  third-party code: whatever it raises, the model is served without
        logger.warning("%s takes no adapters: %s", type(model).__name__, first_line(error))
        adapted.unwrap_modules(model)
        return None
    adapted.settle(model, len(probed.inputs))
    return adapted


def _with_kv_dtype(source: ModelSource, model: Any, stage: Stage, probed: ProbedModel) -> ProbedModel:
    return probed if source.kv_dtype is None else quantize_kv(model, stage, probed, source.kv_dtype)


def _check_quantized(device: Device, probed: ProbedModel) -> None:
    """Raises ConfigError if the device's attention without kernels does not take quantised KV."""
    try:
        device.check_quantized(probed.spec, probed.num_heads, probed.attention_args)
    except Exception as error:
        reason = f"the attention of this device ({device.name}) does not take such KV: {first_line(error)}"
        raise ConfigError.of("kv_cache_dtype", reason) from error


def _warn_of_kernels(error: Exception) -> None:
    logger.warning("using torch's operators instead of compiled kernels: %s", first_line(error))


def _probe_packed(source: ModelSource, model: Any, stage: Stage, *, compiles: bool) -> tuple[Any, Stage, ProbedModel]:
    """With the model's norms, experts and linear layers replaced where that is possible."""
    try:
        if source.device.pack(model):
            return model, stage, probe_model(model, stage)
    except (EngineDeadError, WeightReadError):
        raise
    except Exception as error:  # noqa: BLE001  whatever a compiler raises
        _warn_of_kernels(error)
        model, stage = load_weights(source)
        if compiles:
            source.device.compile_linears(model)
    return model, stage, probe_model(model, stage)


def find_row_sampler(device: Device, vocab_size: int, dtype: torch.dtype) -> tuple[RowSampler | None, bool]:
    """And whether it failed."""
    try:
        return device.row_sampler(vocab_size, dtype), False
    except Exception as error:  # noqa: BLE001  the kernels differ, or whatever a compiler raises
        logger.warning("sampling with torch's operators: %s", first_line(error))
        return None, True
