"""Requests of a soak: most are served, some must be refused."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.e2e.clients.specs import RequestSpec, random_spec

KEY, SMALL_KEY, OPERATOR_KEY, UNKNOWN_KEY = (
    f"soak-{name}-0123456789abcdef" for name in ("main", "small", "operator", "unknown")
)
REQUESTS_PER_MINUTE = 6  # that SMALL_KEY may send

_INVALID_FIELDS: list[tuple[str, Any]] = [
    ("temperature", 3),
    ("temperature", "hot"),
    ("top_p", 0),
    ("max_tokens", 0),
    ("max_tokens", 10**6),
    ("n", 0),
    ("n", 10**6),
    ("stop", [""]),
    ("stop_token_ids", [10**6]),
    ("priority", -(2**40)),
    ("seed", 2**64),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_schema"}),
    ("structured_outputs", {"regex": "(a[b"}),
    ("model", "another"),
    ("no_such_field", 1),
]
_MALFORMED_BODIES = [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b"[" * 5000, b'{"prompt":' * 500, b"\x00" * 100]
_UNKNOWN_TARGETS = [("GET", "/"), ("GET", "/v1/nothing"), ("PUT", "/v1/completions"), ("POST", "/v1/models/a/b")]


@dataclass(frozen=True)
class Probe:
    """A request that must be refused, with one of these statuses."""

    kind: str
    method: str
    path: str
    body: bytes
    key: str
    statuses: tuple[int, ...]


@dataclass(frozen=True)
class Visit:
    """A request that is served, unless its key has used up its quota."""

    spec: RequestSpec
    key: str = KEY


def random_visit(rng: random.Random, name: str) -> Visit | Probe:
    """Anything that a client may do."""
    spec = random_spec(rng, name)
    draw = rng.random()
    if draw < 0.80:
        return Visit(spec)
    if draw < 0.85:
        return Visit(spec, SMALL_KEY)
    if draw < 0.87:
        return Probe("no key", "POST", spec.path, _encode(spec), rng.choice(["", UNKNOWN_KEY]), (401,))
    if draw < 0.90:
        method, path = rng.choice(_UNKNOWN_TARGETS)
        return Probe("unknown path", method, path, b"", KEY, (404, 405))
    if draw < 0.94:
        return Probe("malformed", "POST", spec.path, rng.choice(_MALFORMED_BODIES), KEY, (400,))
    field, value = rng.choice(_INVALID_FIELDS)
    return Probe("invalid", "POST", spec.path, _encode(spec, **{field: value}), KEY, (400, 404))


def _encode(spec: RequestSpec, **changes: Any) -> bytes:
    return json.dumps({**spec.http_body(), **changes}).encode()
