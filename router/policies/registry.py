"""Policies by name; an implementation is imported when it is first asked for."""

from __future__ import annotations

import importlib

from common.errors import ConfigError
from router.policies.base import Policy

_MODULES = {
    "least_loaded": "router.policies.least_loaded",
    "round_robin": "router.policies.round_robin",
}

POLICY_NAMES = tuple(_MODULES)


def create_policy(name: str) -> Policy:
    """A new policy with its own state. Raises ConfigError for a name that is not in POLICY_NAMES."""
    module_name = _MODULES.get(name)
    if module_name is None:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")
    policy: Policy = importlib.import_module(module_name).create()
    return policy
