"""Inspectors by the name of their connector."""

from __future__ import annotations

import pkgutil

from common.errors import ConfigError
from kv_store.inspection.base import StoreInspector
from kv_store.registry import BELOW, KINDS, Options, kind_of, parse_options, split_options

INSPECTABLE = tuple(name for name, kind in KINDS.items() if kind.inspector)


def open_inspector(connector: str, options: Options) -> StoreInspector:
    """Opens the inspector of a connector's store, or of the one below a direct connector; `options`: the connector's.

    Raises ConfigError for a connector that keeps no blocks outside of the pods, an invalid option, or a store that
    cannot be reached.
    """
    if connector == "nixl":
        return _below_nixl(options)
    if _can_inspect(connector):
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
    if not _can_inspect(store):
        raise ConfigError(f"{place}: {store!r} cannot be inspected; expected {known}", param="store")
    return _open(store, below, BELOW)


def _open(store: str, options: Options, prefix: str = "") -> StoreInspector:
    """`prefix`: of the options' names, as they were given."""
    path = f"connector_options.{prefix}".rstrip(".")
    try:
        opener = pkgutil.resolve_name(kind_of(store).inspector)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--connector: {store} needs the extra {kind_of(store).extra!r} ({error})", param="connector"
        ) from error
    inspector: StoreInspector = opener(options, path, prefix)
    return inspector


def _can_inspect(name: str) -> bool:
    return bool(name in INSPECTABLE or (":" in name and kind_of(name).inspector))
