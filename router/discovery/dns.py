"""Pods behind a name, as a headless service of Kubernetes has it: each address that the name resolves to is one."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable

from common.rpc.server import join_address
from router.discovery.base import Endpoint, Endpoints, Publish, Role
from router.metrics import DiscoveryMetrics

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""IP addresses of a host name. Raises OSError. The port is a hint for the resolver only."""

PREFIX = "dns:"
_INTERVAL_S = 5.0  # between two lookups; the TTL of a headless service in Kubernetes is about that
_PATIENCE_S = 5.0  # with one lookup, before it is counted as failed; the system's resolver has limits of its own
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")


def parse_dns(entry: str) -> tuple[str, int]:
    """Name and port of "dns:NAME:PORT". Raises ValueError."""
    name, _, digits = entry.removeprefix(PREFIX).rpartition(":")
    if not (_NAME.fullmatch(name) and len(name) <= 253 and digits.isdigit() and 0 < int(digits) < 65536):
        raise ValueError(f"expected dns:NAME:PORT, got {entry!r}")
    return name, int(digits)


async def system_resolve(name: str, port: int) -> list[str]:
    """All A and AAAA addresses, as the system finds them."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsDiscovery:
    """One name, looked up every `interval_s` seconds. A lookup that fails, or finds no pod, changes nothing."""

    initial: Endpoints = ()

    def __init__(
        self,
        role: Role,
        entry: str,
        metrics: DiscoveryMetrics,
        resolve: Resolve = system_resolve,
        *,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """`entry`: dns:NAME:PORT. Raises ValueError."""
        self._role = role
        self._entry = entry
        self._name, self._port = parse_dns(entry)
        self._interval_s = interval_s
        self._metrics = metrics
        self._resolve = resolve
        self._failing = False

    async def follow(self, publish: Publish) -> None:
        """See Discovery."""
        while True:
            try:
                addresses = await self._look_up()
            except (OSError, UnicodeError, ValueError) as error:
                self._note_failure(str(error))
            else:
                self._note_success()
                publish(tuple(Endpoint(self._role, join_address(address, self._port)) for address in addresses))
            await asyncio.sleep(self._interval_s)

    async def _look_up(self) -> list[str]:
        """In one order, whatever the resolver's. There is never more than one lookup under way: the system's cannot be
        given up, only waited for."""
        lookup = asyncio.ensure_future(self._resolve(self._name, self._port))
        try:
            done, _ = await asyncio.wait({lookup}, timeout=_PATIENCE_S)
            if not done:
                self._note_failure(f"no answer within {_PATIENCE_S:g} s")
            addresses = sorted({str(ipaddress.ip_address(address)) for address in await lookup})
        finally:
            lookup.cancel()
        if not addresses:
            raise OSError("no address")
        return addresses

    def _note_failure(self, reason: str) -> None:
        self._metrics.failures.labels(self._entry).inc()
        if not self._failing:
            logger.warning("%s cannot be resolved, its last addresses stay: %s", self._entry, reason)
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            logger.info("%s is resolved again", self._entry)
        self._failing = False
