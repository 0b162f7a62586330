"""The terms of a request beside its body: who asks, and how soon they need the answer.

HTTP clients say it in headers, gRPC clients in metadata of the same names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import InvalidRequestError, quoted
from common.observability.tracing.context import TraceContext
from router.fairness.tenant import Tenant

SESSION_HEADER = "x-session-id"
TIMEOUT_HEADER = "x-request-timeout-ms"
TTFT_HEADER = "x-slo-ttft-ms"
ITL_HEADER = "x-slo-itl-ms"
QUEUED_HEADER = "x-baton-queue-ms"  # of an answer: how long its request waited in the router

_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)  # float() takes 1_000, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of one request. Absent limits are None; times are seconds."""

    tenant: Tenant = field(default_factory=Tenant)
    session: str = ""  # whose requests should go to the same pod; empty: no session
    timeout_s: float | None = None  # until the request is ended as overdue
    ttft_slo_s: float | None = None  # until its first token
    itl_slo_s: float | None = None  # between two tokens
    trace: TraceContext | None = None  # the span of the request; None: it is not traced

    @property
    def has_limits(self) -> bool:
        """The client has named one of them."""
        return any(limit is not None for limit in (self.timeout_s, self.ttft_slo_s, self.itl_slo_s))


Header = Callable[[str], str | None]


def read_terms(header: Header, tenant: Tenant, trace: TraceContext | None = None) -> Terms:
    """`header` gives the value of a header by its lower-case name, or None. Raises InvalidRequestError."""
    return Terms(
        tenant=tenant,
        session=header(SESSION_HEADER) or "",
        timeout_s=_seconds(header, TIMEOUT_HEADER),
        ttft_slo_s=_seconds(header, TTFT_HEADER),
        itl_slo_s=_seconds(header, ITL_HEADER),
        trace=trace,
    )


def _seconds(header: Header, name: str) -> float | None:
    text = header(name)
    if text is None:
        return None
    milliseconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidRequestError(f"{name} must be a positive number of milliseconds, got {quoted(text)}", param=name)
    return milliseconds / 1000
