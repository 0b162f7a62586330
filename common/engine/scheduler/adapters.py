"""The LoRA adapters that live requests are computed with, of which there is a limit.

A request takes its adapter when it comes, and has it until it ends, also while it waits for blocks or its KV. One
that finds all places taken waits beside the queue, and those that come after it with any adapter wait behind it, so
that none waits without end. Requests without an adapter pass.
"""

from __future__ import annotations

from collections import Counter

from common.engine.scheduler.request import Request
from common.errors import UnknownModelError
from common.types import RequestId


class AdapterPlaces:
    """Which adapters are loaded, which are in use, and who waits for one."""

    def __init__(self, most: int) -> None:
        """`most`: adapters in use at once."""
        self._most = most
        self._loaded: set[bytes] = set()
        self._users: Counter[bytes] = Counter()  # live requests, those that wait included
        self._holders: dict[bytes, set[RequestId]] = {}  # requests that have taken it; none is empty
        self._waiting: dict[RequestId, Request] = {}

    @property
    def in_use(self) -> tuple[bytes, ...]:
        """The digests of adapters that requests have taken."""
        return tuple(sorted(self._holders))

    def note_loaded(self, digest: bytes) -> None:
        """The executor has it."""
        self._loaded.add(digest)

    def note_unloaded(self, digest: bytes) -> None:
        """No new request gets it. Raises UnknownModelError if it is not loaded."""
        self.check(digest)
        self._loaded.remove(digest)

    def is_used(self, digest: bytes) -> bool:
        """Whether a live request is for it."""
        return bool(self._users[digest])

    def check(self, digest: bytes) -> None:
        """Raises UnknownModelError if there is no such adapter."""
        if digest and digest not in self._loaded:
            raise UnknownModelError(f"adapter {digest.hex()[:16]} is not loaded", param="adapter")

    def add(self, request: Request) -> None:
        """Counts a live request."""
        if request.adapter:
            self._users[request.adapter] += 1

    def take(self, request: Request) -> bool:
        """Gives the request its adapter. False: it waits for its turn."""
        digest = request.adapter
        if digest and (self._waiting or not self._has_place(digest)):
            self._waiting[request.request_id] = request
            return False
        if digest:
            self._holders.setdefault(digest, set()).add(request.request_id)
        return True

    def release(self, request: Request) -> list[Request]:
        """The request has ended. Returns those that have got their adapters now, in order."""
        digest = request.adapter
        if not digest:
            return []
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
        self._waiting.pop(request.request_id, None)
        if (holders := self._holders.get(digest)) is not None:
            holders.discard(request.request_id)
            if not holders:
                del self._holders[digest]
        served = []
        while self._waiting:
            first = min(self._waiting.values(), key=lambda each: each.order)
            if not self._has_place(first.adapter):
                break
            del self._waiting[first.request_id]
            self._holders.setdefault(first.adapter, set()).add(first.request_id)
            served.append(first)
        return served

    def _has_place(self, digest: bytes) -> bool:
        return digest in self._holders or len(self._holders) < self._most

    def violations(self, live: dict[RequestId, Request]) -> list[str]:
        """Violations, one line each: adapters without a request, and requests without an adapter."""
        users = Counter(request.adapter for request in live.values() if request.adapter)
        found = [] if users == self._users else [f"adapters are counted for {self._users}, not for {users}"]
        holders = {each for requests in self._holders.values() for each in requests}
        if unknown := (holders | set(self._waiting)) - set(live):
            found.append(f"requests that are gone have adapters: {sorted(unknown)}")
        if len(self._holders) > self._most:
            found.append(f"{len(self._holders)} adapters are in use, more than {self._most}")
        return found
