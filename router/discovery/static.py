"""Pods that the settings name."""

from __future__ import annotations

from collections.abc import Iterable

from router.discovery.base import Endpoint, Endpoints, Publish


class StaticDiscovery:
    """A list that never changes."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        self.initial: Endpoints = (
            *(Endpoint("prefill", address) for address in prefill),
            *(Endpoint("decode", address) for address in decode),
        )

    async def follow(self, publish: Publish) -> None:
        """See Discovery."""
        publish(self.initial)
