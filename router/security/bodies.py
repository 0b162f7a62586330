"""Request bodies: how many bytes of them are held until they are tokenised, and whether they come fast enough."""

from __future__ import annotations

import ipaddress

from common.errors import OverloadedError, UnavailableError

_IPV6_SITE = 64  # bits of an address; a host that has one address has all that begin with the same bits


class BodyBudget:
    """Bytes of bodies that are unfinished, or wait to be tokenised: of all clients together, and of each."""

    def __init__(self, max_bytes: int, max_client_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_client_bytes = max_client_bytes
        self._by_client: dict[str, int] = {}
        self.num_bytes = 0

    def take(self, client: str, num_bytes: int) -> None:
        """Counts bytes of a client, see `client_of`. Raises OverloadedError if they are more than it may have, and
        UnavailableError if they are more than all may have; then nothing is counted."""
        of_client = self._by_client.get(client, 0) + num_bytes
        if of_client > self._max_client_bytes:
            limit = f"the limit of {self._max_client_bytes} bytes for one address"
            raise OverloadedError(f"the waiting request bodies of this client exceed {limit}; try again later")
        if self.num_bytes + num_bytes > self._max_bytes:
            limit = f"the limit of {self._max_bytes} bytes"
            raise UnavailableError(f"the waiting request bodies of all clients exceed {limit}; try again later")
        self._by_client[client] = of_client
        self.num_bytes += num_bytes

    def give_back(self, client: str, num_bytes: int) -> None:
        """They are held no longer."""
        self.num_bytes -= num_bytes
        left = self._by_client[client] - num_bytes
        if left:
            self._by_client[client] = left
        else:
            del self._by_client[client]


class BodyPace:
    """The time that one body may take: `timeout_s` in all, and in each window of `grace_s` it must bring `min_rate`
    bytes per second."""

    def __init__(self, timeout_s: float, min_rate: float, grace_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._min_rate = min_rate
        self._grace_s = grace_s
        self._due = now + timeout_s
        self._is_last = False  # the window's end is the body's deadline
        self._least = 0.0  # bytes that must have come by its end

    def begin_window(self, num_bytes: int, now: float) -> float:
        """`num_bytes` have come. Returns the seconds until `problem` is to be asked."""
        left = self._due - now
        self._is_last = left <= self._grace_s
        self._least = num_bytes + self._min_rate * self._grace_s
        return max(0.0, min(left, self._grace_s))

    def problem(self, num_bytes: int) -> str:
        """At the end of a window, when `num_bytes` have come; empty: there is none."""
        if self._is_last:
            return f"the body did not arrive within {self._timeout_s:g} s"
        if num_bytes < self._least:
            return f"the body came at less than {self._min_rate:g} bytes per second"
        return ""


def client_of(host: str) -> str:
    """Returns an id for a client: its IPv4 address, or the network of its IPv6 address."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _IPV6_SITE), strict=False))
