"""Connectors by name. A connector's module is imported when it is needed, so that unused extras may be missing.

`create_connector` is the factory that a pod names in its KVConnectorConfig: "kv_store.registry:create_connector".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from common.config import Section, build
from common.engine.kv_connector import WorkerConnector
from common.errors import ConfigError

if TYPE_CHECKING:
    from kv_store.base import BlockStore, StoreConnectorOptions
    from kv_store.tiered_connector import NixlTierOptions

OptionValue = str | int | float | bool
Options = Mapping[str, OptionValue]

_PATH = "connector_options"  # where the options are given
BELOW = "store."  # how the options of the store below a direct connector begin

_OptionsT = TypeVar("_OptionsT", bound=msgspec.Struct)


def create_connector(name: str, options: Options) -> WorkerConnector:
    """Builds a connector, which opens its medium only when the KV cache is registered.

    Raises ConfigError for an unknown name or a bad option.
    """
    if name == "nixl":
        return _nixl(options)
    if name not in _STORES:
        known = ", ".join(CONNECTOR_NAMES)
        raise ConfigError(f"--connector: unknown connector {name!r}; known are {known}", param="connector")
    return _STORES[name](options, _PATH)


def _memory(options: Options, path: str) -> WorkerConnector:
    from kv_store.memory_store import InMemoryStore, MemoryStoreOptions

    parsed = parse_options("memory", options, MemoryStoreOptions, path)
    return _over_store(InMemoryStore(parsed), parsed)


def _shared_storage(options: Options, path: str) -> WorkerConnector:
    from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore

    parsed = parse_options("shared-storage", options, SharedStorageOptions, path)
    return _over_store(SharedStorageStore(parsed), parsed)


def _redis(options: Options, path: str) -> WorkerConnector:
    try:
        from kv_store.redis_store import RedisOptions, RedisStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"--connector: redis needs the extra 'redis' ({error})", param="connector") from error

    parsed = parse_options("redis", options, RedisOptions, path)
    return _over_store(RedisStore(parsed), parsed)


def _over_store(store: BlockStore, options: StoreConnectorOptions) -> WorkerConnector:
    """Builds a connector over a store, with host memory above it if that is configured."""
    from kv_store.store_connector import StoreWorkerConnector

    if not options.host_bytes:
        return StoreWorkerConnector(store, options)
    from kv_store.host_pool import HostPool
    from kv_store.tiered_store import TieredStore

    tiers = TieredStore(HostPool(options.host_bytes), store)
    return StoreWorkerConnector(tiers, options, for_handoffs=tiers.shared)


def _nixl(options: Options) -> WorkerConnector:
    from kv_store.nixl.connector import NixlWorkerConnector
    from kv_store.tiered_connector import NixlTierOptions, TieredWorkerConnector

    own, below = split_options(options)
    parsed = parse_options("nixl", own, NixlTierOptions)
    tiers = _tiers_of(parsed, below)
    direct = NixlWorkerConnector(parsed)
    return direct if tiers is None else TieredWorkerConnector(direct, tiers)


def _tiers_of(options: NixlTierOptions, below: Options) -> WorkerConnector | None:
    """Builds the tiers beside a direct connector; None: there are none. Raises ConfigError."""
    place = f"connector nixl: {_PATH}"
    if options.store and options.store not in _STORES:
        known = ", ".join(_STORES)
        raise ConfigError(f"{place}.store: unknown store {options.store!r}; known are {known}", param="store")
    if below and not options.store:
        name = BELOW + next(iter(below))
        raise ConfigError(f"{place}.{name}: requires a store; name one with store=", param=name)
    if not options.store and not options.host_bytes:
        if options.offload:
            raise ConfigError(f"{place}.offload: requires host_bytes or store", param="offload")
        return None
    offload = options.offload is not False
    if options.store:
        for name in {"host_bytes", "offload"} & below.keys():
            raise ConfigError(f"{place}.{BELOW}{name}: is {name}, without {BELOW}", param=BELOW + name)
        below = {**below, "host_bytes": options.host_bytes, "offload": offload}
        return _STORES[options.store](below, f"{_PATH}.store")
    from kv_store.base import StoreConnectorOptions
    from kv_store.host_pool import HostPool
    from kv_store.store_connector import StoreWorkerConnector

    alone = StoreConnectorOptions(host_bytes=options.host_bytes, offload=offload)
    return StoreWorkerConnector(HostPool(options.host_bytes), alone)


_STORES: dict[str, Callable[[Options, str], WorkerConnector]] = {
    "memory": _memory,
    "redis": _redis,
    "shared-storage": _shared_storage,
}
DIRECT_CONNECTOR_NAMES = ("nixl",)
STORE_CONNECTOR_NAMES = tuple(_STORES)
CONNECTOR_NAMES = tuple(sorted(DIRECT_CONNECTOR_NAMES + STORE_CONNECTOR_NAMES))


def parse_options(connector: str, options: Options, options_type: type[_OptionsT], path: str = _PATH) -> _OptionsT:
    """Converts options to a struct; texts are parsed as on a command line. Raises ConfigError that names the option,
    below `path`."""
    return build(options_type, None, Section(options, source=f"connector {connector}", path=path))


def split_options(options: Options) -> tuple[Options, Options]:
    """Returns a direct connector's own options, and those of the store below it without their prefix."""
    own = {name: value for name, value in options.items() if not name.startswith(BELOW)}
    below = {name.removeprefix(BELOW): value for name, value in options.items() if name.startswith(BELOW)}
    return own, below
