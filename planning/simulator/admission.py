"""The router's admission over a simulated cluster: its own queue and decisions, by simulated time."""

from __future__ import annotations

from typing import Protocol

from planning.simulator.clock import Clock
from planning.simulator.router import SimulatedRouter
from router.admission.admission import Admission, Outlook
from router.admission.config import AdmissionConfig
from router.admission.forecast import forecast
from router.admission.limits import Limits
from router.fairness.queue import Ticket
from router.fairness.tenant import Tenant
from router.placing.planner import Query


class Waiting(Protocol):
    """A request at the gate."""

    def send(self) -> None:
        """It is its turn."""

    def refuse(self, retry_after_s: float) -> None:
        """It will not be served."""


class SimulatedGate:
    """A copy of router.admission.gate without asyncio."""

    def __init__(self, router: SimulatedRouter, clock: Clock, config: AdmissionConfig, limits: Limits) -> None:
        """All requests have the same limits."""
        self._router = router
        self._clock = clock
        self._admission = Admission(config)
        self._limits = limits
        self._waiting: dict[Ticket, Waiting] = {}
        self._awake = False
        router.on_change(self._wake)

    def offer(self, request: Waiting, query: Query) -> None:
        """Send it, now or later, or refuse it now."""
        admission, router, now = self._admission, self._router, self._clock.now
        backlog_s = admission.backlog_s(now) if self._waiting else 0.0
        plan = router.plan(query._replace(remote_wait_s=backlog_s))
        cached = (plan.prefill or plan.decode).cached_tokens
        ticket = Ticket(
            Tenant(),
            priority=0,
            cost=query.num_prompt_tokens - cached + query.expected_output_tokens,
            is_local=router.sends_prompts_away and plan.prefill is None,
            arrived_at=now,
        )
        room = router.room()
        outlook = Outlook(self._limits, forecast(plan, router.estimates), query.expected_output_tokens)
        if (refusal := admission.refusal(ticket, outlook, room, now)) is not None:
            request.refuse(getattr(refusal.error, "retry_after_s", float("inf")))
        elif admission.passes(ticket, room):
            admission.start(ticket)
            request.send()
        else:
            admission.wait(ticket, now)
            self._waiting[ticket] = request
            self._wake()

    def ended(self) -> None:
        """A request that was sent has ended."""
        self._admission.ended(1)
        self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._awake:
            self._awake = True
            self._clock.after(0.0, self._pump)

    def _pump(self) -> None:
        self._awake = False
        admission, now = self._admission, self._clock.now
        while (ticket := admission.next(self._router.room(), now)) is not None:
            self._waiting.pop(ticket).send()
