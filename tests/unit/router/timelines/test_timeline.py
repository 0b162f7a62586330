"""What a timeline keeps of a request, and that it stays small."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from common.pb import pods_pb2
from common.types import SamplingParams
from router.metrics import GAPS_S, LocalHistograms
from router.requests.request import GenerationRequest
from router.requests.terms import Terms
from router.timelines.book import TimelineBook
from router.timelines.timeline import MAX_ATTEMPTS, MAX_EVENTS, Timeline

NUM_BUCKETS = len(GAPS_S) + 1


def request_of(number=0, arrived_at=100.0):
    return GenerationRequest(
        request_id=f"request-{number}",
        model_id=0,
        prompt_token_ids=[1] * 4000,
        block_hashes=b"",
        sampling=SamplingParams(),
        stops=(),
        cache_salt="",
        priority=0,
        kv_failure_policy="recompute",
        terms=Terms(),
        continues_prompt=True,
        arrived_at=arrived_at,
        tokenize_at=arrived_at + 0.01,
        tokenize_s=0.02,
        deadline=arrived_at + 600,
    )


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.04

    monkeypatch.setattr("router.timelines.timeline.time.monotonic", lambda: Clock.now)
    return Clock


def test_a_stall_stays_visible(clock):
    timeline = Timeline(request_of(), "model")
    timeline.begin_attempt(1, "d:1", "", "colocated", began=100.04)
    timeline.first_token(100.5)
    histogram = LocalHistograms("x", "x", GAPS_S).labels("model")
    at = 100.5
    for index in range(1, 300):
        gap = 4.0 if index == 150 else 0.02
        at += gap
        timeline.gap(histogram.observe(gap), NUM_BUCKETS, index, at)
    timeline.end(at, finish_reason="length")
    assert sum(timeline.gaps) == 299
    assert timeline.gaps[GAPS_S.index(5)] == 1
    longest = timeline.longest_gap
    assert (longest.before_token, longest.seconds) == (150, pytest.approx(4.0))
    assert longest.at_s == pytest.approx(0.5 + 149 * 0.02)


def test_phases_of_pods_are_placed_in_the_middle_of_what_the_router_saw(clock):
    timeline = Timeline(request_of(), "model")
    clock.now = 100.05
    timeline.begin_attempt(1, "d:1", "p:1", "lower_ttft", began=100.04)
    timeline.prefilled(queue_s=0.1, compute_s=0.3, now=100.55)  # 0.5 s in all
    timeline.first_token(100.55)
    report = pods_pb2.DecodeReport(num_external_tokens=9, queue_s=0.2, handoff_s=0.05, first_token_s=0.58)
    timeline.reported(report, 100.65)  # 0.6 s in all
    timeline.gap(0, NUM_BUCKETS, 1, 100.75)
    timeline.gap(0, NUM_BUCKETS, 2, 101.0)
    timeline.end(101.05, finish_reason="length")
    assert [(phase.name, round(phase.start_s, 6), round(phase.duration_s, 6)) for phase in timeline.phases(300.0)] == [
        ("receive", 0.0, 0.01),
        ("tokenize", 0.01, 0.02),
        ("admission", 0.03, 0.01),
        ("first_token", 0.04, 0.51),
        ("route", 0.04, 0.01),
        ("prefill_queue", 0.1, 0.1),
        ("prefill", 0.2, 0.3),
        ("decode_queue", 0.06, 0.2),
        ("transfer", 0.59, 0.05),
        ("first_decode", 0.65, 0.1),
        ("decode", 0.75, 0.3),
        ("stream", 0.55, 0.5),
    ]


def test_pods_that_report_more_time_than_passed_are_not_believed(clock):
    timeline = Timeline(request_of(), "model")
    timeline.begin_attempt(1, "d:1", "p:1", "planned", began=100.04)
    timeline.prefilled(queue_s=1e9, compute_s=1e9, now=100.5)
    timeline.reported(
        pods_pb2.DecodeReport(queue_s=9e9, handoff_s=9e9, first_token_s=9e9, num_external_tokens=1), 100.6
    )
    timeline.first_token(100.6)
    timeline.end(101.0, error="internal")
    timeline.end(200.0, finish_reason="stop")
    assert (timeline.status, timeline.error, timeline.finish_reason) == ("failed", "internal", "")
    for phase in timeline.phases(300.0):
        assert 0 <= phase.start_s <= phase.start_s + phase.duration_s <= 1.0 + 1e-9, phase


def test_a_request_that_fails_without_end_does_not_grow_without_end(clock):
    timeline = Timeline(request_of(), "model")
    for number in range(1, 1000):
        timeline.begin_attempt(number, "d:1", "p:1", "planned", began=clock.now)
        timeline.event("redispatch", "pod_lost", "d:1")
    assert len(timeline.events) == MAX_EVENTS
    assert len({phase.attempt for phase in timeline.phases(300.0)}) == MAX_ATTEMPTS + 1
    assert timeline.num_left_out == 999 - MAX_EVENTS + 999 - MAX_ATTEMPTS
    clock.now += 5
    timeline.begin_attempt(1000, "d:2", "", "colocated", began=clock.now)
    lasted = [phase.duration_s for phase in timeline.phases(clock.now + 1) if phase.pod == "p:1"]
    assert max(lasted) == pytest.approx(5)


def run_through(book, first, stop):
    for number in range(first, stop):
        timeline = Timeline(request_of(number), "model")
        book.keep(timeline)
        timeline.begin_attempt(1, "d:1", "p:1", "planned", began=100.04)
        timeline.prefilled(0.1, 0.2, 100.5)
        timeline.first_token(100.5)
        timeline.reported(pods_pb2.DecodeReport(num_external_tokens=9), 100.6)
        for index in range(1, 20):
            timeline.gap(index % NUM_BUCKETS, NUM_BUCKETS, index, 101.0 + index)
        timeline.end(200.0, finish_reason="length")


def test_memory_is_constant_over_ten_thousand_requests():
    book = TimelineBook(200)
    tracemalloc.start()
    try:
        run_through(book, 0, 400)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run_through(book, 400, 10_400)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(book) == 200
    assert before < 200 * 4096, "prompts are kept"
    assert abs(after - before) < 200 * 100
    assert [each.request_id for each in book.newest_first()][:2] == ["request-10399", "request-10398"]
