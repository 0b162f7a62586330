"""Conversion between messages of `baton.v1` and the values of `common.types`. What the engine alone uses is
converted in `common.pod.convert`."""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequestError
from common.pb import common_pb2
from common.types import Constraint, ConstraintKind, FinishReason, Logprobs, SamplingParams


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """The parameters as a message, whose fields bear the same names. All are set but those that are None."""
    values: dict[str, Any] = {name: getattr(params, name) for name in params.__struct_fields__}
    if params.structured_outputs is not None:
        values["structured_outputs"] = constraint_to_pb(params.structured_outputs)
    return common_pb2.SamplingParams(**{**values, "seed": params.settled_seed})


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """The parameters of a message, ranges unchecked (see `common.types.validation`). What is absent has its default.
    Raises InvalidRequestError for a kind of constraint that this version does not know."""
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    given["stop_token_ids"] = tuple(message.stop_token_ids)
    if message.HasField("structured_outputs"):
        given["structured_outputs"] = constraint_from_pb(message.structured_outputs)
    return SamplingParams(**given)


def constraint_to_pb(constraint: Constraint) -> common_pb2.Constraint:
    """The constraint as a message."""
    return common_pb2.Constraint(
        kind=common_pb2.ConstraintKind.ValueType(constraint.kind.value),
        text=constraint.text,
        disable_any_whitespace=not constraint.any_whitespace,
        whitespace_pattern=constraint.whitespace_pattern,
    )


def constraint_from_pb(message: common_pb2.Constraint) -> Constraint:
    """The constraint of a message, unchecked. Raises InvalidRequestError for a kind that this version does not
    know."""
    try:
        kind = ConstraintKind(message.kind)
    except ValueError as error:
        problem = f"structured_outputs.kind must be a ConstraintKind, got {message.kind}"
        raise InvalidRequestError(problem, param="structured_outputs") from error
    return Constraint(
        kind=kind,
        text=message.text,
        any_whitespace=not message.disable_any_whitespace,
        whitespace_pattern=message.whitespace_pattern,
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
