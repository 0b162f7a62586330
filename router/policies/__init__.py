"""Which pod gets a request: Filter -> Scorer -> Picker over columns of the ready pods."""

from common.step_budget import prefill_work
from common.step_times import Line, Slowness, StepTimes, can_be
from router.policies.base import Candidates, Judgement, Leg, Policy, RequestFacts
from router.policies.prediction import Prediction
from router.policies.registry import create_policy
from router.policies.table import Column, Load, PodColumns, PodFacts, PodRow, PodTable, connector_number

__all__ = [
    "Candidates",
    "Column",
    "Judgement",
    "Leg",
    "Line",
    "Load",
    "PodColumns",
    "PodFacts",
    "PodRow",
    "PodTable",
    "Policy",
    "Prediction",
    "RequestFacts",
    "Slowness",
    "StepTimes",
    "can_be",
    "connector_number",
    "create_policy",
    "prefill_work",
]
