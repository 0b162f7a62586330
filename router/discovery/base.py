"""The interface of every way to find pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

Role = Literal["prefill", "decode"]


class Endpoint(NamedTuple):
    """A pod that is said to be there. What it really is, it says itself once it is connected."""

    role: Role
    address: str  # host:port


Endpoints = tuple[Endpoint, ...]
"""In the order of the source; which is named twice counts once."""

Publish = Callable[[Endpoints], None]
"""Takes the whole current set, whenever it may have changed. Never blocks."""


class Discovery(Protocol):
    """One source of endpoints. `follow` is run in a task of its own, once, until it is cancelled."""

    @property
    def initial(self) -> Endpoints:
        """Returns the endpoints that are known without asking anybody."""

    async def follow(self, publish: Publish) -> None:
        """Publish the set whenever it changes. Returns only if it never will again.

        What can go wrong with the source is dealt with in here: the last set stays.
        """
