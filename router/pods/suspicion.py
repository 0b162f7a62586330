"""Evidence against a pod: which requests failed on it since one last succeeded.

A request may fail by itself, on any pod: its sampling parameters overflow, its deadline is too short. So a request that
is repeated counts once, and where several tenants use the pod, those of one of them are not enough. Canary requests are
the router's own and need no second witness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

_ACTIVE_S = 60.0  # a tenant uses a pod for so long after a request of its ended there
_MAX_ACTIVE = 64  # tenants remembered; two are enough


class Cause(Protocol):
    """A request that ran on the pod."""

    @property
    def tenant_name(self) -> str:
        """The tenant's name; all requests without an API key are of one tenant."""

    def identity(self) -> bytes:
        """The same for repeats of a request, whatever their ids and seeds. May take a millisecond."""


class Suspicion:
    """Weighs the failures of one pod."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """`limit`: the weight that is enough."""
        self._limit = limit
        self._clock = clock
        self._requests: dict[tuple[str, bytes], int] = {}  # tenant and identity -> weight
        self._canaries = 0  # weight
        self._active: dict[str, float] = {}  # tenant -> when a request of its last ended here

    def used_by(self, cause: Cause) -> None:
        """A request has ended on the pod, in whatever way."""
        self._active.pop(cause.tenant_name, None)
        self._active[cause.tenant_name] = self._clock()
        if len(self._active) > _MAX_ACTIVE:
            del self._active[next(iter(self._active))]

    def add(self, cause: Cause | None, weight: int) -> None:
        """A request failed; None: a canary."""
        if cause is None:
            self._canaries += weight
            return
        tenant = cause.tenant_name
        if sum(name == tenant for name, _ in self._requests) < self._limit:  # more would change nothing
            self._requests.setdefault((tenant, cause.identity()), weight)

    def clear(self) -> None:
        """A request succeeded."""
        self._requests.clear()
        self._canaries = 0

    @property
    def is_enough(self) -> bool:
        """Whether the pod should be ejected."""
        if self._canaries + sum(self._requests.values()) < self._limit:
            return False
        return bool(self._canaries) or len({name for name, _ in self._requests}) >= min(2, self._num_active)

    @property
    def _num_active(self) -> int:
        since = self._clock() - _ACTIVE_S
        return sum(ended_at >= since for ended_at in self._active.values())
