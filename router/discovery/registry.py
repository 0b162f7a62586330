"""Pods that announce themselves in the registry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from common.errors import UnavailableError
from common.registry import PodRecord, Reading, RecordError
from router.discovery.base import Endpoint, Endpoints, Publish
from router.metrics import DiscoveryMetrics

logger = logging.getLogger(__name__)

SOURCE = "registry"
_POLL_S = 5.0  # changes are published as well; this finds what was missed, and leases that have ended


class Changes(Protocol):
    """A subscription to changes."""

    async def wait(self, timeout_s: float) -> None:
        """Return when there is a change, or after `timeout_s` seconds. Raises UnavailableError."""


class Registry(Protocol):
    """A registry, as far as a router needs it. All methods raise UnavailableError."""

    async def read(self) -> Reading:
        """All records under a lease."""

    def changes(self) -> AbstractAsyncContextManager[Changes]:
        """Subscribe."""


class RegistryView:
    """The pods that count, given what the registry says. Pure.

    A registry that failed or lost its data says nothing about the pods: those that were known before count for one more
    lease, in which they have announced themselves again, or are gone.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest: dict[Endpoint, float] = {}  # -> seconds of its lease
        self._held: dict[Endpoint, float] = {}  # known from before -> until when
        self._epoch = b""
        self._in_doubt = False

    def doubt(self) -> None:
        """The registry has failed."""
        self._in_doubt = True

    def take(self, epoch: bytes, records: list[PodRecord]) -> Endpoints:
        """The endpoints after a reading."""
        now = self._clock()
        if self._in_doubt or epoch != self._epoch:
            self._held |= {endpoint: now + lease_s for endpoint, lease_s in self._latest.items()}
        self._in_doubt, self._epoch = False, epoch
        self._latest = {Endpoint(record.role, record.address): record.lease_s for record in records}
        listed = {endpoint.address for endpoint in self._latest}
        self._held = {each: until for each, until in self._held.items() if now < until and each.address not in listed}
        return (*sorted(self._latest), *sorted(self._held))


class RegistryDiscovery:
    """Reads the registry when it changes, and every `poll_s` seconds. A dead registry removes no pod."""

    initial: Endpoints = ()

    def __init__(
        self,
        registry: Registry,
        metrics: DiscoveryMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        poll_s: float = _POLL_S,
    ) -> None:
        """The registry belongs to the caller."""
        self._registry = registry
        self._poll_s = poll_s
        self._metrics = metrics
        self._view = RegistryView(clock)
        self._failing = False
        self._ignored: set[tuple[bytes, bytes]] = set()  # address and record, of those in the last reading

    async def follow(self, publish: Publish) -> None:
        """See Discovery."""
        while True:
            try:
                async with self._registry.changes() as changes:
                    while True:
                        reading = await self._registry.read()
                        self._note_success()
                        publish(self._view.take(reading.epoch, self._records(reading)))
                        await changes.wait(self._poll_s)
            except UnavailableError as error:
                self._note_failure(error)
                await asyncio.sleep(self._poll_s)

    def _records(self, reading: Reading) -> list[PodRecord]:
        """Returns the records that are valid."""
        records, ignored = [], set()
        for address, text in reading.records.items():
            try:
                record = PodRecord.decode(text)
                if record.address.encode() != address:
                    raise RecordError(f"it is of {record.address}")
            except RecordError as error:
                ignored.add((address, text))
                if (address, text) not in self._ignored:
                    self._metrics.ignored_records.inc()
                    logger.warning("the registry's record at %.80r makes no sense and is ignored: %s", address, error)
            else:
                records.append(record)
        self._ignored = ignored
        return records

    def _note_failure(self, error: UnavailableError) -> None:
        self._view.doubt()
        self._metrics.failures.labels(SOURCE).inc()
        if not self._failing:
            logger.warning("the registry does not answer, the known pods stay: %s", error.message)
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            logger.info("the registry answers again")
        self._failing = False
