"""The timeline of one generation: when what happened to it, on which pod.

Written while the request runs, on the event loop, with the router's monotonic clock alone. Pods report durations; a
pod's phase is placed where it must have been, half of what the network took before it and half after it. Nothing of a
prompt or an answer is kept, and a timeline's size is bounded, whatever happens to its request.

    receive  tokenize  admission  first_token           stream
    |--------|---------|----------|---------------------|------------------------------|   router
                                   route                                                   router
                                    prefill_queue prefill                                  prefill pod
                                    decode_queue          transfer first_decode decode     decode pod
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from common.pb import pods_pb2
from router.requests.request import NO_DRAFTS, GenerationRequest

Where = Literal["router", "prefill", "decode"]

MAX_ATTEMPTS = 16  # that are kept of one request; the last ones
MAX_EVENTS = 32  # the first ones


class Phase(NamedTuple):
    """A part of a request's time. Seconds since its arrival."""

    name: str
    where: Where
    start_s: float
    duration_s: float
    pod: str = ""  # its address
    attempt: int = 0  # from 1 on; 0: of all
    reason: str = ""  # why the pods were chosen, or why the prompt was computed here


class Leg(NamedTuple):
    """A call to a pod, as the router saw it. Times are those of the monotonic clock."""

    attempt: int
    where: Where
    pod: str  # its address
    start: float
    end: float
    error: str  # label; empty: it did not fail


class Failure(NamedTuple):
    """The failure of a leg."""

    at: float  # by the monotonic clock
    reason: str  # label


class Event(NamedTuple):
    """Something that went otherwise than planned."""

    at_s: float  # since arrival
    name: str
    reason: str
    pod: str


class Gap(NamedTuple):
    """Time without a token."""

    seconds: float
    before_token: int  # output index of the token that ended it
    at_s: float  # when it began, since arrival


class Attempt:
    """One dispatch: the pods that it went to, and what they reported."""

    __slots__ = (
        "decode",
        "decode_at",
        "ended_at",
        "number",
        "prefill",
        "prefill_timing",
        "prefilled_at",
        "reason",
        "report",
        "route_s",
        "second_at",
        "sent_at",
    )

    def __init__(self, number: int, decode: str, prefill: str, reason: str, route_s: float, now: float) -> None:
        """`prefill` is empty if the decode pod computes the prompt, `decode` if that is pooled. `route_s`: seconds that
        the decision took."""
        self.number = number
        self.decode = decode
        self.prefill = prefill
        self.reason = reason
        self.route_s = route_s
        self.sent_at = now
        self.prefilled_at = 0.0  # 0: not prefilled; likewise for the times below
        self.prefill_timing = (0.0, 0.0)  # seconds in the queue, and of computing
        self.decode_at = 0.0  # the decode pod's first tokens came
        self.second_at = 0.0  # a token came that the decode pod computed after a handoff
        self.report: pods_pb2.DecodeReport | None = None
        self.ended_at = 0.0

    def legs(self, failed_prefill: Failure | None, lost_decode: Failure | None) -> Iterator[Leg]:
        """Both legs, or the only one, with what went wrong with them. Only when it has ended."""
        if self.prefill:
            ended = self.prefilled_at or (failed_prefill.at if failed_prefill is not None else self.ended_at)
            yield Leg(self.number, "prefill", self.prefill, self.sent_at, ended, _reason(failed_prefill))
        if self.decode:
            yield Leg(self.number, "decode", self.decode, self.sent_at, self.ended_at, _reason(lost_decode))

    def phases(self, end: float) -> Iterator[Phase]:
        """Its parts; times are those of the clock. `end`: of the request, or now."""
        end = self.ended_at or end
        start = self.sent_at - self.route_s
        yield Phase("route", "router", start, self.route_s, attempt=self.number, reason=self.reason)
        if self.prefill:
            yield from self._prefill_phases(end)
        if self.decode_at and self.report is not None:
            yield from self._decode_phases(self.report, end)

    def _prefill_phases(self, end: float) -> Iterator[Phase]:
        if not self.prefilled_at:
            if not self.decode_at:  # no one knows yet what it does there
                yield Phase("prefill", "prefill", self.sent_at, end - self.sent_at, self.prefill, self.number)
            return
        queue_s, compute_s = self.prefill_parts()
        start = (self.sent_at + self.prefilled_at - queue_s - compute_s) / 2
        yield Phase("prefill_queue", "prefill", start, queue_s, self.prefill, self.number)
        yield Phase("prefill", "prefill", start + queue_s, compute_s, self.prefill, self.number)

    def prefill_parts(self) -> tuple[float, float]:
        """Seconds in the prefill pod's queue, and of computing; together no more than passed here."""
        took_s = self.prefilled_at - self.sent_at
        queue_s = min(self.prefill_timing[0], took_s)
        return queue_s, min(self.prefill_timing[1], took_s - queue_s)

    def _decode_phases(self, report: pods_pb2.DecodeReport, end: float) -> Iterator[Phase]:
        took_s = self.decode_at - self.sent_at
        own_s = min(report.first_token_s, took_s)
        start = self.sent_at + (took_s - own_s) / 2
        queue_s = min(report.queue_s, own_s)
        ready = start + own_s  # the first token leaves the pod
        yield Phase("decode_queue", "decode", start, queue_s, self.decode, self.number)
        if report.num_external_tokens and not report.recompute_reason:
            handoff_s = min(report.handoff_s, own_s)
            yield Phase("transfer", "decode", ready - handoff_s, handoff_s, self.decode, self.number)
            second = self.second_at or end
            yield Phase("first_decode", "decode", self.decode_at, second - self.decode_at, self.decode, self.number)
            yield Phase("decode", "decode", second, end - second, self.decode, self.number)
            return
        reason = report.recompute_reason
        yield Phase("prefill", "decode", start + queue_s, own_s - queue_s, self.decode, self.number, reason)
        yield Phase("decode", "decode", self.decode_at, end - self.decode_at, self.decode, self.number)


def _reason(failure: Failure | None) -> str:
    return "" if failure is None else failure.reason


class Timeline:
    """The timeline of one generation. `end` is the last call."""

    __slots__ = (
        "_asked_at",
        "_attempts",
        "_detokenized",
        "_dispatched_at",
        "_ended_at",
        "_first_token_at",
        "_gaps",
        "_last_token_at",
        "_num_left_out",
        "_tokenized",
        "arrived_at",
        "detokenize_s",
        "error",
        "events",
        "finish_reason",
        "longest_gap",
        "model",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "request_id",
        "speculation",
        "started_at",
        "tenant_name",
    )

    def __init__(self, request: GenerationRequest, model: str) -> None:
        """`model`: the first name of the one that serves it."""
        now = time.monotonic()
        self.request_id = request.request_id
        self.tenant_name = request.tenant_name
        self.model = model
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0  # of this generation
        self.speculation = NO_DRAFTS  # of this generation
        self.arrived_at = request.arrived_at
        self.started_at = time.time() - (now - request.arrived_at)  # wall clock, for people
        self.finish_reason = ""  # empty: it runs, or has failed
        self.error = ""  # label of its code
        self.events: list[Event] = []
        self.longest_gap: Gap | None = None
        self._tokenized = (request.tokenize_at or now, request.tokenize_s)
        self._asked_at = now
        self._dispatched_at = 0.0  # 0: not dispatched; likewise for the times below
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._ended_at = 0.0
        self._attempts: list[Attempt] = []
        self._num_left_out = 0  # attempts and events
        self._detokenized: tuple[float, float] | None = None  # when that began and ended; None: it is not measured
        self.detokenize_s = 0.0  # spent on it in between
        self._gaps: list[int] | None = None  # by bucket; None: there was none

    @property
    def is_over(self) -> bool:
        """It has ended."""
        return bool(self._ended_at)

    @property
    def ended_at(self) -> float:
        """The time of its end, by the monotonic clock; 0: it goes on."""
        return self._ended_at

    @property
    def text_ended_at(self) -> float:
        """The time at which the last text was made of its tokens, by the monotonic clock, or its end. Only of requests
        that are traced, which have ended."""
        return max(self._ended_at, self._detokenized[1] if self._detokenized else 0.0)

    @property
    def status(self) -> str:
        """queued, running, finished or failed."""
        if self._ended_at:
            return "failed" if self.error else "finished"
        return "running" if self._dispatched_at else "queued"

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token; None: there is none yet."""
        return self._first_token_at - self.arrived_at if self._first_token_at else None

    @property
    def gaps(self) -> Sequence[int]:
        """How many gaps between deliveries of tokens each bucket holds; empty: there was none."""
        return self._gaps or ()

    @property
    def num_left_out(self) -> int:
        """Attempts and events that are not kept."""
        return self._num_left_out

    @property
    def pods(self) -> tuple[str, str]:
        """Addresses of its last prefill and decode pod; empty: there is none."""
        return (self._attempts[-1].prefill, self._attempts[-1].decode) if self._attempts else ("", "")

    # --- while it runs ---

    @property
    def has_report(self) -> bool:
        """The decode pod of this attempt has said how it got to its first tokens."""
        return bool(self._attempts) and self._attempts[-1].report is not None

    def begin_attempt(self, number: int, decode: str, prefill: str, reason: str, began: float) -> None:
        """It is sent to pods, the choice of which began then. See Attempt."""
        now = time.monotonic()
        self.end_attempt(now)  # if the decode pod was lost before it had the request
        self._dispatched_at = self._dispatched_at or began
        self._attempts.append(Attempt(number, decode, prefill, reason, now - began, now))
        if len(self._attempts) > MAX_ATTEMPTS:
            del self._attempts[0]
            self._num_left_out += 1

    def end_attempt(self, now: float) -> None:
        """Its pods do no more. Idempotent."""
        if self._attempts and not self._attempts[-1].ended_at:
            self._attempts[-1].ended_at = now

    def prefilled(self, queue_s: float, compute_s: float, now: float) -> None:
        """The prefill pod has answered, and says how long it took."""
        attempt = self._attempts[-1]
        attempt.prefilled_at = now
        attempt.prefill_timing = (queue_s, compute_s)

    def reported(self, report: pods_pb2.DecodeReport, now: float) -> None:
        """The decode pod has sent its first tokens, and says how it got there."""
        attempt = self._attempts[-1]
        attempt.decode_at = now
        attempt.report = report

    def verified(self, num_verified: int, num_accepted: int) -> None:
        """A pod has verified so many drafts, of which so many were right."""
        self.speculation = self.speculation.plus(num_verified, num_accepted)

    def event(self, name: str, reason: str, pod: str) -> None:
        """Something went otherwise than planned. `name` and `reason` are labels."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(Event(time.monotonic() - self.arrived_at, name, reason, pod))
        else:
            self._num_left_out += 1

    def first_token(self, now: float) -> None:
        """It has come, from whichever pod."""
        self._first_token_at = self._last_token_at = now

    def gap(self, bucket: int, num_buckets: int, index: int, now: float) -> None:
        """More tokens came, from output index `index` on. `bucket`: of the time since the last ones."""
        gaps = self._gaps
        if gaps is None:
            gaps = self._gaps = [0] * num_buckets
        gaps[bucket] += 1
        seconds = now - self._last_token_at
        if self.longest_gap is None or seconds > self.longest_gap.seconds:
            self.longest_gap = Gap(seconds, index, self._last_token_at - self.arrived_at)
        self._last_token_at = now
        attempt = self._attempts[-1]
        if not attempt.second_at and attempt.decode_at:
            attempt.second_at = now

    def detokenized(self, began: float, now: float) -> None:
        """Tokens were turned into text. Only of requests that are traced."""
        self._detokenized = (self._detokenized[0] if self._detokenized else began, now)
        self.detokenize_s += now - began

    def end(self, now: float, *, finish_reason: str = "", error: str = "") -> None:
        """It has finished or, with an error's label, failed. Later calls have no effect."""
        if not self._ended_at:
            self._ended_at = now
            self.finish_reason, self.error = finish_reason, error
            self.end_attempt(now)

    # --- read ---

    def duration_s(self, now: float) -> float:
        """From arrival to the end, or until now."""
        return (self._ended_at or now) - self.arrived_at

    def server_timing(self, now: float) -> str:
        """The value of the header `server-timing`: what is known so far, in milliseconds. Parts of the first token are
        those of the last attempt. Not made of `phases`, as every answer has one."""
        tokenize_at, tokenize_s = self._tokenized
        sent, first, end = self._dispatched_at, self._first_token_at, self._ended_at or now
        text = (
            f"receive;dur={1000 * (tokenize_at - self.arrived_at):.2f}, tokenize;dur={1000 * tokenize_s:.2f}, "
            f"admission;dur={1000 * max(0.0, sent - tokenize_at - tokenize_s):.2f}"
        )
        if self._attempts:
            attempt = self._attempts[-1]
            text += f", route;dur={1000 * attempt.route_s:.2f}"
            if attempt.prefilled_at:
                queue_s, compute_s = attempt.prefill_parts()
                text += f", prefill_queue;dur={1000 * queue_s:.2f}, prefill;dur={1000 * compute_s:.2f}"
        if first:
            text += f", first_token;dur={1000 * (first - sent):.2f}, stream;dur={1000 * (end - first):.2f}"
        return f"{text}, total;dur={1000 * (end - self.arrived_at):.2f}"

    def phases(self, now: float) -> list[Phase]:
        """Its parts so far. Those of the router follow on each other without a gap, from arrival to the end, or until
        now; `route` and those of pods are within them."""
        end = self._ended_at or now
        tokenize_at, tokenize_s = self._tokenized
        tokenized = tokenize_at + tokenize_s
        sent = self._dispatched_at or end
        parts = [
            Phase("receive", "router", self.arrived_at, tokenize_at - self.arrived_at),
            Phase("tokenize", "router", tokenize_at, tokenize_s),
            Phase("admission", "router", tokenized, max(0.0, sent - tokenized)),
        ]
        if self._dispatched_at:
            first = self._first_token_at or end
            parts.append(Phase("first_token", "router", sent, first - sent))
            for attempt in self._attempts:
                parts += attempt.phases(end)
            if self._first_token_at:
                parts.append(Phase("stream", "router", first, end - first))
        if self._detokenized is not None:
            began, ended = self._detokenized
            parts.append(Phase("detokenize", "router", began, ended - began))
        return [part._replace(start_s=part.start_s - self.arrived_at) for part in parts]

    def legs(self) -> Iterator[Leg]:
        """Calls to pods. Only when it has ended."""
        for attempt in self._attempts:
            yield from attempt.legs(self._failure("prefill_failed", attempt), self._failure("redispatch", attempt))

    def _failure(self, event_name: str, attempt: Attempt) -> Failure | None:
        """Returns the failure that an event of this name tells of the attempt during which it happened."""
        for event in self.events:
            at = self.arrived_at + event.at_s
            if event.name == event_name and attempt.sent_at <= at <= attempt.ended_at:
                return Failure(at, event.reason)
        return None
