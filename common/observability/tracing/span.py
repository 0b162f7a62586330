"""Finished spans. Made after the fact, from times that were measured anyway."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.observability.tracing.context import TraceContext

AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue]
Resource = Mapping[str, str]  # attributes of the process


class SpanKind(enum.IntEnum):
    """Numbers are those of OTLP."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanEvent(NamedTuple):
    """Something that happened within a span."""

    name: str
    at_ns: int  # Unix time
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a request's time. Times are Unix times in nanoseconds."""

    name: str
    context: TraceContext
    start_ns: int
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    error: str = ""  # label of its code; empty: there was none

    @property
    def all_attributes(self) -> Attributes:
        """Its attributes, and the one that names the error."""
        return {**self.attributes, "error.type": self.error} if self.error else self.attributes


class WallClock:
    """Turns times of the monotonic clock into Unix times. All spans of a request take the same one, so that they fit
    together even if the wall clock is set."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        """Unix time in nanoseconds of a `time.monotonic()`."""
        return round(monotonic_s * 1e9) + self._offset_ns
