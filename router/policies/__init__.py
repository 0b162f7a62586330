"""Which pod gets a request: Filter -> Scorer -> Picker over snapshots of the ready pods."""

from router.policies.base import PodSnapshot, Policy, RequestFacts
from router.policies.registry import POLICY_NAMES, create_policy

__all__ = ["POLICY_NAMES", "PodSnapshot", "Policy", "RequestFacts", "create_policy"]
