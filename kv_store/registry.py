"""Connectors by name. A connector's module is imported when it is asked for, so that one needs only what one uses.

`create_connector` is the factory that a pod names in its KVConnectorConfig: "kv_store.registry:create_connector".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from common.config import Section, build
from common.engine.kv_connector import WorkerConnector
from common.errors import ConfigError

OptionValue = str | int | float | bool
Options = Mapping[str, OptionValue]

_OptionsT = TypeVar("_OptionsT", bound=msgspec.Struct)


def create_connector(name: str, options: Options) -> WorkerConnector:
    """Build a connector, which opens its medium only when the KV cache is registered.

    Raises ConfigError for an unknown name or a bad option.
    """
    if name not in _FACTORIES:
        known = ", ".join(CONNECTOR_NAMES)
        raise ConfigError(f"--connector: unknown connector {name!r}; known are {known}", param="connector")
    return _FACTORIES[name](options)


def _memory(options: Options) -> WorkerConnector:
    from kv_store.memory_store import InMemoryStore, MemoryStoreOptions
    from kv_store.store_connector import StoreWorkerConnector

    parsed = parse_options("memory", options, MemoryStoreOptions)
    return StoreWorkerConnector(InMemoryStore(parsed), parsed)


def _shared_storage(options: Options) -> WorkerConnector:
    from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore
    from kv_store.store_connector import StoreWorkerConnector

    parsed = parse_options("shared-storage", options, SharedStorageOptions)
    return StoreWorkerConnector(SharedStorageStore(parsed), parsed)


def _redis(options: Options) -> WorkerConnector:
    try:
        from kv_store.redis_store import RedisOptions, RedisStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"--connector: redis needs the extra 'redis' ({error})", param="connector") from error
    from kv_store.store_connector import StoreWorkerConnector

    parsed = parse_options("redis", options, RedisOptions)
    return StoreWorkerConnector(RedisStore(parsed), parsed)


def _nixl(options: Options) -> WorkerConnector:
    from kv_store.nixl.connector import NixlOptions, NixlWorkerConnector

    return NixlWorkerConnector(parse_options("nixl", options, NixlOptions))


_FACTORIES: dict[str, Callable[[Options], WorkerConnector]] = {
    "memory": _memory,
    "nixl": _nixl,
    "redis": _redis,
    "shared-storage": _shared_storage,
}

CONNECTOR_NAMES = tuple(_FACTORIES)
DIRECT_CONNECTOR_NAMES = ("nixl",)
STORE_CONNECTOR_NAMES = tuple(name for name in CONNECTOR_NAMES if name not in DIRECT_CONNECTOR_NAMES)


def parse_options(connector: str, options: Options, options_type: type[_OptionsT]) -> _OptionsT:
    """The options as a struct; texts are understood as on a command line. Raises ConfigError naming the option."""
    return build(options_type, None, Section(options, source=f"connector {connector}", path="connector_options"))
