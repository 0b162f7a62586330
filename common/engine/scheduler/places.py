"""The place of each live request, which is exactly one:

grammar      no blocks; waits beside the queue for its grammar
adapter      no blocks; waits beside the queue for its adapter
looking up   no blocks; waits beside the queue for the lookup in the tiers
waiting      no blocks; in the queue, new or preempted; the next is the same for those that await a handoff
consumers
remote       blocks reserved, KV in flight
ready        its KV has arrived; it has blocks and wants a slot in the batch
running      in the batch
"""

from __future__ import annotations

from collections import deque

from common.engine.scheduler.request import Request, RequestStatus
from common.engine.scheduler.waiting_queue import WaitingQueue
from common.types import RequestId


class Places:
    """The live requests. Moving one into a place does not take it out of another: `leave` does."""

    def __init__(self) -> None:
        self.live: dict[RequestId, Request] = {}
        self.awaiting_grammar: dict[RequestId, Request] = {}
        self.awaiting_adapter: dict[RequestId, Request] = {}
        self.looking_up: dict[RequestId, Request] = {}
        self.waiting = WaitingQueue()
        self.consumers = WaitingQueue()
        self.remote: dict[RequestId, Request] = {}
        self.ready: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_waiting(self) -> bool:
        """Whether a queue holds something."""
        return bool(self.waiting) or bool(self.consumers)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self.waiting) + len(self.consumers) + sum(map(len, self._beside_the_queue))

    @property
    def _beside_the_queue(self) -> tuple[dict[RequestId, Request], ...]:
        return self.looking_up, self.awaiting_grammar, self.awaiting_adapter

    @property
    def num_holding(self) -> int:
        """Requests with blocks."""
        return len(self.running) + len(self.ready) + len(self.remote)

    @property
    def num_restoring(self) -> int:
        """Requests whose KV comes from a tier."""
        return sum(not request.awaits_handoff for request in self.remote.values())

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute for all requests but those whose KV is in flight."""
        return (
            self.waiting.num_tokens
            + self.consumers.num_tokens
            + sum(request.num_uncomputed_tokens for request in self.running)
            + sum(request.num_uncomputed_tokens for request in self.ready)
            + sum(request.num_tokens for waiting in self._beside_the_queue for request in waiting.values())
        )

    def await_grammar(self, request: Request) -> None:
        """Its grammar is being compiled."""
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.awaiting_grammar[request.request_id] = request

    def grammar_settled(self, request: Request) -> None:
        """Its grammar is there, or will never be. It is in no place yet."""
        del self.awaiting_grammar[request.request_id]
        request.status = RequestStatus.WAITING

    def await_adapter(self, request: Request) -> None:
        """It waits for its adapter, as others are in use and no more may be."""
        request.status = RequestStatus.WAITING_FOR_ADAPTER
        self.awaiting_adapter[request.request_id] = request

    def got_adapter(self, request: Request) -> None:
        """It has its adapter. It is in no place yet."""
        del self.awaiting_adapter[request.request_id]
        request.status = RequestStatus.WAITING

    def look_up(self, request: Request) -> None:
        """It waits for the lookup of its blocks."""
        request.status = RequestStatus.LOOKING_UP
        self.looking_up[request.request_id] = request

    def answered(self, request: Request) -> None:
        """The lookup has ended."""
        del self.looking_up[request.request_id]
        request.status = RequestStatus.WAITING
        self.wait(request)

    def wait(self, request: Request) -> None:
        """It waits for its turn. WAITING or PREEMPTED."""
        self._queue_of(request).push(request)

    def await_kv(self, request: Request) -> None:
        """It has blocks; its KV is on its way."""
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self.remote[request.request_id] = request

    def arrived(self, request: Request) -> None:
        """Its KV is there, as far as it will be. It is in no place yet."""
        del self.remote[request.request_id]
        request.status = RequestStatus.WAITING

    def run(self, request: Request) -> None:
        """It gets a slot."""
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def leave(self, request: Request) -> None:
        """Take it out of its place."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            del self.remote[request.request_id]
        elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            del self.awaiting_grammar[request.request_id]
        elif request.status is RequestStatus.WAITING_FOR_ADAPTER:
            del self.awaiting_adapter[request.request_id]
        elif request.status is RequestStatus.LOOKING_UP:
            del self.looking_up[request.request_id]
        elif request in self.ready:
            self.ready.remove(request)
        else:
            self._queue_of(request).remove(request)

    def violations(self, holders: set[RequestId]) -> list[str]:
        """Violations, one line each: requests in no place, in several or in one that contradicts their status, and
        blocks held (`holders`) by the wrong requests."""
        queued = [*self.waiting, *self.consumers]
        places = {
            RequestStatus.WAITING_FOR_GRAMMAR: list(self.awaiting_grammar.values()),
            RequestStatus.WAITING_FOR_ADAPTER: list(self.awaiting_adapter.values()),
            RequestStatus.LOOKING_UP: list(self.looking_up.values()),
            RequestStatus.RUNNING: self.running,
            RequestStatus.WAITING_FOR_REMOTE_KV: list(self.remote.values()),
            RequestStatus.WAITING: [*self.ready, *(r for r in queued if r.status is not RequestStatus.PREEMPTED)],
            RequestStatus.PREEMPTED: [r for r in queued if r.status is RequestStatus.PREEMPTED],
        }
        violations = [
            f"{request} is kept with the {status.name}"
            for status, requests in places.items()
            for request in requests
            if request.status is not status
        ]
        placed = sorted(request.request_id for requests in places.values() for request in requests)
        if placed != sorted(self.live):
            violations.append(f"requests {sorted(self.live)} are in places {placed}")
        expected = {request.request_id for request in (*self.running, *self.remote.values(), *self.ready)}
        if holders != expected:
            violations.append(f"blocks are held by {sorted(holders)}, not by {sorted(expected)}")
        return violations

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self.consumers if request.awaits_handoff else self.waiting
