"""The policies, and how settings name them: `kv_aware`, `prefix_affinity:2,least_loaded:1`."""

from __future__ import annotations

import math
from typing import NamedTuple


class Registered(NamedTuple):
    """A policy's scorer, which is imported when it is first asked for."""

    scorer: str  # class within the module router.placing.policies.NAME
    decides_by_load: bool = False  # and by nothing else


POLICIES = {
    "kv_aware": Registered("KVAware"),
    "least_loaded": Registered("LeastLoaded", decides_by_load=True),
    "power_of_two": Registered("PowerOfTwo", decides_by_load=True),
    "prefix_affinity": Registered("PrefixAffinity"),
    "round_robin": Registered("RoundRobin", decides_by_load=True),
    "session_affinity": Registered("SessionAffinity"),
}


class Part(NamedTuple):
    """One scorer of a policy."""

    name: str
    weight: float


def parse_policy(text: str) -> tuple[Part, ...]:
    """The parts of a policy. Raises ValueError that says what is wrong."""
    parts = tuple(_parse_part(part.strip()) for part in text.split(","))
    names = [part.name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is named twice")
    return parts


def _parse_part(text: str) -> Part:
    name, colon, written = text.partition(":")
    name = name.strip()
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    if not colon:
        return Part(name, 1.0)
    try:
        weight = float(written)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"the weight of {name} must be a number above 0, got {written.strip()!r}")
    return Part(name, weight)
