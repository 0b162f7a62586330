"""Inspectors by the name of their connector."""

from __future__ import annotations

from common.errors import ConfigError
from kv_store.inspection.base import StoreInspector
from kv_store.registry import BELOW, Options, parse_options, split_options

INSPECTABLE = ("redis", "shared-storage")


def open_inspector(connector: str, options: Options) -> StoreInspector:
    """Opens the inspector of a connector's store, or of the one below a direct connector; `options`: the connector's.

    Raises ConfigError for a connector that keeps no blocks outside of the pods, an invalid option, or a store that
    cannot be reached.
    """
    if connector == "nixl":
        return _below_nixl(options)
    if connector in INSPECTABLE:
        return _open(connector, options)
    raise ConfigError(
        f"--connector: {connector!r} has no store to inspect; expected one of {', '.join(INSPECTABLE)}",
        param="connector",
    )


def _below_nixl(options: Options) -> StoreInspector:
    from kv_store.tiered_connector import NixlTierOptions

    own, below = split_options(options)
    store = parse_options("nixl", own, NixlTierOptions).store
    known = " or ".join(f"store={name}" for name in INSPECTABLE)
    place = "connector nixl: connector_options.store"
    if not store:
        raise ConfigError(
            f"{place}: required, as nixl itself keeps no blocks; name the store below it with {known}",
            param="store",
        )
    if store not in INSPECTABLE:
        raise ConfigError(f"{place}: {store!r} cannot be inspected; expected {known}", param="store")
    return _open(store, below, BELOW)


def _open(store: str, options: Options, prefix: str = "") -> StoreInspector:
    """`prefix`: of the options' names, as they were given."""
    path = f"connector_options.{prefix}".rstrip(".")
    return _redis(options, path, prefix) if store == "redis" else _shared_storage(options, path, prefix)


def _shared_storage(options: Options, path: str, prefix: str) -> StoreInspector:
    from kv_store.inspection.shared_storage import SharedStorageInspector
    from kv_store.shared_storage import SharedStorageOptions

    parsed = parse_options("shared-storage", options, SharedStorageOptions, path)
    return SharedStorageInspector(parsed, f"{prefix}path" if prefix else "--connector-path")


def _redis(options: Options, path: str, prefix: str) -> StoreInspector:
    try:
        from kv_store.inspection.redis_server import RedisInspector
        from kv_store.redis_store import RedisOptions
    except ModuleNotFoundError as error:
        raise ConfigError(f"--connector: redis needs the extra 'redis' ({error})", param="connector") from error
    return RedisInspector(parse_options("redis", options, RedisOptions, path), prefix)
