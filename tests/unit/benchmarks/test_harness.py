"""The parts that benchmarks share: turns, tables, processes that are asked, and clients that note when tokens came."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.harness.client import Client, Driver
from benchmarks.harness.figures import in_turn, ratio
from benchmarks.harness.http_server import Connection
from benchmarks.harness.processes import Child, ChildEndedError, OrderError
from benchmarks.harness.report import Page, Verdict, table, verdict_table

ECHO = (
    "import sys, json\nfor line in sys.stdin: print(json.dumps({json.loads(line)[0]: json.loads(line)[1]}), flush=True)"
)


def test_each_side_is_the_first_as_often() -> None:
    turns = [in_turn("abc", turn) for turn in range(6)]
    assert sorted(turn[0] for turn in turns) == ["a", "a", "b", "b", "c", "c"]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)


def test_a_ratio_is_that_of_pairs() -> None:
    assert ratio([1.0, 4.0, 30.0], [1.0, 2.0, 10.0]) == 2.0


def test_a_page_has_its_head_and_what_was_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("Title", "Words.", {"cores": "2"})
    page.section("Part")
    page.add(*table("a | b | ", [(1, 2.5, "x")]))
    page.add(*verdict_table([Verdict("fast", "3 s", False)])[2:])
    page.write(tmp_path / "page.md")
    written = (tmp_path / "page.md").read_text()
    assert written.startswith(
        "# Title\n\nWords.\n\n- cores: 2\n\n## Part\n\n| a | b |  |\n|---|---|---|\n| 1 | 2.5 | x |\n"
    )
    assert "| fast | 3 s | **FAIL** |" in written
    assert capsys.readouterr().out in written


def test_a_process_is_asked_and_its_errors_are_raised() -> None:
    with Child("-c", ECHO) as child:
        assert child.ask("tokens", [1, 2]) == {"tokens": [1, 2]}
        assert child.cpu_s > 0
        with pytest.raises(OrderError, match="error: none left"):
            child.ask("error", "none left")
    assert child.has_ended


def test_a_process_that_ends_shows_its_last_words(tmp_path: Path) -> None:
    ended = Child("-c", "import sys; sys.exit('no such model')", log=tmp_path / "log")
    with ended, pytest.raises(ChildEndedError, match="code 1\nno such model"):
        ended.ask("anything")


def test_tokens_that_come_in_one_chunk_count_as_several() -> None:
    def answer(connection: Connection, path: str, body: bytes) -> None:
        assert path == "/v1/completions"
        connection.begin_stream()
        for num_tokens, reason in ((1, None), (3, None), (json.loads(body)["max_tokens"], "length")):
            choice = {"text": "a", "finish_reason": reason}
            chunk = {"choices": [choice], "usage": {"completion_tokens": num_tokens}}
            connection.send_part(f"data: {json.dumps(chunk)}\n\n".encode())
        connection.send_part(b"data: [DONE]\n\n", is_last=True)

    async def ask(client: Client) -> list[float]:
        return (await client.complete(4, 5)).token_times

    async def serve_and_ask() -> list[float]:
        server = await asyncio.get_running_loop().create_server(lambda: Connection(answer), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(Driver(f"http://127.0.0.1:{port}", "model", 100).run, ask)

    times = asyncio.run(serve_and_ask())
    assert len(times) == 5
    assert times == sorted(times)
