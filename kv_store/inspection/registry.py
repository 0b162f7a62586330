"""Inspectors by the name of their connector."""

from __future__ import annotations

from common.errors import ConfigError
from kv_store.inspection.base import StoreInspector
from kv_store.registry import Options, parse_options

INSPECTABLE = ("redis", "shared-storage")


def open_inspector(connector: str, options: Options) -> StoreInspector:
    """The inspector of a connector's store; `options` are the connector's own.

    Raises ConfigError for a connector that keeps no blocks outside of the pods, an unfit option, or a store that cannot
    be reached.
    """
    if connector == "shared-storage":
        return _shared_storage(options)
    if connector == "redis":
        return _redis(options)
    raise ConfigError(
        f"--connector: {connector!r} has no store to look into; those that do are {', '.join(INSPECTABLE)}",
        param="connector",
    )


def _shared_storage(options: Options) -> StoreInspector:
    from kv_store.inspection.shared_storage import SharedStorageInspector
    from kv_store.shared_storage import SharedStorageOptions

    return SharedStorageInspector(parse_options("shared-storage", options, SharedStorageOptions))


def _redis(options: Options) -> StoreInspector:
    try:
        from kv_store.inspection.redis_server import RedisInspector
        from kv_store.redis_store import RedisOptions
    except ModuleNotFoundError as error:
        raise ConfigError(f"--connector: redis needs the extra 'redis' ({error})", param="connector") from error
    return RedisInspector(parse_options("redis", options, RedisOptions))
