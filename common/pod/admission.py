"""Admission of work on this pod: bounded, and closed while the pod drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import OverloadedError, UnavailableError


class Admission:
    """Counts the open pieces of work of a pod: requests, and transfers that outlive theirs.

    Each `admit` or `hold` is followed by exactly one `release`.
    """

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.num_open = 0
        self.draining = False
        self._is_ending = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_change: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Registers a callback that is called when draining begins or ends."""
        self._on_change.append(callback)

    def admit(self) -> None:
        """Admits a new piece of work. Raises UnavailableError while draining, OverloadedError at the bound."""
        if self.draining:
            raise UnavailableError("the pod is draining and takes no new work")
        if self.num_open >= self.max_open:
            raise OverloadedError(f"the pod has {self.num_open} requests and transfers open, its limit")
        self.hold()

    def hold(self) -> None:
        """Counts a piece of work that continues an admitted one, whatever the bound and the drain."""
        self.num_open += 1
        self._idle.clear()

    def release(self) -> None:
        """Ends a piece of work."""
        self.num_open -= 1
        if self.num_open == 0:
            self._idle.set()

    def drain(self) -> None:
        """Admits nothing from now on. Idempotent."""
        self._set_draining(draining=True)

    def undrain(self) -> None:
        """Admits work again. Idempotent. Raises UnavailableError after `end`."""
        if self._is_ending:
            raise UnavailableError("the pod is shutting down and takes no new work")
        self._set_draining(draining=False)

    def end(self) -> None:
        """Drains, which `undrain` cannot undo."""
        self._is_ending = True
        self.drain()

    async def wait_idle(self) -> None:
        """Returns once nothing is open."""
        await self._idle.wait()

    def _set_draining(self, *, draining: bool) -> None:
        if draining != self.draining:
            self.draining = draining
            for callback in self._on_change:
                callback()
