"""`baton bench` when it is interrupted, and what becomes of its reports."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cli.main import main

NUM_PROBES = 2  # requests before those that are measured
STREAM = (
    b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


class Endpoint(ThreadingHTTPServer):
    """Answers so many requests. The next one interrupts this process, and gets no answer."""

    daemon_threads = True

    def __init__(self, num_answers: int) -> None:
        super().__init__(("127.0.0.1", 0), _Completions)
        self.num_left = num_answers + NUM_PROBES
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Completions(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if not self.server.num_left:
            os.kill(os.getpid(), signal.SIGINT)
            self.server.ends.wait()
            return
        self.server.num_left -= 1
        self.send_response(200)
        self.send_header("content-length", str(len(STREAM)))
        self.end_headers()
        self.wfile.write(STREAM)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with Endpoint(request.param) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ends.set()
        server.shutdown()
        thread.join()


def argv(command: str, endpoint: Endpoint, directory: Path, *more: str) -> list[str]:
    reports = ("--json", str(directory / "r.json"), "--html", str(directory / "r.html"))
    return ["bench", command, "--url", endpoint.url, "--model", "m", *reports, *more]


@pytest.mark.parametrize("endpoint", [3], indirect=True)
def test_an_interrupted_run_has_figures_of_what_has_ended(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv("serve", endpoint, tmp_path, "--max-concurrency", "1", "--num-prompts", "8")) == 130
    printed = capsys.readouterr().out
    assert re.search(r"Successful requests: +3\n", printed)
    assert re.search(r"Unfinished requests: +5\n", printed)
    assert "note: the run was interrupted" in printed
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["completed"], found["unfinished"], len(found["requests"])) == (3, 5, 3)
    assert "the run was interrupted" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("endpoint", [0, 1], indirect=True)
@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("serve", ("--num-warmups", "2")),
        ("sweep", ("--goodput", "ttft:9000", "--start-rate", "1000")),
        ("compare", ("--num-prompts", "1")),
    ],
)
def test_an_interruption_without_figures_leaves_reports_as_they_were(
    command: str, more: tuple[str, ...], endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.html").write_text("from before")
    other = ("--url-b", endpoint.url, "--model-b", "m") if command == "compare" else ()
    endpoint.num_left += NUM_PROBES * bool(other)
    assert main(argv(command, endpoint, tmp_path, "--max-concurrency", "1", *more, *other)) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    assert (tmp_path / "r.html").read_text() == "from before"
    assert "Benchmark" not in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", [100], indirect=True)
def test_reports_replace_files_and_nothing_else(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.json").write_text("from before")
    (tmp_path / "target.html").write_text("from before")
    (tmp_path / "r.html").symlink_to("target.html")
    assert main(argv("serve", endpoint, tmp_path, "--num-prompts", "1")) == 0
    assert json.loads((tmp_path / "r.json").read_text())["unfinished"] == 0
    assert (tmp_path / "r.html").is_symlink()
    assert "<svg" in (tmp_path / "target.html").read_text()
    assert len(list(tmp_path.iterdir())) == 3
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert main(argv("serve", endpoint, tmp_path, "--num-prompts", "1", "--json", str(pipe))) == 0
    assert json.loads(os.read(reader, 2**16))["completed"] == 1
    os.close(reader)
    assert pipe.is_fifo()
    assert main(argv("serve", endpoint, tmp_path, "--num-prompts", "1", "--json", str(tmp_path))) == 2
    assert f"--json: cannot write {tmp_path}: Is a directory" in capsys.readouterr().err
