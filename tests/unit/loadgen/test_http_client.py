"""Connections are used again where that is safe, and what a server sends is understood or refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.errors import ConfigError
from loadgen.http_client import HttpClient, RequestFailed, split_url
from tests.unit.loadgen.scripted import CLOSE, Part, Script, ScriptedServer, VirtualLoop, http_answer, run_virtually


def asked(script: Script, waits: Sequence[float], **options: str) -> tuple[list[object], ScriptedServer]:
    """What requests, so many seconds after each other, got: bodies or failures."""

    async def main(loop: VirtualLoop) -> tuple[list[object], ScriptedServer]:
        server = ScriptedServer(loop, script)
        client = HttpClient("http://scripted:1/base/v1/", clock=loop.time, connect=server.connect, **options)
        got: list[object] = []
        for wait_s in waits:
            loop.now += wait_s
            try:
                got.append((await client.request("POST", "/v1/x", b'{"a": 1}', timeout_s=5.0)).body)
            except RequestFailed as error:
                got.append(error.kind)
        client.close()
        return got, server

    return run_virtually(main)


def test_a_connection_is_used_again_until_it_has_been_idle_for_long() -> None:
    got, server = asked(lambda _: [(0.1, http_answer(200, {}))], [0, 1, 3.9, 4.1], api_key="secret")
    assert (got, server.num_connections) == ([b"{}"] * 4, 2)
    assert server.requests[0].path == "/base/v1/x"
    assert "authorization: Bearer secret\r\n" in server.requests[0].headers


@pytest.mark.parametrize(
    ("parts", "expected", "num_connections"),
    [
        ([(0.1, http_answer(200, b"{}", "connection: close"))], [b"{}", b"{}"], 2),
        ([(0.1, b"HTTP/1.1 100 Continue\r\n\r\n"), (0.2, http_answer(200, b"{}"))], [b"{}", b"{}"], 1),
        ([(0.1, b"HTTP/1.1 200 OK\r\n\r\n{"), (0.2, b"}"), (0.3, CLOSE)], [b"{}", b"{}"], 2),
        ([(0.1, http_answer(200, b"{}")[:-1]), (0.2, CLOSE)], ["disconnected", "disconnected"], 2),
        ([(0.1, CLOSE)], ["disconnected", "disconnected"], 2),
        ([(0.1, b"nonsense\r\n\r\n")], ["invalid response", "invalid response"], 2),
        ([(0.1, http_answer(200, b"{}")), (0.1, http_answer(408, b"{}"))], [b"{}", b"{}"], 2),
        ([(6.0, http_answer(200, b"{}"))], ["timeout", "timeout"], 2),
    ],
    ids=["close", "100", "until the end", "cut", "none", "nonsense", "unasked", "late"],
)
def test_answers(parts: Sequence[Part], expected: list[object], num_connections: int) -> None:
    got, server = asked(lambda _: parts, [0, 1])
    assert (got, server.num_connections) == (expected, num_connections)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "grpc://h:1",
        "http://",
        "http://h:x",
        "http://h:0",
        "http://u:p@h",
        "http://h/a b",
        f"http://{64 * 'a'}",
    ],
)
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url: expected http"):
        split_url(url)
