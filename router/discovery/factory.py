"""The sources that the settings name."""

from __future__ import annotations

from collections.abc import Sequence

from common.registry import RedisRegistry
from router.discovery.base import Discovery, Role
from router.discovery.combined import CombinedDiscovery
from router.discovery.dns import PREFIX, DnsDiscovery
from router.discovery.registry import SOURCE, RegistryDiscovery
from router.discovery.static import StaticDiscovery
from router.metrics import DiscoveryMetrics


def create_discovery(
    prefill: Sequence[str],
    decode: Sequence[str],
    registry: RedisRegistry | None,
    metrics: DiscoveryMetrics,
) -> Discovery:
    """All sources together. `prefill` and `decode` hold host:port and dns:NAME:PORT; `registry` is the caller's."""
    static = StaticDiscovery(_without_dns(prefill), _without_dns(decode))
    sources: dict[str, Discovery] = {"static": static}
    lists: tuple[tuple[Role, Sequence[str]], ...] = (("prefill", prefill), ("decode", decode))
    for role, entries in lists:
        for entry in entries:
            if entry.startswith(PREFIX):
                sources[entry] = DnsDiscovery(role, entry, metrics)
    if registry is not None:
        sources[SOURCE] = RegistryDiscovery(registry, metrics)
    return CombinedDiscovery(sources, metrics)


def _without_dns(entries: Sequence[str]) -> list[str]:
    return [entry for entry in entries if not entry.startswith(PREFIX)]
