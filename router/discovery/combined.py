"""Several sources as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from router.discovery.base import Discovery, Endpoints, Publish
from router.metrics import DiscoveryMetrics

logger = logging.getLogger(__name__)

_RESTART_S = 5.0  # after a fault of ours


class CombinedDiscovery:
    """Names what any of its sources names. A source that has not answered yet does not delay the others."""

    def __init__(self, sources: Mapping[str, Discovery], metrics: DiscoveryMetrics) -> None:
        """`sources` by name."""
        self._sources = sources
        self._metrics = metrics
        self._latest = {name: source.initial for name, source in sources.items()}
        for name, source in sources.items():
            metrics.pods.labels(name).set(len(source.initial))
            metrics.failures.labels(name)

    @property
    def initial(self) -> Endpoints:
        """See Discovery."""
        return self._union()

    async def follow(self, publish: Publish) -> None:
        """See Discovery."""
        async with asyncio.TaskGroup() as group:
            for name, source in self._sources.items():
                group.create_task(self._follow_one(name, source, publish))

    async def _follow_one(self, name: str, source: Discovery, publish: Publish) -> None:
        def take(endpoints: Endpoints) -> None:
            self._latest[name] = endpoints
            self._metrics.pods.labels(name).set(len(endpoints))
            publish(self._union())

        while True:
            try:
                return await source.follow(take)
            except Exception:  # a fault of ours must not end the source
                logger.exception("discovery by %s", name)
                self._metrics.failures.labels(name).inc()
                await asyncio.sleep(_RESTART_S)

    def _union(self) -> Endpoints:
        return tuple(dict.fromkeys(endpoint for latest in self._latest.values() for endpoint in latest))
