"""Judges a pod from outside: by the outcomes of its requests, by signs of work, by canaries.

Signs of work are steps that the engine reports, and answers to requests. A pod that shows none for a while is sent a
canary: a request for one token, which the engine computes like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from common.breaker import Breaker
from common.errors import BatonError, ErrorCode
from router.pods.config import HealthConfig
from router.pods.suspicion import Cause, Suspicion

Reason = Literal["prefill", "decode", "canary", "invalid", "stall"]
Outcome = Literal["ok", "busy", "failed"]

MAX_DOUBLING = 60.0  # of eject_base_s: a pod is tried again within 5 minutes, however often it was ejected
MAX_CANARY_S = 10.0  # for an answer: far more than a pod that works takes, even with a long queue

_FAULTS = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NON_FINITE})


class HealthOwner(Protocol):
    """The owner of a PodHealth: permits ejections, and is told of them."""

    def may_eject(self, *, is_certain: bool) -> bool:
        """Whether enough other pods are left. `is_certain`: the pod has stopped, or fails canaries, which no client can
        cause."""

    def ejected(self, reason: Reason) -> None:
        """Called when the pod must get no more requests."""

    def recovered(self) -> None:
        """Called when the pod may be used again."""


class PodHealth:
    """The health of one pod, across its connections."""

    def __init__(self, config: HealthConfig, owner: HealthOwner, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._owner = owner
        self._clock = clock
        self._breaker = Breaker(clock, base_s=config.eject_base_s, max_s=MAX_DOUBLING * config.eject_base_s)
        self._suspicion = Suspicion(config.eject_after_failures, clock)
        self._worked_at = clock()
        self._ejected_for = ""

    @property
    def is_ejected(self) -> bool:
        """Whether the pod gets only canaries."""
        return not self._breaker.is_closed

    @property
    def detail(self) -> str:
        """Why the pod is ejected and for how long, for a person; empty: it is not ejected."""
        if not self.is_ejected:
            return ""
        remaining_s = self._breaker.remaining_s
        return f"{self._ejected_for}; " + (f"tried again in {remaining_s:.0f} s" if remaining_s else "being tried")

    @property
    def canary_due_in_s(self) -> float:
        """Seconds until the next canary; infinite: none is sent."""
        if self.is_ejected:
            return self._breaker.remaining_s
        interval_s = self.config.canary_interval_s
        return max(0.0, self._worked_at + interval_s - self._clock()) if interval_s else float("inf")

    @property
    def canary_timeout_s(self) -> float:
        """Seconds that a canary may take."""
        return min(self.config.canary_interval_s or MAX_CANARY_S, MAX_CANARY_S)

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of work."""
        return self._clock() - self._worked_at

    def now(self) -> float:
        """The time by its clock."""
        return self._clock()

    def restarted(self) -> None:
        """Starts over with a new incarnation of the pod. An ejected one is tried at once."""
        self._worked_at = self._clock()
        self._suspicion.clear()
        self._breaker.probe_now()

    def worked(self) -> None:
        """Notes a sign of work."""
        self._worked_at = self._clock()

    def note_outcome(
        self, error: BatonError | None, reason: Reason, cause: Cause, *, since: float | None = None
    ) -> None:
        """Notes the outcome of the request `cause`, sent at `since`. Overload and errors of clients are no failures of
        the pod, nor is a deadline that passes while the pod works: a short one passes on any pod."""
        self._suspicion.used_by(cause)
        if error is None:
            self.worked()
            if not self.is_ejected:  # answers that come after the ejection prove nothing
                self._suspicion.clear()
        elif error.code in _FAULTS and not self._was_just_slow(error, since):
            self._fail(f"{reason}: {error.message}", reason, cause, 1)

    def note_invalid(self, detail: str, cause: Cause) -> None:
        """Notes an invalid answer to the request `cause`. Two such requests eject the pod."""
        self._suspicion.used_by(cause)
        self._fail(detail, "invalid", cause, self._half)

    def note_stall(self, detail: str) -> bool:
        """Notes that the engine has stopped in the middle of its work. Returns whether the pod was ejected."""
        if not self.is_ejected and self._owner.may_eject(is_certain=True):
            self._eject(detail, "stall")
            return True
        return False

    def note_canary(self, error: BatonError | None, since: float) -> Outcome:
        """Notes the outcome of a canary sent at `since`, and returns its label."""
        if error is None:
            self.worked()
            self._close()
            return "ok"
        if error.code is ErrorCode.RESOURCE_EXHAUSTED or self._was_just_slow(error, since):
            return "busy"
        if self.is_ejected:
            self._eject(f"canary: {error.message}", "canary")
        else:
            self._fail(f"canary: {error.message}", "canary", None, self._half)
        return "failed"

    def _was_just_slow(self, error: BatonError, since: float | None) -> bool:
        return error.code is ErrorCode.DEADLINE_EXCEEDED and since is not None and self._worked_at > since

    @property
    def _half(self) -> int:
        """Weight of a failure of which two eject."""
        return -(-self.config.eject_after_failures // 2)

    def _fail(self, detail: str, reason: Reason, cause: Cause | None, weight: int) -> None:
        if self.is_ejected or not self.config.eject_after_failures:
            return
        self._suspicion.add(cause, weight)
        if self._suspicion.is_enough and self._owner.may_eject(is_certain=cause is None):
            self._eject(detail, reason)

    def _eject(self, detail: str, reason: Reason) -> None:
        self._ejected_for = detail
        self._suspicion.clear()
        self._breaker.trip()
        self._owner.ejected(reason)

    def _close(self) -> None:
        if self.is_ejected:
            self._breaker.close()
            self._owner.recovered()
        self._suspicion.clear()
