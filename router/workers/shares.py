"""One worker's shares in the limits of its router."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from router.config import RouterConfig

T = TypeVar("T", bound=msgspec.Struct)


def share_of(config: RouterConfig, number: int) -> RouterConfig:
    """The settings of worker `number`, from 0 on. All shares together are the router's limits."""
    return _divided(replace(config, workers=1), config.workers, number)


def _divided(settings: T, workers: int, number: int) -> T:
    """Divides the limits that a room's settings name DIVIDED. Others hold for one request, one connection or one
    client's call; or are memory that each worker needs whole, as the prefix index."""
    changes: dict[str, object] = {}
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            changes[name] = _divided(value, workers, number)
        elif name in getattr(settings, "DIVIDED", ()) and value is not None:
            changes[name] = _share(value, workers, number)
    return replace(settings, **changes)


def _share(limit: int, workers: int, number: int) -> int:
    """The first ones have one more, if there is a remainder."""
    whole, remainder = divmod(limit, workers)
    return whole + (number < remainder)
