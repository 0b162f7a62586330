import math

import pytest

from common.pb import common_pb2, inference_pb2
from common.rpc.convert import (
    finish_reason_from_pb,
    finish_reason_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    sampling_from_pb,
    sampling_to_pb,
)
from common.types import Constraint, FinishReason, Logprobs, SamplingParams
from common.types.parameters import (
    ARGUMENTS,
    BIASES,
    TEXTS,
    TOKEN_IDS,
    TOKEN_SEQUENCES,
    ParameterField,
    parameters_of,
)


def _other_value(field: ParameterField) -> object:
    """One that is allowed and not the default."""
    if field.kind is bool:
        return not field.default
    collections: dict[object, object] = {
        TOKEN_IDS: (3, 9),
        TOKEN_SEQUENCES: ((3,), (9, 4)),
        TEXTS: ("a", "b"),
        BIASES: {5: 1.5, 6: -2.0},
        ARGUMENTS: {"a": 1, "b": 1.5, "c": "x", "d": True},
    }
    if field.kind in collections:
        return collections[field.kind]
    allowed = field.parameter.allowed
    if field.is_struct:
        return Constraint.json_object(any_whitespace=False, whitespace_pattern=" ?")
    assert allowed is not None
    return next(
        value for value in (allowed.high, 0.5, 7) if value in allowed and value not in (field.default, math.inf)
    )


CARRIED = {name: field for name, field in parameters_of(SamplingParams).items() if field.parameter.tag is not None}
FULL = SamplingParams(**{name: _other_value(field) for name, field in CARRIED.items()})  # type: ignore[arg-type]


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
    assert all(getattr(FULL, name) != getattr(SamplingParams(), name) for name in CARRIED)
    assert set(CARRIED) == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    given = {name for name, field in parameters_of(SamplingParams).items() if field.parameter.option_tag is not None}
    assert given <= set(inference_pb2.GenerateOptions.DESCRIPTOR.fields_by_name)
    assert set(SamplingParams.__struct_fields__) == given | set(CARRIED)


def test_logprobs_survive_the_wire() -> None:
    logprobs = Logprobs(sampled=-0.5, top=[(7, -0.25), (1, -2.0)], rank=3)
    assert logprobs_from_pb(logprobs_to_pb(logprobs)) == logprobs


@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
def test_finish_reason_survives_the_wire(reason: FinishReason | None) -> None:
    assert finish_reason_from_pb(finish_reason_to_pb(reason)) == reason
