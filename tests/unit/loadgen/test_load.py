"""What is measured of a server whose timing is scripted is what the script says, computed here another way."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence

import pytest

from loadgen.endpoint import Api, OpenAIEndpoint
from loadgen.figures import Distribution, Figures, as_json, summarise
from loadgen.http_client import HttpClient
from loadgen.load import Run, RunInterrupted, run_load
from loadgen.slo import parse_slo
from loadgen.workload import Conversation, Turn
from tests.unit.loadgen.scripted import (
    CLOSE,
    Part,
    Request,
    Script,
    ScriptedServer,
    VirtualLoop,
    event,
    http_answer,
    piece,
    run_virtually,
    stream,
    stream_head,
    token,
    usage,
)

EXACT = 1e-6


def loaded(
    script: Script,
    conversations: Sequence[Conversation],
    *,
    api: Api = "completions",
    max_concurrency: int | None = None,
    timeout_s: float = 60.0,
) -> tuple[Run, ScriptedServer]:
    async def main(loop: VirtualLoop) -> tuple[Run, ScriptedServer]:
        server = ScriptedServer(loop, script)
        client = HttpClient("http://scripted:1", clock=loop.time, connect=server.connect)
        endpoint = OpenAIEndpoint(client, api, "m", timeout_s=timeout_s, extra_body={})
        run = await run_load(conversations, endpoint, max_concurrency=max_concurrency, clock=loop.time)
        client.close()
        return run, server

    return run_virtually(main)


def test_a_run_that_is_cancelled_says_what_was_measured_until_then() -> None:
    async def main(loop: VirtualLoop) -> Run:
        server = ScriptedServer(loop, lambda _: list(stream([0.1, 0.2])))  # complete after 0.7 s
        client = HttpClient("http://scripted:1", clock=loop.time, connect=server.connect)
        endpoint = OpenAIEndpoint(client, "completions", "m", timeout_s=60.0, extra_body={})
        talk = Conversation(0.0, [Turn("a", 4), Turn("b", 4, wait_s=5.0)])
        conversations = [talk, *singles([0.0, 1.0, 2.0, 9.0])]
        load = asyncio.create_task(run_load(conversations, endpoint, clock=loop.time))
        loop.call_later(2.15, load.cancel)
        with pytest.raises(RunInterrupted) as interruption:
            await load
        assert load.cancelled()
        client.close()
        return interruption.value.run

    run = run_virtually(main)
    assert len(run.samples) == 3
    figures = summarise(run, parse_slo(["ttft:200"]))
    assert (figures.completed, figures.failed, figures.num_unfinished, figures.attainment) == (3, 0, 3, 1.0)
    assert figures.duration_s == pytest.approx(2.15)
    assert as_json(figures)["unfinished"] == 3


def singles(starts: Sequence[float | None]) -> list[Conversation]:
    return [Conversation(start_s, [Turn(f"prompt {number}", 4)]) for number, start_s in enumerate(starts)]


def percentile(values: Sequence[float], share: float) -> float:
    """By its definition, without numpy."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def expected(seconds: Sequence[float]) -> Distribution:
    values = [1e3 * each for each in seconds]
    shares = (percentile(values, 90), percentile(values, 99))
    return Distribution(statistics.fmean(values), statistics.median(values), statistics.pstdev(values), *shares)


def test_figures_are_those_of_the_script() -> None:
    choices = random.Random(5)
    starts = sorted(choices.uniform(0, 10) for _ in range(40))
    arrivals = [
        list(itertools.accumulate(choices.uniform(0.005, 0.4) for _ in range(choices.randint(1, 9)))) for _ in starts
    ]
    completions = [2 * len(times) for times in arrivals]  # two tokens in a chunk

    def script(request: Request) -> Sequence[Part]:
        number = int(request.body["prompt"].split()[1])
        return list(stream(arrivals[number], prompt=100 + number, completion=completions[number]))

    run, server = loaded(script, singles(starts))
    figures = summarise(run, parse_slo(["ttft:200", "itl:300"]))

    assert [request.time - 100.0 for request in server.requests] == pytest.approx(starts, abs=EXACT)
    ttfts = [times[0] for times in arrivals]
    gaps = [later - earlier for times in arrivals for earlier, later in itertools.pairwise(times)]
    ends = [start + times[-1] + 0.5 for start, times in zip(starts, arrivals, strict=True)]
    duration = max(ends)
    tpots = [(times[-1] - times[0]) / (count - 1) for times, count in zip(arrivals, completions, strict=True)]
    kept = sum(
        times[0] <= 0.2 and all(later - earlier <= 0.3 for earlier, later in itertools.pairwise(times))
        for times in arrivals
    )
    assert 0 < kept < 40
    assert figures.latencies["ttft"] == pytest.approx(expected(ttfts), abs=EXACT)
    assert figures.latencies["itl"] == pytest.approx(expected(gaps), abs=EXACT)
    assert figures.latencies["tpot"] == pytest.approx(expected(tpots), abs=EXACT)
    assert figures.latencies["e2el"] == pytest.approx(expected([times[-1] for times in arrivals]), abs=EXACT)
    assert figures.duration_s == pytest.approx(duration, abs=EXACT)
    assert (figures.completed, figures.failed, figures.num_without_usage) == (40, 0, 0)
    assert figures.total_input_tokens == sum(range(100, 140))
    assert figures.total_output_tokens == sum(completions)
    assert figures.output_throughput == pytest.approx(sum(completions) / duration)
    assert figures.request_throughput == pytest.approx(40 / duration)
    assert figures.goodput == pytest.approx(kept / duration)
    assert figures.send_delay == pytest.approx(Distribution(0, 0, 0, 0, 0), abs=EXACT)
    by_second = [0.0] * 20
    for start, times in zip(starts, arrivals, strict=True):
        for at_s in times:
            by_second[int(start + at_s)] += 2
    assert figures.max_output_tokens_per_s == pytest.approx(max(by_second))
    overlaps = [
        sum(start <= other < start + times[-1] for start, times in zip(starts, arrivals, strict=True))
        for other in starts
    ]
    assert figures.max_concurrent_requests == max(overlaps)


def test_failures_are_counted_by_kind_and_are_in_no_latency() -> None:
    def script(request: Request) -> Sequence[Part]:
        match int(request.body["prompt"].split()[1]):
            case 0:
                return list(stream([0.1, 0.2]))
            case 1:
                return [(9.0, http_answer(503, {"error": {"message": "no pod"}}))]
            case 2:
                return [(0.1, stream_head() + piece(token(" a"))), (5.0, piece(event({"error": {"message": "died"}})))]
            case 3:
                return [(0.1, stream_head() + piece(token(" a"))), (5.0, CLOSE)]
            case 4:
                return [(0.1, stream_head() + piece(token(" a"))), (5.0, piece(b""))]
            case 5:
                return [(0.1, stream_head() + piece(event("[DONE]")) + piece(b""))]
            case 6:
                return [(0.1, stream_head() + piece(b"data: {nonsense\n\n"))]
            case 7:
                return [(0.1, b"220 mail server ready\r\n")]
            case _:
                return []

    run, server = loaded(script, singles([None] * 9), timeout_s=30.0)
    figures = summarise(run, parse_slo(["e2el:1000"]))
    assert {kind: errors.num_requests for kind, errors in figures.errors.items()} == {
        "status 503": 1,
        "error in stream": 1,
        "disconnected": 1,
        "incomplete stream": 1,
        "no tokens": 1,
        "invalid response": 2,
        "timeout": 1,
    }
    assert figures.errors["status 503"].example == "no pod"
    assert figures.errors["error in stream"].example == "died"
    assert (figures.completed, figures.failed, figures.attainment) == (1, 8, pytest.approx(1 / 9))
    assert figures.latencies["e2el"].mean == pytest.approx(200)
    assert as_json(figures)["failed"] == 8
    assert len(server.requests) == 9


def test_a_refused_connection_is_a_failure_and_not_the_end() -> None:
    async def main(loop: VirtualLoop) -> Figures:
        server = ScriptedServer(loop, lambda _: list(stream([0.1])))
        server.refused = 2
        client = HttpClient("http://scripted:1", clock=loop.time, connect=server.connect)
        endpoint = OpenAIEndpoint(client, "completions", "m", timeout_s=9.0, extra_body={})
        return summarise(await run_load(singles([0.1, 0.2, 0.3]), endpoint, clock=loop.time), {})

    figures = run_virtually(main)
    assert (figures.completed, figures.errors["connect"].num_requests) == (1, 2)


@pytest.mark.parametrize("separator", [b"\n\n", b"\r\n\r\n"])
def test_a_token_counts_when_its_event_is_complete(separator: bytes) -> None:
    def script(_: Request) -> Sequence[Part]:
        first, second = (token(text).replace(b"\n\n", separator) for text in (" one", " two"))
        head = stream_head() + piece(b": ping" + separator)
        tail = (token("", "stop") + event("[DONE]")).replace(b"\n\n", separator)
        return [
            (0.1, head),
            (0.2, piece(first[:9])),
            (0.3, piece(first[9:-1])),
            (0.4, piece(first[-1:] + second)),
            (0.7, piece(tail) + piece(b"")),
        ]

    run, _ = loaded(script, singles([0.0]))
    (sample,) = run.samples
    assert sample.failure is None
    assert sample.ttft_s == pytest.approx(0.4)
    assert sample.gaps_s == pytest.approx([0.0, 0.3])
    assert (sample.has_usage, sample.num_output_tokens) == (False, 3)
    assert summarise(run, {}).num_without_usage == 1


def chat_chunk(**delta: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def test_the_first_token_of_a_chat_is_not_its_role() -> None:
    def script(_: Request) -> Sequence[Part]:
        return [
            (0.1, stream_head() + piece(chat_chunk(role="assistant", content=""))),
            (0.4, piece(chat_chunk(reasoning_content="Hm"))),
            (0.5, piece(chat_chunk(content="Hi"))),
            (0.6, piece(event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + usage(3, 2) + event("[DONE]"))),
            (0.6, piece(b"")),
        ]

    run, server = loaded(script, singles([0.0]), api="chat")
    assert run.samples[0].ttft_s == pytest.approx(0.4)
    assert run.samples[0].gaps_s == pytest.approx([0.1, 0.1])
    assert server.requests[0].path == "/v1/chat/completions"
    assert server.requests[0].body["messages"] == [{"role": "user", "content": "prompt 0"}]
    assert server.requests[0].body["max_completion_tokens"] == 4


def test_an_open_loop_does_not_wait_for_a_slow_endpoint() -> None:
    starts = [0.5 * number for number in range(20)]
    run, server = loaded(lambda _: list(stream([30.0])), singles(starts))
    assert [request.time - 100 for request in server.requests] == pytest.approx(starts, abs=EXACT)
    assert summarise(run, {}).max_concurrent_requests == 20


def test_a_wait_for_a_slot_is_in_goodput_and_stated_beside_latencies() -> None:
    run, server = loaded(lambda _: list(stream([1.0])), singles([0.0, 0.0, 0.0]), max_concurrency=1)
    figures = summarise(run, parse_slo(["ttft:2000"]))
    assert [request.time - 100 for request in server.requests] == pytest.approx([0, 1.5, 3.0])
    assert figures.latencies["ttft"].median == pytest.approx(1000)
    assert figures.send_delay is not None
    assert figures.send_delay.median == pytest.approx(1500)
    assert figures.attainment == pytest.approx(1 / 3)  # 1 s, 2.5 s, 4 s after they were due
    assert figures.max_concurrent_requests == 1
    assert server.num_connections == 1


def test_turns_follow_each_other_with_all_that_was_said() -> None:
    def script(request: Request) -> Sequence[Part]:
        if "bad" in str(request.body):
            return [(0.1, http_answer(500, {"error": {"message": "no"}}))]
        return list(stream([0.1, 0.2]))

    turns = [Turn("one", 4), Turn("two", 4, wait_s=2.0)]
    broken = [Turn("bad", 4), Turn("later", 4)]
    run, server = loaded(script, [Conversation(0.0, turns), Conversation(0.0, broken)], api="chat")
    later = next(request for request in server.requests if len(request.body["messages"]) > 1)
    assert later.body["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " t0 t1"},
        {"role": "user", "content": "two"},
    ]
    assert later.time - 100 == pytest.approx(0.7 + 2.0)
    assert [sample.failure and sample.failure.kind for sample in run.samples] == [None, None, "status 500", "not sent"]


@pytest.mark.parametrize(
    ("details", "drafts", "acceptance", "tokens_per_step"),
    [
        ({"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}, (12, 4), 0.75, 2.5),
        ({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 2}, (0, 4), 0.0, 1.0),
        ({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}, (0, 0), None, None),
        ({"reasoning_tokens": 3, "accepted_prediction_tokens": None}, (0, 0), None, None),
        (None, (0, 0), None, None),
    ],
)
def test_drafts_are_those_that_the_endpoint_tells_of(
    details: dict[str, int | None] | None,
    drafts: tuple[int, int],
    acceptance: float | None,
    tokens_per_step: float | None,
) -> None:
    def script(_: Request) -> Sequence[Part]:
        last = token(" two", "stop") + usage(3, 10, completion_tokens_details=details) + event("[DONE]")
        return [(0.1, stream_head()), (0.2, piece(token(" one"))), (0.3, piece(last) + piece(b""))]

    run, _ = loaded(script, singles([0.0, 1.0]))
    figures = summarise(run, {})
    assert (figures.num_accepted_drafts, figures.num_rejected_drafts) == drafts
    assert (figures.draft_acceptance, figures.tokens_per_step) == (acceptance, tokens_per_step)
    found = as_json(figures)
    assert (found["accepted_drafts"], found["rejected_drafts"]) == drafts
    assert (found["draft_acceptance"], found["tokens_per_step"]) == (acceptance, tokens_per_step)
