"""Connectors by name, and what each needs of a machine. All that differs between connectors is asked for here.

A connector's module is imported when it is needed, so that unused extras may be missing. `create_connector` is the
factory that a pod names in its KVConnectorConfig: "kv_store.registry:create_connector".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from common.config import Section, build
from common.engine.kv_connector import WorkerConnector
from common.engine.registry import Registry
from common.errors import ConfigError
from kv_store.nixl.installed import check_installed as check_nixl_installed

if TYPE_CHECKING:
    from kv_store.base import BlockStore, StoreConnectorOptions
    from kv_store.tiered_connector import NixlTierOptions

OptionValue = str | int | float | bool
Options = Mapping[str, OptionValue]

_PATH = "connector_options"  # where the options are given
BELOW = "store."  # how the options of the store below a direct connector begin

_OptionsT = TypeVar("_OptionsT", bound=msgspec.Struct)


def _always_installed() -> None:
    pass


class ConnectorKind(NamedTuple):
    """A connector, as `baton up`, `baton doctor` and `baton kv` see it before there is one."""

    create: Callable[[Options, str], WorkerConnector]  # from its options, and the path at which they are given
    is_store: bool = True  # False: a direct one, which may have a store below it
    joins_processes: bool = True
    directory_option: str = ""  # a directory that all pods see
    redis_option: str = ""  # URL of a Redis server that all pods reach
    inspector: str = ""  # "module:name" that opens the store's inspector, see `kv_store.inspection`
    extra: str = ""  # of the distribution
    check_installed: Callable[[], None] = _always_installed  # raises ConfigError; imports nothing


def kind_of(name: str) -> ConnectorKind:
    """Returns the kind of that name, or at that place, "module:name", outside the package. Raises ConfigError."""
    if ":" in name:
        found = _OUTSIDE.find(name)
        if not isinstance(found, ConnectorKind):
            raise ConfigError(f"--connector: {name} is no ConnectorKind", param="connector")
        return found
    if name not in KINDS:
        known = ", ".join(CONNECTOR_NAMES)
        raise ConfigError(f"--connector: unknown connector {name!r}; known are {known}", param="connector")
    return KINDS[name]


def joining_kind(name: str) -> ConnectorKind:
    """Returns the kind of a connector for pods that are processes of their own. Raises ConfigError."""
    if name not in JOINING_CONNECTOR_NAMES and ":" not in name:
        known = ", ".join(JOINING_CONNECTOR_NAMES)
        raise ConfigError(f"--connector: {name!r} cannot join processes; known are {known}", param="connector")
    return kind_of(name)


def create_connector(name: str, options: Options) -> WorkerConnector:
    """Builds a connector, which opens its medium only when the KV cache is registered.

    Raises ConfigError for an unknown name or a bad option.
    """
    return kind_of(name).create(options, _PATH)


def _memory(options: Options, path: str) -> WorkerConnector:
    from kv_store.memory_store import InMemoryStore, MemoryStoreOptions

    parsed = parse_options("memory", options, MemoryStoreOptions, path)
    return over_store(InMemoryStore(parsed), parsed)


def _shared_storage(options: Options, path: str) -> WorkerConnector:
    from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore

    parsed = parse_options("shared-storage", options, SharedStorageOptions, path)
    return over_store(SharedStorageStore(parsed), parsed)


def _redis(options: Options, path: str) -> WorkerConnector:
    try:
        from kv_store.redis_store import RedisOptions, RedisStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"--connector: redis needs the extra 'redis' ({error})", param="connector") from error

    parsed = parse_options("redis", options, RedisOptions, path)
    return over_store(RedisStore(parsed), parsed)


def over_store(store: BlockStore, options: StoreConnectorOptions) -> WorkerConnector:
    """Builds a connector over a store, with host memory above it if that is configured."""
    from kv_store.store_connector import StoreWorkerConnector

    if not options.host_bytes:
        return StoreWorkerConnector(store, options)
    from kv_store.host_pool import HostPool
    from kv_store.tiered_store import TieredStore

    tiers = TieredStore(HostPool(options.host_bytes), store)
    return StoreWorkerConnector(tiers, options, for_handoffs=tiers.shared)


def _nixl(options: Options, _: str) -> WorkerConnector:
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
    if options.store and ":" not in options.store and options.store not in STORE_CONNECTOR_NAMES:
        known = ", ".join(STORE_CONNECTOR_NAMES)
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
        return kind_of(options.store).create(below, f"{_PATH}.store")
    from kv_store.base import StoreConnectorOptions
    from kv_store.host_pool import HostPool
    from kv_store.store_connector import StoreWorkerConnector

    alone = StoreConnectorOptions(host_bytes=options.host_bytes, offload=offload)
    return StoreWorkerConnector(HostPool(options.host_bytes), alone)


KINDS = {
    "memory": ConnectorKind(_memory, joins_processes=False),
    "nixl": ConnectorKind(_nixl, is_store=False, extra="nixl", check_installed=check_nixl_installed),
    "redis": ConnectorKind(
        _redis, redis_option="url", inspector="kv_store.inspection.redis_server:open_redis", extra="redis"
    ),
    "shared-storage": ConnectorKind(
        _shared_storage, directory_option="path", inspector="kv_store.inspection.shared_storage:open_directory"
    ),
}
CONNECTOR_NAMES = tuple(KINDS)
JOINING_CONNECTOR_NAMES = tuple(name for name, kind in KINDS.items() if kind.joins_processes)
STORE_CONNECTOR_NAMES = tuple(name for name, kind in KINDS.items() if kind.is_store)
_OUTSIDE: Registry[object] = Registry("connector", {})


def parse_options(connector: str, options: Options, options_type: type[_OptionsT], path: str = _PATH) -> _OptionsT:
    """Converts options to a struct; texts are parsed as on a command line. Raises ConfigError that names the option,
    below `path`."""
    return build(options_type, None, Section(options, source=f"connector {connector}", path=path))


def split_options(options: Options) -> tuple[Options, Options]:
    """Returns a direct connector's own options, and those of the store below it without their prefix."""
    own = {name: value for name, value in options.items() if not name.startswith(BELOW)}
    below = {name.removeprefix(BELOW): value for name, value in options.items() if name.startswith(BELOW)}
    return own, below
