"""Timelines as operators and clients see them; workers of a router tell each other the same."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import islice
from typing import Literal

import msgspec

from router.metrics import GAPS_S
from router.timelines.book import TimelineBook
from router.timelines.timeline import Timeline


class RequestSummary(msgspec.Struct, forbid_unknown_fields=True):
    """A request of the last ones. `status`: queued, running, finished or failed; `error`: the code's label. Times are
    milliseconds; `pods` are for operators. Drafts: docs/speculation.md."""

    id: str
    model: str
    tenant: str
    status: str
    finish_reason: str | None
    error: str | None
    started_at: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_verified_drafts: int
    num_accepted_drafts: int
    ttft_ms: float | None
    duration_ms: float
    longest_gap_ms: float | None
    prefill_pod: str | None
    decode_pod: str | None
    num_events: int


class RequestPhase(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a request's time. `start_ms`: since its arrival; `attempt`: absent for phases of all attempts."""

    name: str
    where: Literal["router", "prefill", "decode"]
    start_ms: float
    duration_ms: float
    pod: str | None
    attempt: int | None
    reason: str | None


class RequestEvent(msgspec.Struct, forbid_unknown_fields=True):
    """Something that went otherwise than planned: prefill_failed, prefill_retry, recompute, redispatch."""

    at_ms: float
    event: str
    reason: str
    pod: str | None


class RequestGaps(msgspec.Struct, forbid_unknown_fields=True):
    """Gaps between deliveries of tokens. `counts` has one more entry than `upper_ms`: those above all bounds. The
    longest began `longest_at_ms` after arrival and ended with the output token of index `longest_before_token`."""

    upper_ms: list[float]
    counts: list[int]
    longest_ms: float
    longest_at_ms: float
    longest_before_token: int


class RequestTimeline(msgspec.Struct, forbid_unknown_fields=True):
    """Answer of GET /v1/requests/{id}. `num_left_out`: attempts and events beyond what is kept of one request."""

    object: Literal["request"]
    request: RequestSummary
    phases: list[RequestPhase]
    events: list[RequestEvent]
    gaps: RequestGaps | None
    num_left_out: int


def summaries_of(book: TimelineBook, tenant_name: str | None, limit: int, *, shows_pods: bool) -> list[RequestSummary]:
    """The newest requests of this process, at most `limit`. `tenant_name` as of TimelineBook."""
    kept = book.newest_first()
    seen = (each for each in kept if tenant_name in (None, each.tenant_name))
    now = time.monotonic()
    return [_summary(timeline, now, shows_pods=shows_pods) for timeline in islice(seen, limit)]


def timeline_of(
    book: TimelineBook, request_id: str, tenant_name: str | None, *, shows_pods: bool
) -> RequestTimeline | None:
    """Returns the timeline of a request of this process. None: none is kept."""
    timeline = book.find(request_id, tenant_name)
    return None if timeline is None else _whole(timeline, shows_pods=shows_pods)


def _summary(timeline: Timeline, now: float, *, shows_pods: bool) -> RequestSummary:
    prefill, decode = timeline.pods if shows_pods else ("", "")
    longest = timeline.longest_gap
    return RequestSummary(
        id=timeline.request_id,
        model=timeline.model,
        tenant=timeline.tenant_name,
        status=timeline.status,
        finish_reason=timeline.finish_reason or None,
        error=timeline.error or None,
        started_at=datetime.fromtimestamp(timeline.started_at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_cached_tokens=timeline.num_cached_tokens,
        num_output_tokens=timeline.num_output_tokens,
        num_verified_drafts=timeline.speculation.num_verified,
        num_accepted_drafts=timeline.speculation.num_accepted,
        ttft_ms=None if timeline.first_token_s is None else _ms(timeline.first_token_s),
        duration_ms=_ms(timeline.duration_s(now)),
        longest_gap_ms=None if longest is None else _ms(longest.seconds),
        prefill_pod=prefill or None,
        decode_pod=decode or None,
        num_events=len(timeline.events),
    )


def _whole(timeline: Timeline, *, shows_pods: bool) -> RequestTimeline:
    now = time.monotonic()
    phases = [
        RequestPhase(
            name=phase.name,
            where=phase.where,
            start_ms=_ms(phase.start_s),
            duration_ms=_ms(phase.duration_s),
            pod=(phase.pod or None) if shows_pods else None,
            attempt=phase.attempt or None,
            reason=phase.reason or None,
        )
        for phase in timeline.phases(now)
    ]
    events = [
        RequestEvent(
            at_ms=_ms(event.at_s), event=event.name, reason=event.reason, pod=event.pod if shows_pods else None
        )
        for event in timeline.events
    ]
    return RequestTimeline(
        object="request",
        request=_summary(timeline, now, shows_pods=shows_pods),
        phases=phases,
        events=events,
        gaps=_gaps(timeline),
        num_left_out=timeline.num_left_out,
    )


def _gaps(timeline: Timeline) -> RequestGaps | None:
    longest = timeline.longest_gap
    if longest is None:
        return None
    return RequestGaps(
        upper_ms=[1000 * bound for bound in GAPS_S],
        counts=list(timeline.gaps),
        longest_ms=_ms(longest.seconds),
        longest_at_ms=_ms(longest.at_s),
        longest_before_token=longest.before_token,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
