"""Whether a request may be tried again, and when it is its turn."""

from __future__ import annotations

import asyncio

from common.errors import BatonError, OverloadedError, UnavailableError
from router.dispatching.attempts import Attempts, Backoff
from router.dispatching.dispatcher import Dispatcher
from router.dispatching.migrations import MigrationSlot
from router.pods.pod import Pod


class Retries:
    """The attempts of one request. Owns its place in the line of those that are computed again."""

    def __init__(self, dispatcher: Dispatcher, adapter: bytes) -> None:
        """`adapter`: digest of the request's; empty: it has none."""
        self.attempts = Attempts(dispatcher.survival.max_attempts)
        self.failed_prefill_pods: set[str] = set()  # addresses
        self._dispatcher = dispatcher
        self._adapter = adapter
        self._backoff = Backoff()
        self._slot: MigrationSlot | None = None  # held from a migration's start to its first token
        self._was_admitted = False  # a pod had it, or a token of it is known: it must not be refused any more

    def hold(self, slot: MigrationSlot) -> None:
        """A request that a pod has moves, at its turn."""
        self._slot, self._was_admitted = slot, True

    def release(self) -> None:
        """Gives the place in the line back. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()

    def progressed(self) -> None:
        """The current attempt has brought a token."""
        self.attempts.progressed()
        if self._slot is not None:
            self.release()
            self._backoff.reset()

    async def turn(self, error: BatonError, pod: Pod | None, *, has_output: bool) -> None:
        """Waits until a request that failed on `pod` may be dispatched again. Raises the error if it may not, and
        UnavailableError if no decode pod comes."""
        if not isinstance(error, OverloadedError):
            self._was_admitted = True
        elif not (self._was_admitted or has_output):
            if all(other is pod for other in self._dispatcher.pods.ready_decode()):
                raise error  # it may be refused, as no pod has had it, and there is no other to ask
        else:
            self.attempts.refused()
            await asyncio.sleep(self._backoff.next())
        if self.attempts.exhausted:
            raise error
        await self._wait_in_line(error)

    async def _wait_in_line(self, error: BatonError) -> None:
        """Waits for a decode pod, and for those who are before us."""
        pods, pod_wait_s = self._dispatcher.pods, self._dispatcher.survival.pod_wait_s
        while True:
            if not await pods.wait_until_ready(pod_wait_s, self._adapter):
                raise UnavailableError(f"{error.message}; {pods.explain()}")
            if not self._was_admitted:
                return  # no pod has computed anything of it yet
            self._slot = await self._dispatcher.migrations.enter()
            if pods.can_compute(self._adapter):
                return
            self.release()
