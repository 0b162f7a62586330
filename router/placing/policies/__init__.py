"""Which pod gets a request: Filter -> Scorer -> Picker over columns of the ready pods."""

from router.placing.policies.base import Candidates, Judgement, Leg, Policy, RequestFacts
from router.placing.policies.creation import create_policy
from router.placing.policies.prediction import Prediction
from router.placing.policies.table import (
    Column,
    HeldAdapters,
    Load,
    PodColumns,
    PodFacts,
    PodRow,
    PodTable,
    connector_number,
)

__all__ = [
    "Candidates",
    "Column",
    "HeldAdapters",
    "Judgement",
    "Leg",
    "Load",
    "PodColumns",
    "PodFacts",
    "PodRow",
    "PodTable",
    "Policy",
    "Prediction",
    "RequestFacts",
    "connector_number",
    "create_policy",
]
