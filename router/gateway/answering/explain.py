"""Explains a request's route: POST /v1/route/explain with the body of a completion or a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.fairness.turns import others_turn
from router.placing.planner import Placement, Plan
from router.placing.policies import Leg, Prediction
from router.requests.request import GenerationRequest
from router.serving.service import InferenceService

_WHY = {
    "lower_ttft": {
        "local": "the first token comes from the decode pod in half the time or less",
        "remote": "the first token would not come from the decode pod in half the time",
    },
    "itl_target": {"remote": "the decode pod would be sooner, but others there would wait too long for their tokens"},
    "limits": {
        "local": "only this way is predicted to keep the limits that the request names",
        "remote": "only this way is predicted to keep the limits that the request names",
    },
    "short_prompt": {"local": "fewer than min_remote_prefill_tokens tokens are to be computed"},
    "planned": {"remote": "remote_prefill says so"},
    "colocated": {"local": "remote_prefill says so, or there are no prefill pods"},
    "no_prefill_pod": {"local": "no prefill pod is ready that fits a decode pod"},
}


async def explain(service: InferenceService, requests: Sequence[GenerationRequest]) -> bytes:
    """The answer, as JSON: one route per prompt. Raises as InferenceService.plan does."""
    routes = []
    for request in requests:
        routes.append(msgspec.Raw(msgspec.json.encode(_route(request, service.plan(request)))))
        await others_turn(request.terms.tenant)  # a route names every pod
    return msgspec.json.encode({"object": "list", "data": routes})


def _route(request: GenerationRequest, plan: Plan) -> dict[str, Any]:
    where = "local" if plan.prefill is None else "remote"
    legs = [plan.decode, *([] if plan.prefill is None else [plan.prefill])]
    return {
        "object": "route",
        "decode": plan.decode.facts.name,
        "prefill": None if plan.prefill is None else plan.prefill.facts.name,
        "prefill_on": where,
        "reason": plan.reason,
        "why": _WHY.get(plan.reason, {}).get(where, ""),
        "num_prompt_tokens": len(request.prompt_token_ids),
        "session": request.terms.session,
        "legs": [_leg(placement, taken=True) for placement in legs]
        + [_leg(placement, taken=False) for placement in plan.others],
    }


def _leg(placement: Placement, *, taken: bool) -> dict[str, Any]:
    """Describes the decision for one leg. `taken`: the request would go there; else it was weighed against that."""
    candidates, judgement = placement.candidates, placement.judgement
    pods = candidates.pods
    names = placement.policy.scorer_names
    return {
        "leg": candidates.leg.value,
        "taken": taken,
        "policy": placement.policy.name,
        "chosen": placement.facts.name,
        "candidates": [
            {
                "address": facts.name,
                "score": round(float(judgement.totals[index]), 6),
                "scores": {
                    name: round(float(column[index]), 6) for name, column in zip(names, judgement.scores, strict=True)
                },
                "cached_tokens": int(candidates.cached_tokens[index]),
                "num_requests": int(pods.num_requests[index]),
                "queued_tokens": int(pods.queued_tokens[index]),
                "free_blocks": int(pods.free_blocks[index]),
                "predicted_ms": _predicted(candidates.prediction, index, candidates.leg),
            }
            for index, facts in sorted(enumerate(pods.facts), key=lambda each: -judgement.totals[each[0]])
        ],
    }


_SHOWN = {
    Leg.PREFILL: ("queue_s", "prefill_s", "ttft_s"),
    Leg.DECODE: ("transfer_s", "wait_s", "itl_s"),
    Leg.WHOLE: ("queue_s", "prefill_s", "wait_s", "ttft_s", "itl_s"),
}


def _predicted(prediction: Prediction, index: int, leg: Leg) -> dict[str, float]:
    shown = {name: float(getattr(prediction, name)[index]) for name in _SHOWN[leg]}
    return {name.removesuffix("_s"): round(1000 * seconds, 3) for name, seconds in shown.items()}
