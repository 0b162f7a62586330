"""Spans of a request, made of its timelines when it has ended.

chat MODEL                                      the request; below the client's span
`-- generation                                  one for each choice
    |-- receive, tokenize, admission, first_token, stream, detokenize
    |-- route                                   one for each attempt, as the legs
    |-- prefill_leg                             the prefill pod's spans are below it
    `-- decode_leg                              the decode pod's spans are below it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.observability.tracing.context import TraceContext
from common.observability.tracing.span import AttributeValue, Span, SpanEvent, SpanKind, WallClock
from router.requests.request import GenerationRequest
from router.timelines.timeline import Leg, Phase, Timeline

PROVIDER = "baton"


def leg_context(request: GenerationRequest, attempt: int, where: str) -> TraceContext | None:
    """The span of a leg, which is the parent of the pod's; None: the request is not traced."""
    trace = request.trace
    return None if trace is None else _generation_context(trace, request.request_id).child(f"{attempt}.{where}")


def spans_of(trace: TraceContext, requests: Sequence[GenerationRequest], timelines: Sequence[Timeline]) -> list[Span]:
    """All spans of a request that has ended. `requests`: its generations, each with its timeline."""
    clock = WallClock()
    spans = [_request_span(trace, requests, timelines, clock)]
    for timeline in timelines:
        spans += _Generation(trace, timeline, clock).spans()
    return spans


def _generation_context(trace: TraceContext, request_id: str) -> TraceContext:
    return trace.child(request_id)


def _request_span(
    trace: TraceContext, requests: Sequence[GenerationRequest], timelines: Sequence[Timeline], clock: WallClock
) -> Span:
    request, first = requests[0], timelines[0]
    num_tokens, num_cached_tokens = _prompt_tokens(requests, timelines)
    operation = "text_completion" if request.continues_prompt else "chat"
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": first.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.model": first.model,
        "gen_ai.usage.input_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
        "gen_ai.usage.output_tokens": sum(timeline.num_output_tokens for timeline in timelines),
    }
    if len(timelines) > 1:
        attributes["gen_ai.request.choice.count"] = len(timelines)
    if reasons := [timeline.finish_reason for timeline in timelines if timeline.finish_reason]:
        attributes["gen_ai.response.finish_reasons"] = reasons
    return Span(
        name=f"{operation} {first.model}",
        context=trace,
        kind=SpanKind.SERVER,
        start_ns=clock.ns(first.arrived_at),
        end_ns=clock.ns(max(timeline.text_ended_at for timeline in timelines)),
        attributes=attributes,
        error=next((timeline.error for timeline in timelines if timeline.error), ""),
    )


def _prompt_tokens(requests: Sequence[GenerationRequest], timelines: Sequence[Timeline]) -> tuple[int, int]:
    """Tokens of all prompts, and how many of them were cached. Choices of one prompt share it."""
    cached: dict[int, int] = {}
    prompts = {id(request.prompt_token_ids): len(request.prompt_token_ids) for request in requests}
    for request, timeline in zip(requests, timelines, strict=True):
        prompt = id(request.prompt_token_ids)
        cached[prompt] = max(cached.get(prompt, 0), timeline.num_cached_tokens)
    return sum(prompts.values()), sum(cached.values())


class _Generation:
    def __init__(self, trace: TraceContext, timeline: Timeline, clock: WallClock) -> None:
        self._context = _generation_context(trace, timeline.request_id)
        self._timeline = timeline
        self._clock = clock

    def spans(self) -> Iterator[Span]:
        timeline = self._timeline
        yield Span(
            name="generation",
            context=self._context,
            start_ns=self._clock.ns(timeline.arrived_at),
            end_ns=self._clock.ns(timeline.text_ended_at),
            events=[
                SpanEvent(event.name, self._at(event.at_s), {"baton.reason": event.reason, "server.address": event.pod})
                for event in timeline.events
            ],
            attributes={"gen_ai.response.id": timeline.request_id},
            error=timeline.error,
        )
        for phase in timeline.phases(timeline.ended_at):
            if phase.where == "router":
                yield self._phase_span(phase)
        for leg in timeline.legs():
            yield self._leg_span(leg)

    def _phase_span(self, phase: Phase) -> Span:
        attributes: dict[str, AttributeValue] = {}
        if phase.attempt:
            attributes["baton.attempt"] = phase.attempt
        if phase.reason:
            attributes["baton.reason"] = phase.reason
        if phase.name == "detokenize":
            attributes["baton.busy_seconds"] = self._timeline.detokenize_s
        return Span(
            name=phase.name,
            context=self._context.child(f"{phase.attempt}.{phase.name}"),
            start_ns=self._at(phase.start_s),
            end_ns=self._at(phase.start_s + phase.duration_s),
            attributes=attributes,
        )

    def _leg_span(self, leg: Leg) -> Span:
        return Span(
            name=f"{leg.where}_leg",
            context=self._context.child(f"{leg.attempt}.{leg.where}"),
            kind=SpanKind.CLIENT,
            start_ns=self._clock.ns(leg.start),
            end_ns=self._clock.ns(leg.end),
            attributes={"baton.attempt": leg.attempt, "server.address": leg.pod},
            error=leg.error,
        )

    def _at(self, since_arrival_s: float) -> int:
        return self._clock.ns(self._timeline.arrived_at + since_arrival_s)
