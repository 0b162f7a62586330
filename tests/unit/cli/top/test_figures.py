"""Rates, totals, order and changes, and how they are written."""

from __future__ import annotations

import msgspec
import pytest

from cli.top.answers import ClusterView, Timeline
from cli.top.columns import POD_COLUMNS, in_order
from cli.top.figures import changes_between, figures_of, handoff_lines, rank_lines
from cli.top.poller import MAX_PAUSE_S, Poller
from cli.top.snapshot import describe
from cli.top.timeline_chart import bar, draw
from cli.top.words import byte_rate, duration, plain, rate
from common.errors import UnauthenticatedError, UnreachableError
from tests.page.answers import cluster, pod, summary, timeline


def view_of(tick, *pods, **changes) -> ClusterView:
    return msgspec.convert(cluster(tick, list(pods)) | changes, ClusterView)


def test_rates_are_those_between_two_answers_of_the_same_start():
    prefill, decode = pod("prefill", 1, 1), pod("decode", 1, 9)
    first = view_of(1, prefill, decode)
    second = view_of(3, pod("prefill", 1, 3), pod("decode", 1, 1), pod("decode", 2, 1))  # decode-1 has started again
    figures = {each.pod.name: each for each in figures_of(second, first).pods}
    assert figures["prefill-1"].prompt_rate == pytest.approx(9350)
    assert figures["decode-1"].output_rate is None
    assert figures["decode-2"].output_rate is None
    assert figures_of(second, first).summary[:2] == [
        "Pods ready 3/3  prefill 1/1  decode 2/2   Requests 9   Queued 2",
        "Prompt 9,350 tok/s   Output 0 tok/s   KV handed over 0 B/s",
    ]
    assert all(each.prompt_rate is None for each in figures_of(first, second).pods), "another router's clock"


def test_what_changes_between_two_answers():
    before = view_of(1, pod("prefill", 1, 1), pod("decode", 1, 1))
    ejected = pod("decode", 1, 1, state="ejected", detail="stall")
    assert changes_between(before, view_of(2, ejected, pod("decode", 2, 1, pod_id=None))) == [
        "decode-1 at 10.0.2.1:50051: ready to ejected: stall",
        "10.0.2.2:50051 has joined",
        "prefill-1 at 10.0.1.1:50051 has left",
    ]


def test_ranks_of_a_pod_have_lines_of_their_own():
    ranks = [
        {"engine": 0, "rank": rank, "pid": 70 + rank, "device": "cpu\x1b", "resident_bytes": 3 << 20, "num_steps": 9}
        | {"computing_s": 6.0 * rank, "delayed_s": 1.0 * rank, "waiting_s": 3.0 * rank}
        for rank in range(2)
    ]
    cut = pod("decode", 1, 1, parallel_sizes={"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "new": 4})
    cut["load"]["ranks"] = ranks
    figures = figures_of(view_of(1, pod("prefill", 1, 1), cut), None)
    (column,) = [column for column in POD_COLUMNS if column.title == "RANKS"]
    assert [column.text(row) for row in figures.pods] == ["-", "TP 2 x PP 3"]
    assert rank_lines(figures.pods[0].pod) == []
    lines = describe(figures, "http://router").splitlines()
    start = lines.index("RANKS (time of their steps since their start)")
    assert lines[start + 1 : start + 3] == [
        "decode-1 rank 0: process 70, cpu\\x1b, 3 MiB, computing -, waiting -, without a core -",
        "decode-1 rank 1: process 71, cpu\\x1b, 3 MiB, computing 60%, waiting 30%, without a core 10%",
    ]


def test_drafts_of_a_pod_are_shown_where_it_has_a_proposer():
    pods = [
        pod("prefill", 1, 1),
        pod("decode", 1, 2),
        pod("decode", 2, 0, proposer="a:b\x1b"),
        pod("decode", 3, 1, load=None),
    ]
    figures = figures_of(view_of(1, *pods), None).pods
    share, tokens = [column for column in POD_COLUMNS if column.title in ("DRAFTS", "TOK/STEP")]
    assert [share.text(row) for row in figures] == ["-", "ngram 51%", "a:b\\x1b -", "ngram -"]
    assert [tokens.text(row) for row in figures] == ["-", "2.7", "-", "-"]
    assert in_order(figures, share, is_descending=False)[0].pod.name == "decode-1"


def test_ranks_of_several_engines_are_told_apart():
    ranks = [
        {"engine": engine, "rank": 0, "pid": 70, "device": "cpu", "resident_bytes": 0, "num_steps": 1}
        | {"computing_s": 1.0, "delayed_s": 0.0, "waiting_s": 0.0}
        for engine in range(2)
    ]
    cut = pod("decode", 1, 1, parallel_sizes={"data_parallel_size": 2})
    cut["load"]["ranks"] = ranks
    (found,) = figures_of(view_of(1, cut), None).pods
    assert [line.partition(":")[0] for line in rank_lines(found.pod)] == ["engine 0 rank 0", "engine 1 rank 0"]


def test_rows_without_a_value_come_last_in_both_orders():
    pods = figures_of(view_of(1, pod("decode", 3, 1, load=None), pod("decode", 1, 1), pod("decode", 2, 1)), None).pods
    (run,) = [column for column in POD_COLUMNS if column.title == "RUN"]
    for is_descending, expected in ((True, [2, 1, 3]), (False, [1, 2, 3])):
        assert [row.pod.address[7] for row in in_order(pods, run, is_descending=is_descending)] == list(
            map(str, expected)
        )


def test_the_snapshot_has_all_that_the_cluster_has_and_is_plain():
    view = view_of(2, pod("prefill", 1, 2), pod("decode", 1, 2, state="ejected", detail="stall\x1b[31m: é"))
    lines = describe(figures_of(view, None), "http://router").splitlines()
    assert lines[0] == "http://router"
    assert lines[3] == "qwen3-8b: served, 2 queued, adapters polite"
    assert lines[5].startswith("POD        ROLE     STATE    RUN  WAIT  KV WAIT   KV  PROMPT/S")
    assert lines[7].split()[:6] == ["decode-1", "decode", "ejected", "4", "1", "1"]
    assert lines[7].endswith("qwen3-8b  stall\\x1b[31m: é")
    assert lines[-2:] == ["HANDOFFS (ended: in the last 10 s)", *handoff_lines(view)]
    assert handoff_lines(view) == ["prefill-1 to decode-1: 3 now, 9 ended"]
    assert "No pods." in describe(figures_of(view_of(1), None), "http://router")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("qwen3-8b é 模型", "qwen3-8b é 模型"),
        ("\x1b]52;c;AAAA\x07", "\\x1b]52;c;AAAA\\x07"),
        ("\x9b31m\u202e\u2066\ud800\n\u2028", "\\x9b31m\\u202e\\u2066\\ud800\\n\\u2028"),
        ("a" * 300, "a" * 147 + "..." + "a" * 50),
    ],
)
def test_texts_of_others_are_one_printable_line(text, expected):
    assert plain(text) == expected


def test_figures_as_text():
    assert [rate(value) for value in (None, 0.0, 8.25, 12345.6)] == ["-", "0", "8.2", "12,346"]
    assert [duration(value) for value in (None, 0.04, 99.94, 612.4, 4210.7)] == [
        "-",
        "0.0 ms",
        "99.9 ms",
        "612 ms",
        "4.21 s",
    ]
    assert [byte_rate(value) for value in (None, 0, 999, 96e6)] == ["-", "0 B/s", "999 B/s", "96.0 MB/s"]


# --- timelines ---


def test_a_timeline_has_bars_for_router_pods_and_wire_and_the_reasons():
    whole = msgspec.convert(timeline(summary()), Timeline)
    text = draw(whole, 100).plain
    lines = text.splitlines()
    lanes = [line for line in lines if line and not line.startswith(" ")][5:]
    assert lanes[:4] == ["Router", "Prefill pod 10.0.1.2:50051", "Wire", "Decode pod 10.0.2.1:50051"]
    assert "Route planned   Fallbacks 2" in lines
    assert "Prompt 3,817 tokens, 512 cached   Output 181 tokens, 96 of 152 drafts right" in lines
    plain_request = summary(num_verified_drafts=0, num_accepted_drafts=0)
    assert "drafts" not in draw(msgspec.convert(timeline(plain_request), Timeline), 100).plain
    assert "Longest gap 418 ms, before token 71" in text
    assert "140 ms: prefill failed, unavailable, 10.0.1.1:50051" in text
    assert not any(line.startswith("  route ") for line in lines)
    (transfer,) = [line for line in lines if line.startswith("  transfer ")]
    axis = lines[lines.index("Router") - 1]
    origin, end = axis.index("0"), len(axis)
    bar_start = len(transfer) - len(transfer[origin:].lstrip()) - origin
    assert bar_start / (end - origin) == pytest.approx(598.0 / 4210.7, abs=0.02)
    assert all(len(line) <= 100 for line in lines)


def test_attempts_are_told_apart():
    document = timeline(summary())
    again = [
        phase | {"attempt": 2, "pod": "10.0.1.3:50051"} for phase in document["phases"] if phase["where"] == "prefill"
    ]
    document["phases"] += [*again, {**document["phases"][4], "attempt": 2, "reason": "retry"}]
    document["num_left_out"] = 3
    text = draw(msgspec.convert(document, Timeline), 80).plain
    assert "Prefill pod 10.0.1.2:50051, attempt 1\n" in text
    assert "Prefill pod 10.0.1.3:50051, attempt 2\n" in text
    assert "Route planned, then retry" in text
    assert "3 more attempts and events are not kept" in text


@pytest.mark.parametrize(
    ("start", "size", "expected"),
    [
        (0.0, 1.0, "████"),
        (0.0, 0.0, "▌"),
        (1.0, 0.0, "   ▐"),
        (0.125, 0.5, "▐█▌"),
        (0.5, 9.0, "  ██"),
        (0.25, 0.25, " █"),
    ],
)
def test_bars_have_half_cells_and_are_never_empty(start, size, expected):
    assert bar(start, size, 4) == expected


# --- polling ---


async def test_pauses_grow_while_nothing_answers_and_shrink_again():
    outcomes = [UnreachableError("gone")] * 8 + [None, UnreachableError("gone"), UnauthenticatedError("no key")]
    pauses = []

    async def refresh():
        pauses.append(poller.pause_s)
        poller.now()
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    poller = Poller(refresh, 0.5, clock=lambda: 0.0)
    poller.now()
    with pytest.raises(UnauthenticatedError):
        await poller.run()
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S, 0.5, 1.0]
