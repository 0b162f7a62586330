"""HTTP connections that are closed for what their clients do: counted, and logged without flooding the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.observability.repeats import RepeatedLine
from router.metrics import HTTP_REFUSALS, SecurityMetrics

logger = logging.getLogger(__name__)


class Refusals:
    """Counts and logs the refusals of one HTTP server."""

    def __init__(
        self, metrics: SecurityMetrics, line: Callable[[logging.Logger, int], RepeatedLine] = RepeatedLine
    ) -> None:
        self._metrics = metrics
        self._lines = {reason: line(logger, logging.WARNING) for reason in HTTP_REFUSALS}

    def note(self, reason: str, client: str, problem: str) -> None:
        """One of HTTP_REFUSALS, and in words."""
        self._metrics.http_refused.labels(reason).inc()
        self._lines[reason].log("HTTP: refused %s (%s): %s", client or "a client", reason, problem)
