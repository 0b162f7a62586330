"""How often a request is tried, and how long it waits in between."""

from __future__ import annotations

import random

ADAPTER_PARAM = "adapter"  # in a pod's error: it does not have the request's, or not any more

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0


class Attempts:
    """Counts the dispatches of one request. Each new token resets the count, with the attempt that brought it
    as the first: a long stream survives any number of restarts, one that no pod can go on with does not."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # attempts in a row without a token
        self._fruitless = 0
        self.number = 0  # of the current attempt, from 1 on: its epoch

    @property
    def exhausted(self) -> bool:
        """True if no further attempt may be made."""
        return self._fruitless >= self._limit

    def start(self) -> int:
        """A new attempt; returns its number."""
        self.number += 1
        self._fruitless += 1
        return self.number

    def progressed(self) -> None:
        """The current attempt has brought a token."""
        self._fruitless = 1

    def refused(self) -> None:
        """The current attempt was refused for want of room, which says nothing about the request."""
        self._fruitless -= 1


class Backoff:
    """Delays that double, with jitter: those who were refused together must not come back together."""

    def __init__(self) -> None:
        self._delay_s = _FIRST_DELAY_S

    def next(self) -> float:
        """Seconds to wait this time."""
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, _MAX_DELAY_S)
        return delay_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It went well."""
        self._delay_s = _FIRST_DELAY_S
