"""Streams leave decode pods that drain, if they are to, before these end them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from router.pods.cluster import Cluster
from router.pods.pod import Pod, PodState


class Movable(Protocol):
    """A request under way."""

    def leave(self, pod: Pod) -> None:
        """Go on elsewhere if it is on this pod and can."""


class DrainWatch:
    """Looks at the decode pods whenever one of them changes."""

    def __init__(self, cluster: Cluster, delay_s: float | None, requests: Collection[Movable]) -> None:
        """`delay_s`: how long streams stay on a pod that drains; None: to its end. `requests`: a live view."""
        self._cluster = cluster
        self._delay_s = delay_s
        self._requests = requests
        self._timers: dict[Pod, asyncio.TimerHandle] = {}  # of the pods that drain

    def look(self) -> None:
        """Start the time of those that have begun to drain."""
        if self._delay_s is None:
            return
        draining = {pod for pod in self._cluster.decode_pods if pod.state is PodState.DRAINING}
        for pod in self._timers.keys() - draining:
            self._timers.pop(pod).cancel()
        for pod in draining - self._timers.keys():
            self._timers[pod] = asyncio.get_running_loop().call_later(self._delay_s, self._clear, pod)

    def close(self) -> None:
        """Move no more requests. Idempotent."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _clear(self, pod: Pod) -> None:
        for request in list(self._requests):
            request.leave(pod)
