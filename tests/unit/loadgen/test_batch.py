"""A batch loses nothing and does nothing twice, whatever happens to the endpoint, the files and the process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.errors import BatonError, ConfigError, UnreachableError
from loadgen.batch.output import OutputFile
from loadgen.batch.runner import Batch, InputFile
from loadgen.http_client import HttpClient
from tests.unit.loadgen.scripted import (
    CLOSE,
    Part,
    Request,
    Script,
    ScriptedServer,
    VirtualLoop,
    http_answer,
    run_virtually,
)

TIMEOUT_S = 100.0


def line(custom_id: str, **changes: object) -> str:
    body = {"model": "m", "prompt": custom_id}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changes})


def echo(request: Request) -> Sequence[Part]:
    return [(0.5, http_answer(200, {"text": request.body["prompt"]}, "x-request-id: cmpl-1"))]


class Files:
    def __init__(self, directory: Path, *lines: str) -> None:
        self.source = directory / "in.jsonl"
        self.output = directory / "out.jsonl"
        self.source.write_text("".join(f"{text}\n" for text in lines))

    def run(
        self, script: Script = echo, *, retries: int = 2, concurrency: int = 3, refused: int = 0
    ) -> tuple[ScriptedServer, float]:
        """The server, and how long it took."""

        async def main(loop: VirtualLoop) -> tuple[ScriptedServer, float]:
            server = ScriptedServer(loop, script)
            server.refused = refused
            client = HttpClient("http://scripted:1", clock=loop.time, connect=server.connect)
            source, output, began = InputFile(self.source), OutputFile(self.output), loop.time()
            try:
                source.check_answered_by(output)
                await Batch(source, output, client, retries=retries, timeout_s=TIMEOUT_S).run(concurrency)
            finally:
                output.close()
            return server, loop.time() - began

        return run_virtually(main)

    def answers(self) -> dict[str | None, dict[str, Any]]:
        read = [json.loads(text) for text in self.output.read_text().splitlines()]
        assert len({answer["id"] for answer in read}) == len(read)
        return {answer["custom_id"]: answer for answer in read}


def test_answers_are_in_the_format(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"), "", line("b"))
    server, _ = files.run()
    answers = files.answers()
    assert set(answers) == {"a", "b"}
    assert answers["a"]["response"] == {"status_code": 200, "request_id": "cmpl-1", "body": {"text": "a"}}
    assert answers["a"]["error"] is None
    assert answers["a"]["id"].startswith("batch_req_")
    assert [request.path for request in server.requests] == ["/v1/completions"] * 2


def test_no_more_than_allowed_are_under_way(tmp_path: Path) -> None:
    server, seconds = Files(tmp_path, *(line(f"{n}") for n in range(10))).run(concurrency=4)
    assert seconds == pytest.approx(1.5, abs=0.1)  # 4, 4 and 2 at once
    assert server.num_connections == 4


def test_bad_lines_become_errors_and_cost_the_others_nothing(tmp_path: Path) -> None:
    bad = {
        "method": line("method", method="GET"),
        "url": line("url", url="/v1/x\r\nhost: other"),
        "elsewhere": line("elsewhere", url="http://other/v1/x"),
        "dots": line("dots", url="/v1/../admin"),
        "body": line("body", body=[]),
        "stream": line("stream", body={"stream": True}),
        "keys": '{"custom_id": "keys", "method": "POST"}',
        None: "{nonsense",
    }
    files = Files(tmp_path, line("a"), *bad.values(), line("b"))
    server, _ = files.run()
    answers = files.answers()
    assert {request.body["prompt"] for request in server.requests} == {"a", "b"}
    for custom_id in bad:
        assert answers[custom_id]["response"] is None
        assert answers[custom_id]["error"]["code"] == "invalid_request"
    assert answers["method"]["error"]["message"] == "line 2: method: must be POST, got 'GET'"


def test_json_that_is_nested_too_deep_is_an_error_of_its_line(tmp_path: Path) -> None:
    deep = "[" * 5000 + "]" * 5000
    files = Files(tmp_path, line("a"), line("deep", body=0).replace('"body": 0', f'"body": {deep}'), line("b"))
    files.run(lambda request: [(0.1, http_answer(200, deep.encode() if request.body["prompt"] == "b" else {}))])
    answers = files.answers()
    assert answers["a"]["error"] is None
    assert answers[None]["error"]["message"] == "line 2: it is nested too deep"
    assert answers["b"]["error"]["code"] == "invalid_response"


def test_a_custom_id_answers_once(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"), line("a"))
    server, _ = files.run()
    assert len(server.requests) == 1
    read = [json.loads(text) for text in files.output.read_text().splitlines()]
    assert sorted(answer["error"] is None for answer in read) == [False, True]
    assert len({answer["id"] for answer in read}) == 2


def test_what_the_endpoint_refuses_is_an_answer(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"), line("b"))
    bodies = {"a": http_answer(400, {"error": {"message": "no"}}), "b": http_answer(200, b"<html>")}
    server, _ = files.run(lambda request: [(0.1, bodies[request.body["prompt"]])])
    answers = files.answers()
    assert answers["a"]["response"]["status_code"] == 400
    assert answers["a"]["response"]["body"] == {"error": {"message": "no"}}
    assert answers["b"]["error"]["code"] == "invalid_response"
    assert len(server.requests) == 2


@pytest.mark.parametrize("failure", [[(0.1, CLOSE)], [(0.1, http_answer(503, {}))], []], ids=["cut", "503", "silent"])
def test_what_may_pass_is_tried_again(failure: Sequence[Part], tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"))
    server, _ = files.run(lambda request: failure if request.number < 2 else echo(request))
    assert len(server.requests) == 3
    assert files.answers()["a"]["response"]["status_code"] == 200


def test_after_the_last_try_the_failure_is_the_answer(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"), line("b"))
    script: dict[str, Sequence[Part]] = {
        "a": [(0.1, CLOSE)],
        "b": [(0.1, http_answer(429, b"busy", "retry-after: 40"))],
    }
    _, seconds = files.run(lambda request: script[request.body["prompt"]])
    answers = files.answers()
    assert answers["a"]["error"]["code"] == "disconnected"
    assert answers["b"]["response"] == {
        "status_code": 429,
        "request_id": "",
        "body": {"error": {"message": "busy"}},
    }
    assert seconds == pytest.approx(80, abs=1)  # twice what the endpoint said


def test_an_endpoint_that_is_gone_ends_the_run_and_costs_no_request(tmp_path: Path) -> None:
    files = Files(tmp_path, *(line(f"{n}") for n in range(6)))
    with pytest.raises(UnreachableError, match="the same command continues"):
        files.run(refused=1000)
    assert files.output.read_text() == ""
    files.run(refused=2)  # it comes back in time
    assert len(files.answers()) == 6


def test_a_refused_key_ends_the_run(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"))
    with pytest.raises(BatonError, match="refuses the API key"):
        files.run(lambda _: [(0.1, http_answer(401, {"error": {"message": "unknown key"}}))])
    assert files.output.read_text() == ""


def test_a_batch_goes_on_wherever_its_output_was_cut(tmp_path: Path) -> None:
    names = [f"{n}" for n in range(5)]
    files = Files(tmp_path, *map(line, names))
    files.run()
    whole = files.output.read_bytes()
    for size in range(0, len(whole) + 1, 7):
        files.output.write_bytes(whole[:size])
        complete = [text for text in whole[:size].splitlines() if _is_json(text)]
        server, _ = files.run()
        assert sorted(map(str, files.answers())) == names
        assert len(server.requests) == len(names) - len(complete)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_more_lines_can_be_added_to_the_input(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"))
    files.run()
    with files.source.open("a") as source:
        source.write(line("b") + "\n")
    server, _ = files.run()
    assert [request.body["prompt"] for request in server.requests] == ["b"]


def test_the_output_of_another_input_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"), line("b"))
    files.run()
    written = files.output.read_bytes()
    files.source.write_text(line("a") + "\n" + line("b", url="/v1/other") + "\n")
    with pytest.raises(ConfigError, match="has 1 answers to requests that are not in"):
        files.run()
    assert files.output.read_bytes() == written
    files.output.write_text('{"id": "something else", "custom_id": "a"}\n')
    with pytest.raises(ConfigError, match="line 1, is no answer of baton run-batch"):
        files.run()


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    files = Files(tmp_path, line("a"))
    first = OutputFile(files.output)
    try:
        with pytest.raises(ConfigError, match="another process writes"):
            OutputFile(files.output)
    finally:
        first.close()


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path, line("a"))

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("loadgen.batch.output.os.write", refuse)
    with pytest.raises(BatonError, match="No space left on device; the same command continues"):
        files.run()


def test_a_disk_that_fails_to_sync_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path, *(line(f"{n}") for n in range(40)))
    monkeypatch.setattr("loadgen.batch.output.os.fsync", _fail)
    with pytest.raises(BatonError, match="Input/output error"):
        files.run(concurrency=1)
    assert len(files.answers()) < 10  # not only at the end


def _fail(_: int) -> None:
    raise OSError(5, "Input/output error")
