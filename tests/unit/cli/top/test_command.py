"""`baton top` as a command: in a terminal, without one, and where it cannot go on."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys

import pytest

from cli.main import main
from tests.page.answers import cluster, pod
from tests.unit.cli.top.conftest import DEADLINE_S

HOSTILE = "\x1b]0;owned\x07\x1b[31m[red]"


@pytest.fixture
async def router(server):
    server.answers["/v1/cluster"] = 200, cluster(1, [pod("prefill", 1, 1), pod("decode", 1, 1, pod_id=HOSTILE)])
    await server.start()
    return server


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, ["top", *argv])


class PseudoTerminal:
    """`baton top` with a terminal of its own."""

    def __init__(self, *argv: str, **environment: str):
        self.master, child = pty.openpty()
        command = [sys.executable, "-m", "cli.main", "top", *argv]
        env = {**os.environ, "TERM": "xterm-256color", **environment}
        self.process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env)
        os.close(child)
        self.output = b""

    async def read_until(self, text: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while text not in self.output:
                self.output += await asyncio.to_thread(os.read, self.master, 65536)

    async def end(self) -> int:
        """Reads what is left. Returns the exit code."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while part := await asyncio.to_thread(os.read, self.master, 65536):
                    self.output += part
        except OSError:  # as Linux tells that the other side is closed
            pass
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)


@pytest.mark.parametrize("stop", ["q", "ctrl+c", "SIGTERM"])
async def test_in_a_terminal_it_runs_until_it_is_told_to_stop_and_gives_the_terminal_back(router, stop):
    terminal = PseudoTerminal("--url", router.url, "--interval", "0.1")
    try:
        await terminal.read_until(b"prefill-1")
        router.may_answer.clear()  # it stops all the same
        if stop == "SIGTERM":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            os.write(terminal.master, b"q" if stop == "q" else b"\x03")
        assert await terminal.end() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    assert b"\x1b[?1049h" in terminal.output
    assert b"\x1b[?1049l" in terminal.output
    assert b"\\x1b]0;owned\\x07" in terminal.output
    assert b"owned\x07" not in terminal.output


async def test_errors_of_the_first_question_leave_the_screen_alone(server):
    await server.start()
    terminal = PseudoTerminal("--url", server.url)
    try:
        assert await terminal.end() == 1
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    expected = f"baton: error: {server.url} is not the HTTP address of a Baton router: GET /v1/cluster: status 404\r\n"
    assert terminal.output.decode() == expected


async def test_without_a_terminal_it_prints_the_cluster_once(router, capsys):
    assert await run("--url", router.url, "--interval", "0.1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Pods ready 2/2  prefill 1/1  decode 1/1   Requests 4   Queued 2"
    assert any(line.startswith("\\x1b]0;owned\\x07\\x1b[31m[red]  decode") for line in lines)
    assert len(router.requests) == 2


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, 1, "the router asks for an API key: set BATON_API_KEY to an operator's"),
        (403, 1, "the cluster is for operators: set BATON_API_KEY to an operator's key"),
        (None, 3, "cannot connect to "),
    ],
)
async def test_errors_are_one_line_and_have_their_code(server, capsys, status, code, message):
    server.answers["/v1/cluster"] = status, b""
    await server.start()
    if status is None:
        await server.stop()
    assert await run("--once", "--url", server.url) == code
    assert capsys.readouterr().err.startswith(f"baton: error: {message}")


@pytest.mark.parametrize(
    ("package", "argv", "message"),
    [
        ("httptools", ["--once"], "top: httptools is not installed; pip install 'baton-llm[top]'"),
        ("textual", [], "top: textual is not installed; pip install 'baton-llm[top]'"),
    ],
)
def test_a_missing_extra_is_named(package, argv, message):
    script = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from cli.main import main; "
        "sys.__stdin__ = sys.__stdout__ = type('Terminal', (), {'isatty': lambda self: True})(); "
        f"sys.exit(main(['top', *{argv!r}]))"
    )
    environment = {**os.environ, "TERM": "xterm"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert (result.returncode, result.stderr) == (2, f"baton: error: {message}\n")


def test_the_snapshot_needs_no_textual_and_help_nothing():
    script = "import sys; import cli.top.command; sys.exit('textual' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
