"""Conversion between messages of `baton.v1` and the values of `common.types`. What the engine alone uses is
converted in `common.pod.convert`."""

from __future__ import annotations

from common.pb import common_pb2
from common.types import FinishReason, Logprobs, SamplingParams


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """The parameters as a message."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.settled_seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
    )


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """The parameters of a message, ranges unchecked (see `common.types.validation`)."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
    )


def logprobs_to_pb(logprobs: Logprobs) -> common_pb2.PositionLogprobs:
    """One position's log probabilities as a message."""
    return common_pb2.PositionLogprobs(
        sampled=logprobs.sampled,
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )


def logprobs_from_pb(message: common_pb2.PositionLogprobs) -> Logprobs:
    """One position's log probabilities of a message."""
    return Logprobs(sampled=message.sampled, top=[(each.token_id, each.logprob) for each in message.top])


def finish_reason_to_pb(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """The enum value on the wire; a generation that goes on, here or on another pod, is UNSPECIFIED."""
    if reason is None or reason.name not in _ON_THE_WIRE:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    return common_pb2.FinishReason.ValueType(reason.value)


def finish_reason_from_pb(value: int) -> FinishReason | None:
    """None for UNSPECIFIED. Raises ValueError for a number that this version does not know."""
    return FinishReason(value) if value else None


_ON_THE_WIRE = frozenset(
    name.removeprefix("FINISH_REASON_") for name in common_pb2.FinishReason.DESCRIPTOR.values_by_name
)
