"""A profile from what a router has learned of its pods."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from common.errors import BatonError, ConfigError
from planning.profile import VERSION, EngineProfile, Handoff
from planning.simulator.hardware import NO_DRAFTS, Drafts
from planning.steps import StepFit
from router.gateway.operators.administration import STEP_TIMES_PATH, LearnedTimes, ModelStepTimes, StepTimesOfModels

LEARNED_PATH = STEP_TIMES_PATH


class Learned(NamedTuple):
    """Step times of a model's pods, as a router has learned them, and how their drafts do."""

    profile: EngineProfile
    drafts: Drafts


def read_learned(answer: Any, name: str | None) -> Learned:
    """Returns what the answer of LEARNED_PATH has of the model of that name, by default of the first.

    Raises ConfigError if there is no such model, or too little was learned, and BatonError for what is no such answer.
    """
    try:
        models = msgspec.convert(answer, StepTimesOfModels).models
    except msgspec.ValidationError as error:
        raise BatonError(f"the answer of {LEARNED_PATH} is not valid: {error}") from error
    model = next((model for model in models if name in (None, model.name)), None)
    if model is None:
        known = ", ".join(model.name for model in models) or "none"
        raise ConfigError(f"--model: the router serves no {name or 'model'}; it serves: {known}", param="model")
    return Learned(_profile(model), _drafts(model))


def _profile(model: ModelStepTimes) -> EngineProfile:
    decode = model.decode
    if decode is None:
        raise ConfigError(f"--url: {model.name} has no ready decode pod, whose step times a plan needs", param="url")
    prefill = model.prefill or decode
    for role, times in (("decode", decode), ("prefill", model.prefill)):
        if times is not None and not times.is_known:
            raise ConfigError(
                f"--url: the router has seen too few steps of the {role} pods of {model.name}; send it some requests, "
                "or use `baton profile-engine`",
                param="url",
            )
    return EngineProfile(
        version=VERSION,
        source="learned",
        model=model.name,
        machine=f"learned from {_pods(model.prefill, 'prefill')}{_pods(decode, 'decode')} pods",
        device="unknown",
        dtype="unknown",
        num_threads=0,
        block_size=model.block_size,
        num_blocks=decode.num_blocks,
        kv_bytes_per_token=0,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=min(prefill.max_num_batched_tokens, decode.max_num_batched_tokens),
        max_num_seqs=decode.max_num_seqs,
        steps=StepFit(
            prefill_base_s=prefill.base_s,
            decode_base_s=decode.base_s,
            prompt_token_s=prefill.token_s,
            attended_s=0.0,
            decode_request_s=decode.token_s,
            context_token_s=decode.context_s,
        ),
        handoff=Handoff(connector="", latency_s=model.handoff_s, token_s=model.handoff_token_s),
    )


def _drafts(model: ModelStepTimes) -> Drafts:
    if not model.num_accepted_drafts or not model.num_draft_verifications:
        return NO_DRAFTS
    return Drafts(
        tokens_per_step=1 + model.num_accepted_drafts / model.num_draft_verifications,
        acceptance=model.num_accepted_drafts / model.num_verified_drafts,
    )


def _pods(times: LearnedTimes | None, role: str) -> str:
    if times is None:
        return ""
    return f"{times.num_pods} prefill and " if role == "prefill" else f"{times.num_pods} decode"
