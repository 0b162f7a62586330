"""W3C trace context: which trace a request belongs to, and whether it is sampled.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, replace
from typing import NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

Metadata = tuple[tuple[str, str], ...]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1
_MAX_STATE_CHARS = 512  # what must be passed on; longer ones are dropped
_MAX_STATE_MEMBERS = 32
_STATE_MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a sampled trace. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str = ""  # empty: it is the root
    state: str = ""  # of other tracing systems, passed on as it came

    @property
    def traceparent(self) -> str:
        """The header that names this span as the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED:02x}"

    @property
    def metadata(self) -> Metadata:
        """Headers of a gRPC call below this span."""
        state = ((TRACESTATE, self.state),) if self.state else ()
        return ((TRACEPARENT, self.traceparent), *state)

    def child(self, key: str) -> TraceContext:
        """The span below this one that has this key. The same key gives the same id, so that an id need not be kept
        between the call that it is sent with and the export."""
        digest = hashlib.blake2b(f"{self.span_id}/{key}".encode(), digest_size=8).hexdigest()
        return replace(self, span_id=digest, parent_id=self.span_id)


class RemoteParent(NamedTuple):
    """The parent that the headers of a call name."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str

    @property
    def span(self) -> TraceContext:
        """The caller's span."""
        return TraceContext(self.trace_id, self.span_id, state=self.state)


def read_parent(traceparent: str | None, tracestate: str | None) -> RemoteParent | None:
    """Returns what the headers say; None without a valid `traceparent`, in which case the trace begins here. An invalid
    `tracestate` is dropped."""
    match = _TRACEPARENT.fullmatch(traceparent.strip(" \t")) if traceparent else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return RemoteParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _valid_state(tracestate or ""))


def begin_trace(ratio: float) -> TraceContext | None:
    """Returns the root of a new trace; None: it is not sampled. The choice follows from the id, as with
    OpenTelemetry's TraceIdRatioBased."""
    trace_id = secrets.token_hex(16)
    if int(trace_id[16:], 16) >= ratio * 2**64:
        return None
    return TraceContext(trace_id, secrets.token_hex(8))


def continue_trace(parent: RemoteParent) -> TraceContext | None:
    """Returns a new span below the caller's; None: the caller does not sample the trace."""
    if not parent.is_sampled:
        return None
    return TraceContext(parent.trace_id, secrets.token_hex(8), parent.span_id, parent.state)


def _valid_state(text: str) -> str:
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    if len(text) > _MAX_STATE_CHARS or len(members) > _MAX_STATE_MEMBERS:
        return ""
    return ",".join(members) if all(map(_STATE_MEMBER.fullmatch, members)) else ""
