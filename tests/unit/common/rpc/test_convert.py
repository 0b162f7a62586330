import math

import msgspec
import pytest

from common.pb import common_pb2
from common.rpc.convert import (
    finish_reason_from_pb,
    finish_reason_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from common.types import Constraint, FinishReason, Logprobs, SamplingParams
from common.types.parameters import ParameterField, parameters_of


def _other_value(field: ParameterField) -> object:
    """One that is allowed and not the default."""
    if field.kind is tuple:
        return (3, 9)
    if field.kind is bool:
        return not field.default
    allowed = field.parameter.allowed
    if field.is_struct:
        return Constraint.json_object(any_whitespace=False, whitespace_pattern=" ?")
    assert allowed is not None
    return next(
        value for value in (allowed.high, 0.5, 7) if value in allowed and value not in (field.default, math.inf)
    )


FULL = SamplingParams(**{field.name: _other_value(field) for field in parameters_of(SamplingParams).values()})  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [FULL, SamplingParams(seed=0), SamplingParams(seed=0, num_logprobs=0)])
def test_sampling_survives_the_wire(params: SamplingParams) -> None:
    wire = sampling_to_pb(params).SerializeToString()
    assert sampling_from_pb(common_pb2.SamplingParams.FromString(wire)) == params


def test_an_absent_parameter_has_its_default() -> None:
    """As of a router that does not know it yet; zero is a value."""
    message = common_pb2.SamplingParams(temperature=0.0)
    assert sampling_from_pb(message) == SamplingParams(temperature=0.0)


def test_every_sampling_field_is_carried() -> None:
    """A field added to SamplingParams and forgotten in the conversion shows here."""
    assert all(value != default for value, default in zip(_values(FULL), _values(SamplingParams()), strict=True))
    assert set(SamplingParams.__struct_fields__) == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def _values(params: SamplingParams) -> list[object]:
    return list(msgspec.structs.astuple(params))


def test_logprobs_survive_the_wire() -> None:
    logprobs = Logprobs(sampled=-0.5, top=[(7, -0.25), (1, -2.0)])
    assert logprobs_from_pb(logprobs_to_pb(logprobs)) == logprobs


@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
def test_finish_reason_survives_the_wire(reason: FinishReason | None) -> None:
    assert finish_reason_from_pb(finish_reason_to_pb(reason)) == reason
