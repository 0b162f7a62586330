"""Policies by name; an implementation is imported when it is first asked for."""

from __future__ import annotations

import importlib

from router.placing.policies.base import Policy, Scorer, WeightedScorer
from router.placing.policies.pickers import BestInTurn
from router.placing.policy_spec import parse_policy

_SCORERS = {
    "kv_aware": ("router.placing.policies.kv_aware", "KVAware"),
    "least_loaded": ("router.placing.policies.least_loaded", "LeastLoaded"),
    "power_of_two": ("router.placing.policies.power_of_two", "PowerOfTwo"),
    "prefix_affinity": ("router.placing.policies.prefix_affinity", "PrefixAffinity"),
    "round_robin": ("router.placing.policies.round_robin", "RoundRobin"),
    "session_affinity": ("router.placing.policies.session_affinity", "SessionAffinity"),
}
_TOLERANCE = 0.01
_COUNTS_LOAD = {"least_loaded", "power_of_two", "round_robin"}  # these alone decide by nothing else


def create_policy(text: str, seed: int | None = None) -> Policy:
    """A new policy with its own state, from what `parse_policy` understands. `seed` of its picker, see there. Raises
    ValueError."""
    parts = parse_policy(text)
    scorers = [WeightedScorer(_create_scorer(part.name), part.weight) for part in parts]
    if {part.name for part in parts} <= _COUNTS_LOAD:
        return Policy(text, scorers, BestInTurn(seed=seed))
    return Policy(text, scorers, BestInTurn(tolerance=_TOLERANCE, by_load=True, seed=seed))


def _create_scorer(name: str) -> Scorer:
    module, scorer = _SCORERS[name]
    created: Scorer = getattr(importlib.import_module(module), scorer)()
    return created
