"""Makes policies of their names."""

from __future__ import annotations

import importlib

from router.placing.policies.base import Policy, Scorer, WeightedScorer
from router.placing.policies.pickers import BestInTurn
from router.placing.policy_registry import POLICIES, parse_policy

_TOLERANCE = 0.01


def create_policy(text: str, seed: int | None = None) -> Policy:
    """A new policy with its own state, from what `parse_policy` understands. `seed` of its picker, see there. Raises
    ValueError."""
    parts = parse_policy(text)
    scorers = [WeightedScorer(_create_scorer(part.name), part.weight) for part in parts]
    if all(POLICIES[part.name].decides_by_load for part in parts):
        return Policy(text, scorers, BestInTurn(seed=seed))
    return Policy(text, scorers, BestInTurn(tolerance=_TOLERANCE, by_load=True, seed=seed))


def _create_scorer(name: str) -> Scorer:
    module = importlib.import_module(f"router.placing.policies.{name}")
    created: Scorer = getattr(module, POLICIES[name].scorer)()
    return created
