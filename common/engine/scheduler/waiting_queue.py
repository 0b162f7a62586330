"""Requests that wait for their turn, with neither blocks nor a slot in the batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from common.engine.scheduler.request import Request


class WaitingQueue:
    """Kept sorted by `Request.order`.

    A preempted request keeps its order, so it returns to the head of those that arrived after it.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute for all of them."""
        return self._num_tokens

    @property
    def head(self) -> Request:
        """The next request. Raises IndexError if the queue is empty."""
        return self._requests[0]

    def push(self, request: Request) -> None:
        """Queue `request` at its place."""
        insort(self._requests, request, key=_order)
        self._num_tokens += request.num_tokens

    def pop(self) -> Request:
        """Take the head."""
        request = self._requests.pop(0)
        self._num_tokens -= request.num_tokens
        return request

    def remove(self, request: Request) -> None:
        """Removes `request`, wherever it is. Raises ValueError if it is not queued."""
        index = bisect_left(self._requests, request.order, key=_order)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request} is not waiting")
        del self._requests[index]
        self._num_tokens -= request.num_tokens


def _order(request: Request) -> tuple[int, float, int]:
    return request.order
