"""One worker's shares in the limits of its router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from router.config import RouterConfig

T = TypeVar("T", bound=msgspec.Struct)

# By the struct that holds them. What is not here holds for one request, one connection or one client's call; or is
# memory that each worker needs whole, as the prefix index.
_DIVIDED: dict[str, Sequence[str]] = {
    "admission": ("max_inflight", "max_queued"),
    "limits": ("max_connections", "max_unfinished_body_bytes", "max_unfinished_body_bytes_per_client"),
    "survival": ("max_kept_bytes",),
}


def share_of(config: RouterConfig, number: int) -> RouterConfig:
    """The settings of worker `number`, from 0 on. All shares together are the router's limits."""
    workers = config.workers
    parts = {part: _divided(getattr(config, part), names, workers, number) for part, names in _DIVIDED.items()}
    return replace(_divided(config, ("max_timelines",), workers, number), workers=1, **parts)


def _divided(settings: T, names: Sequence[str], workers: int, number: int) -> T:
    limits = {name: getattr(settings, name) for name in names}
    shares = {name: _share(limit, workers, number) for name, limit in limits.items() if limit is not None}
    return replace(settings, **shares)


def _share(limit: int, workers: int, number: int) -> int:
    """The first ones have one more, if there is a remainder."""
    whole, remainder = divmod(limit, workers)
    return whole + (number < remainder)
