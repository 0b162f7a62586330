"""A decoder of the Llama kind with few operators per layer: four linear layers, and compiled kernels between them.

    add + norm | q, k, v | norms of heads, rotary, cache, attention | o | add + norm | gate, up, SwiGLU | down

It is built from a loaded model's modules by their names and types; anything else in the model, and it is not built.
Whether the result is the same, `fuse_decoder` finds out by running both. The residual stream is float32 also where
weights and activations are bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from common.engine.devices.adapters import AdapterBatch, AdapterRows
from common.engine.devices.attention import (
    AttentionArgs,
    AttentionMetadata,
    HeadNorms,
    KVSpec,
    ProjectedArgs,
    ProjectionAttention,
    Rotary,
)
from common.engine.devices.operators import Adapt, AddNorm, Embed, Operators, PerToken
from common.engine.devices.ranks import Ranks
from common.engine.devices.rms_norm import RMSNorm, rms_norm_of
from common.engine.model.head_inputs import HeadInputs
from common.engine.model.lora import AdaptedLayers
from common.engine.model.parallel_layers import CollectedLinear, CutEmbedding
from common.engine.model.probe import ProbedModel
from common.engine.model.ranks import together
from common.engine.model.stages import Stage, device_of
from common.engine.quantization.base import AnyLinear, QuantizedLinear, can_join, joined_bias

_MODEL_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = {"SiLU", "SiLUActivation"}
_PROBED_BLOCK = 16  # block size of the cache that the probe runs with


class FusedDecoder:
    """A causal language model; called on one thread."""

    def __init__(
        self, model: Any, probed: ProbedModel, operators: Operators, stage: Stage, adapters: AdaptedLayers | None = None
    ) -> None:
        base = model.model
        self._operators = operators
        self._adapters = AdapterBatch(0, device_of(model)) if adapters is None else adapters.batch
        self._begin = _embedding(operators, base.embed_tokens) if stage.is_first else operators.resume(model.dtype)
        self._rotary = _RotaryTables(base.rotary_emb, device_of(model))
        parts = zip(stage.layers, probed.attention_args, probed.num_heads, strict=True)
        self._layers = []
        for index, args, num_heads in parts:
            adapt = None if adapters is None else partial(adapters.adapt, f"model.layers.{index}.")
            self._layers.append(_Layer.of(base.layers[index], args, num_heads, operators, adapt))
            base.layers[index] = nn.Identity()  # so that weights are never there twice
        self._kept: dict[int, torch.Tensor] = {}
        norm = operators.add_norm(cast("RMSNorm", rms_norm_of(base.norm)), model.dtype)
        self.head_inputs = HeadInputs()
        if stage.is_last:
            head = None if _is_identity(model.lm_head) else _linear(operators, model.lm_head)
            self._end = partial(_logits, norm, self.head_inputs, head)
        else:
            self._end = partial(_add, norm)
        model.lm_head = nn.Identity()

    def keep_inputs(self, places: dict[int, torch.Tensor]) -> None:
        """From now on the inputs of these layers are written to their places, [at least num_tokens, size]."""
        self._kept = places

    @torch.inference_mode()
    def __call__(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionMetadata,
        attention: ProjectionAttention,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [len(wanted), vocabulary] of the `wanted` ones of `num_tokens` tokens; None: of all. Of a stage that
        is not the last: the residual stream. `inputs` are token ids, or the residual stream of the stage before."""
        hidden, delta = self._begin(inputs)
        sizes = self._operators.split(len(inputs))
        attended = self._attend(hidden, delta, sizes, attention, batch, positions)
        if wanted is not None:  # of the last layer's other tokens, only keys and values are needed
            hidden, attended = hidden[wanted], attended[wanted]
            sizes = self._operators.split(len(wanted))
        parts = self._adapters.parts(sizes, are_wanted=wanted is not None)
        delta = self._in_parts(sizes, parts, self._layers[-1].finish, hidden, attended)
        return self._end(hidden, delta)

    def _attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        sizes: list[int],
        attention: ProjectionAttention,
        batch: AttentionMetadata,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """From the beginning to the last layer's attention, whose result it returns. In each layer the batch goes
        through in parts of `sizes` tokens, which stay in the cores' caches from one operator to the next."""
        attention.begin_parts(batch.split(sizes))
        rotaries = self._rotary.at(positions, max(batch.seq_lens)).split(sizes)
        streams = torch.split(hidden, sizes)
        adapters, adapted = self._adapters, self._adapters.parts(sizes)
        results = []
        for rows, stream, added in zip(adapted, streams, torch.split(delta, sizes), strict=True):
            adapters.rows = rows
            results.append(self._layers[0].project(stream, added))
        self._keep_inputs(0, streams)
        for index, layer in enumerate(self._layers):
            following = self._layers[index + 1] if index + 1 < len(self._layers) else None
            for part, (stream, rotary) in enumerate(zip(streams, rotaries, strict=True)):
                adapters.rows = adapted[part]
                result = attention.attend_projections(index, part, results[part], layer.projected, rotary)
                results[part] = result if following is None else layer.advance(following, stream, result)
            self._keep_inputs(index + 1, streams)
        return results[0] if len(results) == 1 else torch.cat(results)

    def _in_parts(
        self,
        sizes: list[int],
        adapted: Sequence[AdapterRows | None],
        compute: Callable[..., torch.Tensor],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """`compute` of so many rows of the tensors at a time."""
        results = []
        for rows, *part in zip(adapted, *(torch.split(tensor, sizes) for tensor in tensors), strict=True):
            self._adapters.rows = rows
            results.append(compute(*part))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _keep_inputs(self, index: int, streams: Sequence[torch.Tensor]) -> None:
        """Keeps the inputs of a layer that has projected them: until then, a part of them is in `delta`."""
        if (place := self._kept.get(index)) is not None:
            start = 0
            for stream in streams:
                self._operators.copy(stream, place[start : start + len(stream)])
                start += len(stream)

    def probe(self, inputs: torch.Tensor, spec: KVSpec) -> torch.Tensor:
        """Results in float32 of at most 16 tokens, computed as a prompt in two chunks and two
        decodes, so that each kernel takes part."""
        device = inputs.device
        kv_cache = torch.zeros((2, *spec.block_shape(_PROBED_BLOCK)), dtype=spec.cache_dtype, device=device)
        attention = self._operators.attention(kv_cache, spec.dtype)
        num_tokens = len(inputs)
        ends = [num_tokens // 2, num_tokens - 2, num_tokens - 1, num_tokens]
        outputs = []
        for start, end in zip([0, *ends], ends, strict=False):
            positions = torch.arange(start, end, device=device)
            batch = AttentionMetadata(
                num_decodes=int(end - start == 1),
                query_start=[0, end - start],
                seq_lens=[end],
                seq_lens_tensor=torch.tensor([end], device=device),
                block_tables=torch.ones((1, 1), dtype=torch.int64, device=device),
                slot_mapping=_PROBED_BLOCK + positions,
            )
            outputs.append(self(inputs[start:end], positions, batch, attention, None))
        return torch.cat(outputs).float()


def can_fuse(model: Any, operators: Operators, stage: Stage) -> bool:
    """True if the model consists of the parts that a fused decoder has, and the device has operators for them."""
    return has_known_parts(model, stage) and operators.supports(model)


def has_known_parts(model: Any, stage: Stage) -> bool:
    """True if the model consists of the parts that a fused decoder has."""
    base: Any = getattr(model, "model", None)
    if not _has_parts(model, {"model", "lm_head"}) or not _has_parts(base, _MODEL_PARTS):
        return False
    return (
        (not stage.is_first or type(_local(base.embed_tokens)) is nn.Embedding)
        and (not stage.is_last or _is_identity(model.lm_head) or _gives_all(model.lm_head))
        and all(_is_known_layer(base.layers[index]) for index in stage.layers)
        and all(rms_norm_of(norm) is not None for norm in _norms(base, stage))
    )


def fuse_decoder(
    model: Any,
    probed: ProbedModel,
    operators: Operators,
    ranks: Ranks,
    stage: Stage,
    adapters: AdaptedLayers | None = None,
) -> FusedDecoder:
    """Takes the layers out of a model that can be fused, and returns its fused form. Raises ModelLoadError if that
    computes something else. It fails on all ranks or on none."""
    with together(ranks):
        decoder = FusedDecoder(model, probed, operators, stage, adapters)
    probed.check("the fused decoder", decoder.probe(probed.inputs, replace(probed.spec, quantized=None)))
    if probed.spec.quantized is not None:
        probed.check_quantized("the fused decoder", decoder.probe(probed.inputs, probed.spec))
    return decoder


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: AddNorm
    qkv: PerToken
    projected: ProjectedArgs
    o: PerToken
    post_norm: AddNorm
    gated: PerToken  # silu(gate) * up
    down: PerToken

    @classmethod
    def of(
        cls,
        layer: Any,
        args: AttentionArgs,
        num_heads: int,
        operators: Operators,
        adapt: Callable[[Mapping[str, AnyLinear], PerToken], PerToken] | None,
    ) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        dtype = attention.q_proj.weight.dtype

        def adapted(module: str, *names: str) -> Adapt | None:
            layers = {
                f"{module}.{name}": cast("AnyLinear", _local(getattr(getattr(layer, module), name))) for name in names
            }
            return None if adapt is None else partial(adapt, layers)

        qkv, adapt_qkv = [attention.q_proj, attention.k_proj, attention.v_proj], adapted("self_attn", *_QKV)
        adapt_gated = adapted("mlp", "gate_proj", "up_proj")
        return cls(
            input_norm=operators.add_norm(cast("RMSNorm", rms_norm_of(layer.input_layernorm)), dtype),
            qkv=_adapted(operators.linear(_joined(qkv)), adapt_qkv),
            projected=ProjectedArgs(num_heads, args, _head_norms(attention)),
            o=_linear(operators, attention.o_proj, adapted("self_attn", "o_proj")),
            post_norm=operators.add_norm(cast("RMSNorm", rms_norm_of(layer.post_attention_layernorm)), dtype),
            gated=operators.gated_linear(_joined([mlp.gate_proj, mlp.up_proj]), adapt_gated),
            down=_linear(operators, mlp.down_proj, adapted("mlp", "down_proj")),
        )

    def project(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values; `delta` of the layer before is added to the residual stream."""
        return self.qkv(self.input_norm(hidden, delta))

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Computes all that follows attention; returns what is still to be added to the residual stream."""
        delta = self.o(attended)
        return self.down(self.gated(self.post_norm(hidden, delta)))

    def advance(self, following: _Layer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """From this layer's attention to the projections of the one that follows."""
        return following.project(hidden, self.finish(hidden, attended))


class _RotaryTables:
    """Cosines and sines by position, as the model's own module computes them; they grow with the positions seen."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._cosines = self._sines = torch.empty(0)

    def at(self, positions: torch.Tensor, length: int) -> Rotary:
        """Returns the tables for positions below `length`."""
        if length > len(self._cosines):
            self._grow(max(length, 2 * len(self._cosines), 256))
        return Rotary(self._cosines, self._sines, positions)

    def _grow(self, length: int) -> None:
        like = torch.empty(0, dtype=torch.float32, device=self._device)  # the module rounds to its type
        cosines, sines = self._module(like, torch.arange(length, device=self._device)[None])
        self._cosines, self._sines = cosines[0].contiguous(), sines[0].contiguous()


def _is_known_layer(layer: Any) -> bool:
    if not _has_parts(layer, _LAYER_PARTS) or not _has_parts(layer.mlp, _MLP_PARTS):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if not (_has_parts(attention, _ATTENTION_PARTS) or _has_parts(attention, _ATTENTION_PARTS | _HEAD_NORMS)):
        return False
    projections, gates = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    is_known = all(map(_is_linear, projections + gates)) and can_join(projections) and can_join(gates)
    is_known = is_known and _gives_all(attention.o_proj) and _gives_all(mlp.down_proj)
    return type(mlp.act_fn).__name__ in _SILU and is_known


def _is_identity(module: nn.Module) -> bool:
    """True for what stands in the place of a head that the model has not."""
    return type(module) is nn.Identity


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or isinstance(module, QuantizedLinear)


def _gives_all(module: nn.Module) -> bool:
    """True for a linear layer, also one whose outputs ranks put together."""
    return _is_linear(_local(module)) and getattr(module, "takes", None) is None


def _local(module: nn.Module) -> nn.Module:
    """A rank's part of a layer; the layer, if there are no parts."""
    return module.local if isinstance(module, CollectedLinear | CutEmbedding) else module


def _adapted(linear: PerToken, adapt: Adapt | None) -> PerToken:
    return linear if adapt is None else adapt(linear)


def _linear(operators: Operators, module: nn.Module, adapt: Adapt | None = None) -> PerToken:
    """The layer, with the outputs of all ranks."""
    local = _adapted(operators.linear(cast("AnyLinear", _local(module))), adapt)
    if not isinstance(module, CollectedLinear):
        return local
    collect = module.collect  # without the module, whose weights may be given up
    return lambda inputs: collect(local(inputs))


def _embedding(operators: Operators, module: nn.Module) -> Embed:
    """The embedding, with the tokens of all ranks."""
    table = cast("nn.Embedding", _local(module)).weight.detach()
    if not isinstance(module, CutEmbedding):
        return operators.embed(table)
    local, collect = operators.embed(table, module.first), module.collect  # without the module

    def embed(token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, delta = local(token_ids)
        return collect(hidden), delta

    return embed


def _logits(
    norm: AddNorm, inputs: HeadInputs, head: PerToken | None, hidden: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    rows = inputs(norm(hidden, delta))
    return rows if head is None else head(rows)


def _add(norm: AddNorm, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The residual stream for the next stage. By the kernel for both, whose norm is of no use here."""
    norm(hidden, delta)
    return hidden


def _has_parts(module: Any, names: set[str]) -> bool:
    """True if these are all that the module consists of."""
    if not isinstance(module, nn.Module) or dict(module.named_parameters(recurse=False)):
        return False
    return {name for name, _ in module.named_children()} == names


def _norms(base: Any, stage: Stage) -> list[nn.Module]:
    found: list[nn.Module] = [base.norm]
    for layer in (base.layers[index] for index in stage.layers):
        found += [layer.input_layernorm, layer.post_attention_layernorm]
        found += [norm for name, norm in layer.self_attn.named_children() if name in _HEAD_NORMS]
    return found


def _head_norms(attention: Any) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    query, key = cast("RMSNorm", rms_norm_of(attention.q_norm)), cast("RMSNorm", rms_norm_of(attention.k_norm))
    return HeadNorms(query.weight, key.weight, query.epsilon)


def _joined(linears: Sequence[AnyLinear]) -> AnyLinear:
    """One linear layer with the outputs of several. Their weights are given up."""
    if isinstance(linears[0], QuantizedLinear):
        return type(linears[0]).joined(cast("Sequence[QuantizedLinear]", linears))
    weight = torch.cat([linear.weight for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if (bias := joined_bias(linears)) is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined
