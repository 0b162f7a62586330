"""Conversion between messages of `baton.v1` and the values of `common.types`. What the engine alone uses is
converted in `common.pod.convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import InvalidRequestError, quoted
from common.pb import common_pb2, inference_pb2, pods_pb2
from common.types import (
    AdapterName,
    Constraint,
    ConstraintKind,
    FinishReason,
    Logprobs,
    PoolingParams,
    SamplingParams,
)
from common.types.parameters import ARGUMENTS, BIASES, TOKEN_SEQUENCES, parameters_of
from common.types.pooling import PoolingTask

_argument_decoder = msgspec.json.Decoder(str | int | float | bool)
_SCALARS = (int, float, bool)


_FIELDS = parameters_of(SamplingParams)
_OF_PODS = [field.name for field in _FIELDS.values() if field.parameter.tag is not None and field.name != "seed"]


def adapter_name_to_pb(name: AdapterName) -> pods_pb2.AdapterName:
    """The name of an adapter as a message."""
    return pods_pb2.AdapterName(**name._asdict())


def adapter_name_from_pb(message: pods_pb2.AdapterName) -> AdapterName:
    """The name of an adapter in a message. It is not checked."""
    return AdapterName(message.name, message.revision, message.digest, message.path, message.is_permanent)


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """The parameters as a message, whose fields bear the same names. All are set but those that are None or empty, and
    those for which pods have no use."""
    values: dict[str, Any] = {name: getattr(params, name) for name in _OF_PODS}
    if params.bad_word_token_ids:
        values["bad_word_token_ids"] = [common_pb2.TokenIds(token_ids=each) for each in params.bad_word_token_ids]
    if params.structured_outputs is not None:
        values["structured_outputs"] = constraint_to_pb(params.structured_outputs)
    if params.vllm_xargs:
        values["vllm_xargs"] = {name: msgspec.json.encode(each).decode() for name, each in params.vllm_xargs.items()}
    return common_pb2.SamplingParams(**values, seed=params.settled_seed)


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    """The parameters of a message, ranges unchecked (see `common.types.validation`). What is absent has its default.
    Raises InvalidRequestError for a kind of constraint that this version does not know."""
    return SamplingParams(**parameters_from_pb(message))


_POOLING_TASKS: Mapping[PoolingTask, common_pb2.PoolingTask.ValueType] = {
    "embed": common_pb2.POOLING_TASK_EMBED,
    "classify": common_pb2.POOLING_TASK_CLASSIFY,
    "token_embed": common_pb2.POOLING_TASK_TOKEN_EMBED,
    "token_classify": common_pb2.POOLING_TASK_TOKEN_CLASSIFY,
}
_TASKS_BY_NUMBER = {number: task for task, number in _POOLING_TASKS.items()}


def pooling_to_pb(pooling: PoolingParams) -> common_pb2.PoolingParams:
    """The numbers that are wanted of a prompt, as a message."""
    return common_pb2.PoolingParams(
        task=_POOLING_TASKS[pooling.task], dimensions=pooling.dimensions, use_activation=pooling.use_activation
    )


def pooling_from_pb(message: common_pb2.PoolingParams) -> PoolingParams:
    """The same, of a message. Raises InvalidRequestError for a task that this version does not know."""
    task = _TASKS_BY_NUMBER.get(message.task)
    if task is None:
        raise InvalidRequestError(f"pooling has an unknown task: {message.task}", param="pooling")
    use_activation = message.use_activation or not message.HasField("use_activation")
    return PoolingParams(task=task, dimensions=message.dimensions, use_activation=use_activation)


def parameters_from_pb(message: common_pb2.SamplingParams | inference_pb2.GenerateOptions) -> dict[str, Any]:
    """The fields that are set, by name; parameters as SamplingParams has them, others as they are. Raises
    InvalidRequestError for a kind of constraint that this version does not know."""
    given: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        field = _FIELDS.get(descriptor.name)
        if field is None or field.kind in _SCALARS:
            given[descriptor.name] = value
        elif field.kind is Constraint:
            given[descriptor.name] = constraint_from_pb(value)
        elif field.kind == BIASES:
            given[descriptor.name] = dict(value)
        elif field.kind == ARGUMENTS:
            given[descriptor.name] = {name: _argument(name, each) for name, each in value.items()}
        elif field.kind == TOKEN_SEQUENCES:
            given[descriptor.name] = tuple(tuple(each.token_ids) for each in value)
        else:
            given[descriptor.name] = tuple(value)
    return given


def set_options(message: inference_pb2.GenerateOptions, given: Mapping[str, Any]) -> None:
    """Sets fields of `message` to parameters as SamplingParams has them; None is left out. Raises InvalidRequestError
    for a value that does not fit its field."""
    for name, value in given.items():
        try:
            _set_option(message, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            kind = _FIELDS[name].kind if name in _FIELDS else None
            hint = " (it must be a Constraint)" if kind is Constraint else ""
            raise InvalidRequestError(f"{name} cannot be {quoted(value)}{hint}", param=name) from error


def _set_option(message: inference_pb2.GenerateOptions, name: str, value: Any) -> None:
    """Raises AttributeError, TypeError or ValueError for a value that does not fit."""
    if name == "vllm_xargs" and value:
        message.vllm_xargs.update({key: msgspec.json.encode(each).decode() for key, each in value.items()})
    elif isinstance(value, Constraint):
        getattr(message, name).CopyFrom(constraint_to_pb(value))
    elif name == "seed" and value is not None:
        message.seed = value % 2**64
    elif isinstance(value, Mapping):
        getattr(message, name).update(value)
    elif isinstance(value, list | tuple | set | frozenset):
        getattr(message, name).extend(value)
    elif value is not None:
        setattr(message, name, value)


def _argument(name: str, text: str) -> str | int | float | bool:
    try:
        value: str | int | float | bool = _argument_decoder.decode(text)
    except msgspec.DecodeError as error:
        problem = f"vllm_xargs: the value of {quoted(name)} must be JSON of a text, number or boolean"
        raise InvalidRequestError(problem, param="vllm_xargs") from error
    return value


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
        rank=logprobs.rank,
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )


def logprobs_from_pb(message: common_pb2.PositionLogprobs) -> Logprobs:
    """One position's log probabilities of a message."""
    top = [(each.token_id, each.logprob) for each in message.top]
    return Logprobs(sampled=message.sampled, top=top, rank=message.rank)


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
