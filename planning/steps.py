"""How long an engine's steps take: a linear model, and its fit to steps that were measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from common.errors import ConfigError
from planning.simulator.hardware import Step

Seconds = Annotated[float, Meta(ge=0, le=3600)]


class StepFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds of a step: one base, and a share for each thing that it computes or reads."""

    prefill_base_s: Seconds  # of a step in which no request decodes
    decode_base_s: Seconds  # of a step in which some do
    prompt_token_s: Seconds  # for each token of a prompt
    attended_s: Seconds  # for each pair of such a token and one before it
    decode_request_s: Seconds  # for each request that decodes, and each draft that is verified
    context_token_s: Seconds  # for each token of KV that those read

    def seconds(self, step: Step) -> float:
        """See planning.simulator.hardware.StepModel."""
        return float(
            (self.decode_base_s if step.num_decoding else self.prefill_base_s)
            + step.prompt_tokens * self.prompt_token_s
            + step.attended * self.attended_s
            + (step.num_decoding + step.num_drafts) * self.decode_request_s
            + step.decode_context * self.context_token_s
        )


class MeasuredStep(NamedTuple):
    """One kind of step, and its seconds."""

    step: Step
    seconds: float


def fit_steps(measured: Sequence[MeasuredStep]) -> StepFit:
    """Fits by least squares of the relative errors, without negative coefficients.

    Raises ConfigError unless there are steps with and without decoding requests."""
    decoding = [each.step.num_decoding > 0 for each in measured]
    if not any(decoding) or all(decoding):
        raise ConfigError("a fit of step times needs steps of prompts, and steps in which requests decode")
    rows = np.array([_features(each.step) for each in measured], dtype=float)
    seconds = np.array([each.seconds for each in measured])
    coefficients = _non_negative(rows / seconds[:, None], np.ones(len(seconds)))
    return StepFit(**dict(zip(StepFit.__struct_fields__, coefficients.tolist(), strict=True)))


def errors(fit: StepFit, measured: Sequence[MeasuredStep]) -> list[float]:
    """Returns how much too long, as a share, the fit says each step takes; negative: too short."""
    return [fit.seconds(each.step) / each.seconds - 1 for each in measured]


def _features(step: Step) -> tuple[float, ...]:
    """In the order of the fields of StepFit."""
    decodes = step.num_decoding > 0
    return (not decodes, decodes, step.prompt_tokens, step.attended, step.num_decoding, step.decode_context)


def _non_negative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients: the best of all choices of columns, of which there are few."""
    num_columns = rows.shape[1]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(num_columns), float("inf")
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            chosen = list(columns)
            found, *_ = np.linalg.lstsq(rows[:, chosen] / scale[chosen], target, rcond=None)
            if (found < 0).any():
                continue
            residual = float(((rows[:, chosen] / scale[chosen] @ found - target) ** 2).sum())
            if residual < least - 1e-12:
                best, least = np.zeros(num_columns), residual
                best[chosen] = found / scale[chosen]
    return best
