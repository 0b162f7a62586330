"""A pod announces itself in the registry:

1. It announces itself once it serves, and renews its lease three times per lease.
2. At the end of its drain it withdraws. The record of a pod that dies expires with its lease.

A pod keeps serving while the registry does not answer: that is logged, and retried at the next renewal.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from common.errors import UnavailableError
from common.registry import PodRecord, RedisRegistry
from common.rpc.server import join_address

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_WITHDRAW_TIMEOUT_S = 2.0
_EVERYWHERE = ("0.0.0.0", "::", "[::]", "")  # noqa: S104  (compared with, not bound to)


class AnnounceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Registry: where a pod announces itself."""

    registry: Annotated[
        str | None,
        Meta(description="Redis where pods announce themselves, redis://[user:password@]host[:port][/db]."),
    ] = None
    registry_namespace: Annotated[
        str, Meta(min_length=1, pattern="^[A-Za-z0-9._-]+$", description="Name of the cluster within the registry.")
    ] = "default"
    registry_lease_s: Annotated[
        float, Meta(ge=0.1, le=3600, description="Seconds after its last renewal for which a pod stays listed.")
    ] = 15.0
    advertise: Annotated[
        str, Meta(description="host[:port] at which others reach this pod; default: the address on which it listens.")
    ] = ""

    def address(self, host: str, port: int) -> str:
        """Returns host:port at which others reach a pod that listens on `host` and `port`. Raises ValueError."""
        if not self.advertise:
            if host in _EVERYWHERE:
                raise ValueError(f"--advertise: must be given with --registry if --host is {host}")
            return join_address(host, port)
        name, separator, digits = self.advertise.rpartition(":")
        if not separator or (":" in name and not name.startswith("[")):  # no port, or a bare IPv6 address
            return join_address(self.advertise, port)
        if not (name and digits.isdigit() and 0 < int(digits) < 65536):
            raise ValueError(f"--advertise: expected host[:port], got {self.advertise!r}")
        return self.advertise


class Registry(Protocol):
    """The registry as a pod uses it. Both methods raise UnavailableError."""

    async def announce(self, record: PodRecord) -> None:
        """Stores the record, or renews its lease."""

    async def withdraw(self, record: PodRecord) -> None:
        """Removes the record."""


class Announcer:
    """Keeps one record in the registry for as long as it runs."""

    def __init__(self, registry: Registry, record: PodRecord) -> None:
        self._registry = registry
        self._record = record
        self._announced: bool | None = None  # whether the last attempt succeeded

    async def run(self) -> None:
        """Announces and renews until cancelled."""
        while True:
            try:
                await self._registry.announce(self._record)
            except UnavailableError as error:
                self._note(error)
            else:
                self._note(None)
            await asyncio.sleep(self._record.lease_s / _RENEWALS_PER_LEASE)

    async def withdraw(self) -> None:
        """Removes the record."""
        try:
            async with asyncio.timeout(_WITHDRAW_TIMEOUT_S):
                await self._registry.withdraw(self._record)
        except (UnavailableError, TimeoutError) as error:
            logger.warning("cannot withdraw from the registry, the record will expire with its lease: %s", error)

    def _note(self, error: UnavailableError | None) -> None:
        """Logs changes only."""
        if error is not None and self._announced is not False:
            logger.warning("cannot announce this pod in the registry, will retry: %s", error.message)
        elif error is None and not self._announced:
            logger.info("announced in the registry as %s", self._record.address)
        self._announced = error is None


def open_registry(config: AnnounceConfig) -> RedisRegistry | None:
    """Opens the configured registry; None: there is none. Raises ConfigError."""
    return RedisRegistry(config.registry, config.registry_namespace) if config.registry else None
