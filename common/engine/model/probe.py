"""Finds out what a loaded model caches, and whether our attention computes the same as its own.

A few tokens are computed twice: at once with transformers' own code, and in parts, the last two of one token, through a
recording attention function that computes plain causal attention from the arguments that we know and from the keys and
values of all parts, and with the states of layers that keep one. The recording gives the attention modules in layer
order and the shapes of keys, values and states; equal logits prove that the known arguments, the KV and the states
suffice (no bidirectional prefix, no state elsewhere, no positions that are counted from the start of each pass).
Windows are longer than that; so it is done once more with a short one, as a model's mask may have a window of which its
attention is not told.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import Cache

from common.engine.contract.kv_groups import QUANTIZED_KV
from common.engine.devices.attention import AttentionArgs, KVSpec, name_of
from common.engine.devices.kv_quantization import rounded
from common.engine.devices.recurrences import Recurrences
from common.engine.model.adapters import needs_positions, set_attention
from common.engine.model.attention_hook import (
    ATTENTION_NAME,
    attention_args,
    clear_layer_attention,
    expansion_of,
    set_layer_attention,
)
from common.engine.model.latents import Latents
from common.engine.model.stages import Stage, check_stage, device_of
from common.engine.model.states import (
    StateBatch,
    StateHook,
    StateLayer,
    StateRun,
    States,
    StateTensor,
    state_modules,
)
from common.engine.quantization.absent_weight import WeightReadError, name_absent_weights
from common.errors import ConfigError, ModelLoadError

logger = logging.getLogger(__name__)

Checked = TypeVar("Checked")

_NUM_TOKENS = 12
_NUM_PROMPTS = 3  # of which one has equal results: see `_probe`
_PARTS = (range(6), range(6, 10), range(10, 11), range(11, _NUM_TOKENS))  # of these; the last two are decodes
_SHORT_WINDOW = 4
_WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size")
_MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}  # of the logits
# Added to it for models whose layers round their inputs: of numbers that differ in their last bits, some are rounded
# the other way, of which the next layer makes more.
_MAX_ROUNDED_ERROR = 0.2
_WINDOWED = frozenset({"sliding_attention", "chunked_attention"})
_SUPPORTED_LAYER_TYPES = _WINDOWED | {"full_attention", "attention"}
_BESIDE_STATES = frozenset({"linear_attention", "conv", "mamba", "hybrid", "mlp", "moe"})  # if modules keep states
_KNOWN_ARGUMENTS = frozenset(
    {"scaling", "sliding_window", "attention_chunk_size", "softcap", "s_aux", "alibi_slopes", "dropout", "position_ids"}
)


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The findings of the recording."""

    spec: KVSpec
    attention_modules: list[torch.nn.Module]  # in layer order
    attention_args: list[AttentionArgs]  # the same
    num_heads: list[int]  # the same
    state_layers: list[StateLayer]  # in layer order
    inputs: torch.Tensor  # that were computed, see Stage.forward
    outputs: torch.Tensor  # the results in float32, of the model's own attention
    max_error: float  # of the norm, that computing the same in another order may make
    quantized_outputs: torch.Tensor | None = None  # the same with quantised KV, if the spec's is

    def check(self, name: str, outputs: torch.Tensor) -> None:
        """Raises ModelLoadError if `outputs` are not those of the model's own attention."""
        _check_equal(name, outputs, self.outputs, self.max_error)

    def check_quantized(self, name: str, outputs: torch.Tensor) -> None:
        """Raises ModelLoadError if `outputs` are not those of quantised KV. Where some numbers are rounded the other
        way, they differ by less than rounding them all makes."""
        assert self.quantized_outputs is not None
        limit = self.max_error + _relative_error(self.quantized_outputs, self.outputs)
        _check_equal(f"{name} with quantised KV", outputs, self.quantized_outputs, limit)


@dataclass(frozen=True, slots=True)
class _Call:
    module: torch.nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    args: AttentionArgs


def probe_model(model: Any, stage: Stage) -> ProbedModel:
    """Runs the probe, with latents in place of keys and values where these compute the same. `model` is a transformers
    causal LM, or a stage of one. Raises ModelLoadError if it cannot be served, and WeightReadError."""
    name_absent_weights(model)
    latents = Latents(model)
    try:
        probed = _probe(model, stage)
    except ModelLoadError:
        if not latents:
            raise
        latents.undo()
        return _probe(model, stage)
    latents.settle()
    return probed


def quantize_kv(model: Any, stage: Stage, probed: ProbedModel, dtype: torch.dtype) -> ProbedModel:
    """Computes the parts over KV that is quantised, and returns the findings for such KV. Raises ConfigError if the
    model keeps none that can be."""
    name, spec = type(model).__name__, probed.spec
    setting = next(setting for setting, kept in QUANTIZED_KV.items() if kept == name_of(dtype))
    if not spec.num_layers:
        raise ConfigError.of("kv_cache_dtype", f"{setting}, but {name} keeps no keys and values")
    if not spec.value_head_dim:
        raise ConfigError.of("kv_cache_dtype", f"{setting}, but {name} keeps latents, which are not quantised")
    if spec.head_dim % 2:
        raise ConfigError.of("kv_cache_dtype", f"{setting}, but {name} has heads of {spec.head_dim}, an odd number")
    outputs = _forward_parts(model, stage, probed.inputs, _CachedAttention(dtype))
    return replace(probed, spec=replace(spec, quantized=dtype), quantized_outputs=outputs)


def check_recurrences(model: Any, stage: Stage, probed: ProbedModel, recurrences: Recurrences) -> None:
    """Computes the parts with states that `recurrences` write. Raises ModelLoadError if the results differ with each
    prompt, see `_probe`, and whatever `recurrences` raise."""

    def check(number: int) -> None:
        own = _probe_prompt(model, stage, number) if number else probed
        outputs = _forward_parts(model, stage, own.inputs, _CachedAttention(), recurrences)
        own.check(type(model).__name__, outputs)

    _try_prompts(check)


def _forward_parts(
    model: Any, stage: Stage, inputs: torch.Tensor, attention: _CachedAttention, recurrences: Recurrences | None = None
) -> torch.Tensor:
    """Results in float32 of all parts, each after those before it."""
    states = state_modules(model)
    hook = StateHook(states, _RecordedStates(len(states)), recurrences)
    modules = list(model.modules())
    try:
        for module in modules:
            set_layer_attention(module, attention)
        return torch.cat([_forward_part(model, stage, inputs, part, hook) for part in _PARTS])
    finally:
        hook.remove()
        for module in modules:
            clear_layer_attention(module)


def check_linears(model: Any, stage: Stage, probed: ProbedModel) -> None:
    """Computes all tokens at once, with linear layers that were replaced after the probe. Raises ModelLoadError if the
    results differ, and whatever the model raises."""
    states = state_modules(model)
    hook = StateHook(states, _RecordedStates(len(states)))
    attention = _CachedAttention()
    modules = list(model.modules())
    try:
        for module in modules:
            set_layer_attention(module, attention)
        outputs = _forward_part(model, stage, probed.inputs, range(len(probed.inputs)), hook)
    finally:
        hook.remove()
        for module in modules:
            clear_layer_attention(module)
    probed.check(type(model).__name__, outputs)


class _DifferentResultsError(ModelLoadError):
    """Logits, or hidden states of a stage, differ."""


def _probe(model: Any, stage: Stage) -> ProbedModel:
    return _try_prompts(lambda number: _probe_prompt(model, stage, number))


def _try_prompts(check: Callable[[int], Checked]) -> Checked:
    """Tries another prompt if results differ: rounding may decide which experts a token gets, while a real defect shows
    with every prompt."""
    for number in range(_NUM_PROMPTS - 1):
        try:
            return check(number)
        except _DifferentResultsError as error:
            logger.info("%s; trying another prompt", error)
    return check(_NUM_PROMPTS - 1)


def _probe_prompt(model: Any, stage: Stage, number: int) -> ProbedModel:
    name = type(model).__name__
    text_config = model.config.get_text_config()
    layer_types = list(getattr(text_config, "layer_types", None) or [])[stage.layers.start : stage.layers.stop]
    states = state_modules(model)
    if states and not hasattr(Cache, "get_conv_state"):
        raise ModelLoadError(
            f"{name} has layers that keep a state, for which transformers must be 5.21 at least", param="model"
        )
    supported = _SUPPORTED_LAYER_TYPES | _BESIDE_STATES if states else _SUPPORTED_LAYER_TYPES
    unsupported = sorted(set(layer_types) - supported)
    if unsupported:
        raise ModelLoadError(f"{name} has {unsupported[0]} layers, which cannot be served", param="model")
    if needs_positions(model) and not states and "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelLoadError(f"{name} takes no positions, so that a prompt cannot be computed in parts", param="model")
    calls: list[_Call] = []
    attention = _CachedAttention()

    def record(module: torch.nn.Module, query: Any, key: Any, value: Any, **arguments: Any) -> torch.Tensor:
        unknown = [name for name, given in arguments.items() if _is_unknown(name, given)]
        if unknown or not getattr(module, "is_causal", True):
            what = f"takes {unknown[0]!r}" if unknown else "is not causal"
            raise ModelLoadError(f"{name}: its attention {what}, which cannot be served", param="model")
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        args = attention_args(query.shape[3], expansion=expansion_of(module), **arguments)
        if is_first:
            head_dim, value_head_dim = key.shape[3], value.shape[3]
            if args.expansion is not None:
                head_dim, value_head_dim = head_dim + value_head_dim, 0
            calls.append(_Call(module, num_heads, num_kv_heads, head_dim, value_head_dim, args))
        return attention(module, query, key, value, **arguments)

    is_first = True
    store, outputs_of_parts = _RecordedStates(len(states)), []
    hook = StateHook(states, store)
    modules = list(model.modules())
    inputs = _inputs_of(model, stage, int(text_config.vocab_size), number)
    limit = getattr(text_config, "max_position_embeddings", math.inf)
    sizes = {name: getattr(text_config, name, None) for name in _WINDOW_SETTINGS}
    windows = {name: size for name, size in sizes.items() if size is not None and size < limit}
    try:
        set_attention(model, ATTENTION_NAME)
        for module in modules:
            set_layer_attention(module, record)
        for part in _PARTS:
            outputs_of_parts.append(_forward_part(model, stage, inputs, part, hook))
            is_first = False
        outputs = torch.cat(outputs_of_parts)
        spec = _spec_of(name, calls, stage, layer_types, states)
        max_error = _max_error(modules, spec.dtype)
        hook.remove()
        set_attention(model, "eager")
        expected = _forward(model, stage, inputs)
        check_stage(model, stage)
        if windows:
            _set(text_config, dict.fromkeys(windows, _SHORT_WINDOW))
            shortened = _forward(model, stage, inputs)
            set_attention(model, ATTENTION_NAME)
            for module in modules:
                set_layer_attention(module, _attend_shortened)
            _check_equal(name, _forward(model, stage, inputs), shortened, max_error)
    except (ModelLoadError, WeightReadError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, NotImplementedError) as error:
        raise ModelLoadError(f"{name} cannot run with paged attention: {_first_line(error)}", param="model") from error
    finally:
        hook.remove()
        _set(text_config, windows)
        for module in modules:
            clear_layer_attention(module)
        set_attention(model, ATTENTION_NAME)
    _check_equal(name, outputs, expected, max_error)
    return ProbedModel(
        spec,
        [call.module for call in calls],
        [call.args for call in calls],
        [call.num_heads for call in calls],
        [StateLayer(module, store.tensors(layer)) for layer, module in enumerate(states)],
        inputs,
        expected,
        max_error,
    )


class _CachedAttention:
    """Plain attention of modules to the keys and values of all parts so far."""

    def __init__(self, quantized: torch.dtype | None = None) -> None:
        """`quantized`: type of the numbers to which keys and values are rounded; None: they are not."""
        self._quantized = quantized
        self._cached: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, module: torch.nn.Module, query: Any, key: Any, value: Any, **arguments: Any) -> torch.Tensor:
        """See LayerAttention."""
        if self._quantized is not None:
            key, value = (rounded(each, self._quantized) for each in (key, value))
        before = self._cached.get(module)
        if before is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))
        self._cached[module] = key, value
        args = attention_args(query.shape[3], expansion=expansion_of(module), **arguments)
        return _attend(query, key, value, args)


class _RecordedStates:
    """See StateStore. The states of one sequence, whatever the slot."""

    def __init__(self, num_layers: int) -> None:
        self._states: list[States] = [{} for _ in range(num_layers)]

    def read(self, layer: int, slots: torch.Tensor) -> States:
        """See StateStore."""
        return {key: state.clone() for key, state in self._states[layer].items()}

    def write(self, layer: int, slots: torch.Tensor, states: States) -> None:
        """See StateStore."""
        self._states[layer] = {key: state.contiguous() for key, state in states.items()}

    def slots(self, layer: int) -> States:
        """See StateStore. There is one."""
        return dict(self._states[layer])

    def tensors(self, layer: int) -> tuple[StateTensor, ...]:
        """The tensors of a layer's state."""
        return tuple(
            StateTensor(key, tuple(state.shape[1:]), state.dtype) for key, state in self._states[layer].items()
        )


def _batch_of(part: range, device: torch.device) -> StateBatch:
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    if len(part) == 1:
        return StateBatch(slot, slot, slot, [], is_all_decodes=True)
    return StateBatch(slot[:0], slot[:0], slot[:0], [StateRun(0, len(part), slot if part.start else None, slot)])


def _spec_of(
    name: str, calls: list[_Call], stage: Stage, layer_types: list[str], states: list[torch.nn.Module]
) -> KVSpec:
    if not calls and states:
        return KVSpec(0, 1, 0, 0, next(iter(states[0].parameters())).dtype)
    if not calls:
        raise ModelLoadError(f"{name} does not use transformers' attention interface", param="model")
    if (len(calls) != len(stage.layers) and not states) or len({id(call.module) for call in calls}) != len(calls):
        raise ModelLoadError(
            f"{name} has {len(stage.layers)} layers but {len(calls)} attention calls; "
            "only models with one attention per layer can be served",
            param="model",
        )
    shapes = {(call.num_kv_heads, call.head_dim, call.value_head_dim) for call in calls}
    if len(shapes) > 1:
        raise ModelLoadError(f"{name} caches different shapes per layer: {sorted(shapes)}", param="model")
    for layer, layer_type, call in zip(stage.layers, [] if states else layer_types, calls, strict=False):
        if call.args.window is None:
            found = None
        else:
            found = "chunked_attention" if call.args.window.is_chunked else "sliding_attention"
        if found != (layer_type if layer_type in _WINDOWED else None):
            raise ModelLoadError(f"{name}: layer {layer} is {layer_type} but its attention disagrees", param="model")
    num_kv_heads, head_dim, value_head_dim = shapes.pop()
    if value_head_dim > head_dim:
        raise ModelLoadError(f"{name}: values of {value_head_dim} are wider than keys of {head_dim}", param="model")
    dtype = next(iter(calls[0].module.parameters())).dtype
    return KVSpec(len(calls), num_kv_heads, head_dim, value_head_dim, dtype)


def _inputs_of(model: Any, stage: Stage, vocab_size: int, number: int) -> torch.Tensor:
    if stage.is_first:
        first = number * _NUM_TOKENS
        return torch.arange(first, first + _NUM_TOKENS, device=device_of(model)) % vocab_size
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(_NUM_TOKENS, stage.hidden_size, generator=generator)
    return hidden.to(device_of(model), model.dtype)


def _forward(model: Any, stage: Stage, inputs: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Results in float32 of inputs at the positions from `first` on, see Stage.forward."""
    positions = torch.arange(first, first + len(inputs), device=inputs.device)
    with torch.inference_mode():
        return stage.forward(model, inputs, positions[None], 0).float()


def _forward_part(model: Any, stage: Stage, inputs: torch.Tensor, part: range, hook: StateHook) -> torch.Tensor:
    """Results of a part of the inputs, after those before it."""
    hook.begin_step(_batch_of(part, inputs.device))
    return _forward(model, stage, inputs[part.start : part.stop], part.start)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, args: AttentionArgs) -> torch.Tensor:
    """Causal attention of a sequence's last tokens, [1, heads, tokens, head_dim] -> [1, tokens, heads, value head_dim].
    With an expansion, keys and values are latents and rotary parts."""
    if args.expansion is not None:
        key, value = (each[None] for each in args.expansion.expand(torch.cat([key, value], dim=3)[0, 0]))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * args.scale
    if args.softcap is not None:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    num_queries, num_tokens = scores.shape[2:]
    positions = torch.arange(num_tokens, device=query.device)
    if args.slopes is not None:
        scores = scores + args.slopes.view(-1, 1, 1) * positions
    asking = positions[num_tokens - num_queries :, None]
    hidden = positions > asking
    if args.window is not None:
        hidden |= positions < args.window.first(asking)
    scores = scores.masked_fill(hidden, -torch.inf)
    if args.sinks is not None:
        sinks = args.sinks.view(1, -1, 1, 1).expand(1, -1, num_queries, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :num_tokens].to(value.dtype)
    out: torch.Tensor = weights @ value
    return out.transpose(1, 2).contiguous()


def _attend_shortened(module: torch.nn.Module, query: Any, key: Any, value: Any, **arguments: Any) -> torch.Tensor:
    args = attention_args(query.shape[3], expansion=expansion_of(module), **arguments)
    if args.window is not None:
        args = replace(args, window=args.window._replace(size=_SHORT_WINDOW))
    return _attend(query, key, value, args)


def _set(config: Any, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(config, name, value)


def _is_unknown(name: str, given: Any) -> bool:
    """True for an argument that may change the result. Flags only ask for more output."""
    if name == "is_causal":
        return given is False
    return name not in _KNOWN_ARGUMENTS and given is not None and not isinstance(given, bool)


def _max_error(modules: Sequence[torch.nn.Module], dtype: torch.dtype) -> float:
    rounds = any(getattr(module, "rounds_inputs", False) for module in modules)
    return _MAX_RELATIVE_ERROR[dtype] + (_MAX_ROUNDED_ERROR if rounds else 0.0)


def _relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / (expected - expected.mean()).norm().clamp(min=1e-12))


def _check_equal(name: str, logits: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    error = _relative_error(logits, expected)
    if not error <= limit:  # also refuses NaN
        raise _DifferentResultsError(
            f"{name}: paged attention differs from the model's own attention (relative error {error:.2g})",
            param="model",
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
