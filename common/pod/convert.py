"""Conversion between messages of `baton.v1` and those of the engine. Requests are validated here, against the model
that this pod serves, and nowhere else."""

from __future__ import annotations

import dataclasses
import math

import msgspec

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.messages import (
    AddRequest,
    DraftFigures,
    EngineSpec,
    KVTransferParams,
    PhaseSeconds,
    RankFigures,
    RequestOutput,
)
from common.errors import BatonError, ErrorCode, InvalidRequestError, PromptTooLongError, make_error
from common.pb import common_pb2, pods_pb2
from common.rpc.convert import logprobs_from_pb, pooling_from_pb, sampling_from_pb
from common.types import (
    ADAPTER_DIGEST_BYTES,
    NO_SAMPLING,
    ExtraKey,
    PromptPositions,
    RequestId,
    SampledToken,
)
from common.types.validation import validate_extra_keys, validate_positions, validate_prompt, validate_sampling


def add_request_from_pb(
    message: common_pb2.EngineRequest, spec: EngineSpec, transfer: KVTransferParams | None = None
) -> AddRequest:
    """Converts a request to the engine's message.

    Raises InvalidRequestError or PromptTooLongError that names the field.
    """
    if not message.request_id:
        raise InvalidRequestError("request_id is empty", param="request_id")
    pooling = pooling_from_pb(message.pooling) if message.HasField("pooling") else None
    spec.pooling.check(pooling)
    sampling = sampling_from_pb(message.sampling) if pooling is None else NO_SAMPLING
    validate_sampling(sampling, vocab_size=spec.vocab_size)
    if sampling.vllm_xargs and not spec.logits_processors:
        raise InvalidRequestError("vllm_xargs: the pods have no logits processors", param="vllm_xargs")
    prompt = list(message.prompt_token_ids)
    validate_prompt(
        prompt,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        max_tokens=0 if pooling is not None else sampling.max_tokens,
        param="prompt_token_ids",
    )
    if pooling is not None:
        spec.pooling.check_length(pooling, len(prompt))
    extra_keys = [ExtraKey(key.start, key.end, key.digest) for key in message.extra_keys]
    validate_extra_keys(extra_keys, len(prompt))
    positions = [each.values for each in message.positions]
    if positions:
        validate_positions(positions, len(prompt), spec.position_dims)
    if message.adapter and len(message.adapter) != ADAPTER_DIGEST_BYTES:
        raise InvalidRequestError(f"adapter is not a digest of {ADAPTER_DIGEST_BYTES} bytes", param="adapter")
    outputs = list(message.output_token_ids) if pooling is None else []
    if outputs and max(outputs) >= spec.vocab_size:
        raise InvalidRequestError("output_token_ids has a token id outside the vocabulary", param="output_token_ids")
    if len(outputs) >= sampling.max_tokens:
        raise PromptTooLongError(
            f"{len(outputs)} of max_tokens {sampling.max_tokens} tokens are generated already", param="output_token_ids"
        )
    return AddRequest(
        request_id=RequestId(message.request_id),
        prompt_token_ids=prompt,
        sampling=sampling,
        output_token_ids=outputs,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        extra_keys=extra_keys,
        positions=PromptPositions.of(positions) if positions else None,
        priority=message.priority,
        target_itl_s=_target_itl_s(message.target_itl_ms),
        tenant=message.tenant,
        transfer=transfer,
        pooling=pooling,
        data_parallel_rank=_data_parallel_rank(message, spec),
    )


def _data_parallel_rank(message: common_pb2.EngineRequest, spec: EngineSpec) -> int | None:
    """None: the pod may choose."""
    if not message.HasField("data_parallel_rank"):
        return None if spec.data_parallel_size > 1 else 0
    if message.data_parallel_rank >= spec.data_parallel_size:
        raise InvalidRequestError(
            f"data_parallel_rank is {message.data_parallel_rank}, but the pod has {spec.data_parallel_size} engines",
            param="data_parallel_rank",
        )
    return message.data_parallel_rank


def error_of(output: RequestOutput) -> BatonError:
    """The error of an output that has ended with one."""
    return make_error(ErrorCode.from_number(output.error_code), output.error, param=output.error_param or None)


def sampled_token_from_pb(token_id: int, logprobs: common_pb2.PositionLogprobs | None) -> SampledToken:
    """Converts a token and its log probabilities, if it has any."""
    return SampledToken(token_id, None if logprobs is None else logprobs_from_pb(logprobs))


def layout_to_pb(layout: KVLayout) -> pods_pb2.KVLayout:
    """Converts the layout of a KV cache."""
    groups = [pods_pb2.KVGroup(**dataclasses.asdict(group)) for group in layout.groups]
    return pods_pb2.KVLayout(
        block_size=layout.block_size,
        groups=groups,
        tensor_parallel_size=layout.tensor_parallel_size,
        layers_by_stage=layout.layers_by_stage,
        num_feature_layers=layout.num_feature_layers,
    )


def layout_from_pb(message: pods_pb2.KVLayout) -> KVLayout:
    """Converts the layout of a peer's KV cache. It is not checked: `map_layouts` compares it with our own."""
    groups = tuple(
        KVGroupSpec(
            tuple(group.layers),
            group.num_kv_heads,
            group.head_dim,
            group.value_head_dim,
            group.dtype,
            group.kind,
            group.window if group.HasField("window") else None,
            group.state_bytes,
        )
        for group in message.groups
    )
    return KVLayout(
        message.block_size,
        groups,
        message.tensor_parallel_size,
        tuple(message.layers_by_stage),
        message.num_feature_layers,
    )


def phase_seconds_to_pb(phases: PhaseSeconds) -> pods_pb2.PhaseSeconds:
    """Converts the seconds of each phase of the step loop."""
    return pods_pb2.PhaseSeconds(**msgspec.structs.asdict(phases))


def draft_figures_to_pb(figures: DraftFigures) -> pods_pb2.DraftStats:
    """Converts what routers show of speculative decoding."""
    return pods_pb2.DraftStats(
        num_verified=figures.num_verified,
        num_accepted=figures.num_accepted,
        num_verifications=figures.num_verifications,
    )


def rank_figures_to_pb(figures: RankFigures) -> pods_pb2.RankStats:
    """Converts what a rank told of itself."""
    return pods_pb2.RankStats(
        rank=figures.rank,
        pid=figures.pid,
        device=figures.device,
        resident_bytes=figures.resident_bytes,
        num_steps=figures.num_steps,
        computing_s=figures.computing_s,
        delayed_s=figures.delayed_s,
        waiting_s=figures.waiting_s,
    )


def _target_itl_s(target_ms: float) -> float:
    if not 0 <= target_ms < math.inf:
        raise InvalidRequestError(f"target_itl_ms must be a number >= 0, got {target_ms}", param="target_itl_ms")
    return target_ms / 1000
