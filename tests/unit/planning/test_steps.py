"""The fit of step times finds the coefficients that made them, and none below zero."""

from __future__ import annotations

import itertools

import pytest

from common.errors import ConfigError
from planning.simulator.hardware import Step
from planning.steps import MeasuredStep, StepFit, errors, fit_steps

STEPS = [Step(tokens, 0, 1, 0, tokens**2 / 2) for tokens in (16, 128, 1024, 2048)] + [
    Step(0, batch, batch, batch * context, 0.0) for batch, context in itertools.product((1, 4, 16), (32, 512))
]
MADE = StepFit(
    prefill_base_s=0.004,
    decode_base_s=0.006,
    prompt_token_s=3e-4,
    attended_s=2e-8,
    decode_request_s=1e-3,
    context_token_s=5e-7,
)


def measured(fit: StepFit) -> list[MeasuredStep]:
    return [MeasuredStep(step, fit.seconds(step)) for step in STEPS]


def test_it_finds_what_made_the_times() -> None:
    found = fit_steps(measured(MADE))
    for name in StepFit.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(MADE, name), rel=1e-3), name
    assert max(map(abs, errors(found, measured(MADE)))) < 1e-6


def test_nothing_is_negative_where_larger_steps_were_shorter() -> None:
    taken = [each._replace(seconds=each.seconds / (1 + each.step.decode_context)) for each in measured(MADE)]
    found = fit_steps(taken)
    assert min(getattr(found, name) for name in StepFit.__struct_fields__) == 0.0


def test_it_needs_both_kinds_of_steps() -> None:
    with pytest.raises(ConfigError, match="steps in which requests decode"):
        fit_steps(measured(MADE)[:4])
