"""Questions of a router to the other workers of its port: each knows its own requests only.

One of several workers is asked by whichever client connects to it, so an answer about the router as a whole needs all
of them. A worker that does not answer in time is left out, as one that has just died would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest

from router.dispatching.kept import KeptStream, StreamKey
from router.serving.cluster_view import ClusterView
from router.timelines.views import RequestSummary, RequestTimeline


class Peers(Protocol):
    """The other workers. Called by endpoints, on the event loop; each call has a deadline of its own."""

    async def metrics(self, own: CollectorRegistry) -> bytes:
        """Prometheus exposition of all workers, this one included. Raises UnavailableError."""

    async def num_under_way(self) -> int:
        """Generations of the others."""

    async def clusters(self) -> Sequence[ClusterView]:
        """Returns the others' views of the cluster."""

    async def requests(self, tenant_name: str | None, limit: int, *, shows_pods: bool) -> Sequence[RequestSummary]:
        """The newest requests of each of the others, at most `limit` of each, in no order. `tenant_name` as of
        TimelineBook."""

    async def request(self, request_id: str, tenant_name: str | None, *, shows_pods: bool) -> RequestTimeline | None:
        """The newest timeline of this id at the others. None: there is none."""

    async def abort(self, request_id: str, tenant_name: str) -> bool:
        """Ends a request that runs at another. False: there is none."""

    async def take_over(self, key: StreamKey, identity: bytes) -> KeptStream | None:
        """Returns another worker's knowledge of a stream, which it forgets, and ends if it still runs. None: nothing is
        known."""


class NoPeers:
    """The peers of a router that is alone in its process group."""

    async def metrics(self, own: CollectorRegistry) -> bytes:
        """Its own."""
        return generate_latest(own)

    async def num_under_way(self) -> int:
        """None."""
        return 0

    async def clusters(self) -> Sequence[ClusterView]:
        """None."""
        return ()

    async def requests(self, tenant_name: str | None, limit: int, *, shows_pods: bool) -> Sequence[RequestSummary]:
        """None."""
        return ()

    async def request(self, request_id: str, tenant_name: str | None, *, shows_pods: bool) -> RequestTimeline | None:
        """None."""
        return None

    async def abort(self, request_id: str, tenant_name: str) -> bool:
        """Nothing to end."""
        return False

    async def take_over(self, key: StreamKey, identity: bytes) -> KeptStream | None:
        """Nothing is known."""
        return None
