"""`baton complete` and `baton chat` against a router made of canned answers."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli import chat, complete
from cli.generation import GenerationOptions, open_router
from cli.main import main
from cli.router_client import RouterClient, RouterError, RouterUnreachableError
from deploy.certificates import make_certificates
from deploy.ports import pick_ports

Respond = Callable[[httpx.Request], httpx.Response]


def sse(*events: object, done: bool = True) -> httpx.Response:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def client(respond: Respond) -> RouterClient:
    return RouterClient("http://router", timeout_s=10, transport=httpx.MockTransport(respond))


class FakeRouter:
    """Answers every request in words of its number, and remembers the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        answer = f"answer {len(self.bodies)}"
        if request.url.path == "/v1/completions":
            choice = {"text": answer}
        else:
            choice = {"message": {"content": answer}, "delta": {"content": answer}}
        return (
            sse({"choices": [choice]}, {"choices": []})
            if body.get("stream")
            else httpx.Response(200, json={"choices": [choice]})
        )


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    fake = FakeRouter()
    for module in (complete, chat):
        monkeypatch.setattr(module, "open_router", lambda options: client(fake))
    return fake


def test_pieces_arrive_in_order() -> None:
    with client(lambda request: sse(*({"choices": [{"text": piece}]} for piece in ("a", "", "b")))) as router:
        assert [piece.text for piece in router.stream_complete({})] == ["a", "", "b"]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "max_tokens: too many"}}), "max_tokens: too many"),
        (httpx.Response(502, text="<html>"), "HTTP status 502"),
        (sse({"error": {"message": "pod died"}}, done=False), "pod died"),
        (sse({"choices": [{"text": "a"}]}, done=False), "ended the answer too early"),
    ],
)
def test_failures_carry_the_routers_message(response: httpx.Response, message: str) -> None:
    with client(lambda request: response) as router, pytest.raises(RouterError, match=message):
        list(router.stream_complete({}))


def test_nobody_there() -> None:
    (port,) = pick_ports("127.0.0.1", 1)
    with (
        RouterClient(f"http://127.0.0.1:{port}", timeout_s=10) as router,
        pytest.raises(
            RouterUnreachableError, match=rf"no router at http://127.0.0.1:{port}: start one with `baton up`"
        ),
    ):
        router.models()


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_complete(router: FakeRouter, capsys: pytest.CaptureFixture[str], stream: str) -> None:
    argv = ["Hello", stream, "--max-tokens", "5", "--temperature", "0", "--stop", "a, b", "--stop", "c"]
    assert complete.main(argv) == 0
    assert capsys.readouterr().out == "answer 1\n"
    body = router.bodies[0]
    assert body.pop("stream", False) is (stream == "--stream")
    assert body == {"model": "demo", "prompt": "Hello", "max_tokens": 5, "temperature": 0.0, "stop": ["a, b", "c"]}


def test_complete_reads_stdin(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert complete.main([]) == 0
    assert router.bodies[0]["prompt"] == "from a pipe"


def test_complete_says_why_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = pick_ports("127.0.0.1", 1)
    assert complete.main(["Hello", "--url", f"http://127.0.0.1:{port}"]) == 3
    assert capsys.readouterr().err == (
        f"baton: error: no router at http://127.0.0.1:{port}: start one with `baton up`\n"
    )


def test_chat_one_shot(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["How", "are", "you?", "--system", "Be kind."]) == 0
    assert capsys.readouterr().out == "answer 1\n"
    assert router.bodies[0]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "How are you?"},
    ]


def test_a_conversation_keeps_its_history(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("first\nsecond\n/clear\nthird\n/exit\nnever\n"))
    assert chat.main([]) == 0
    contents = [[message["content"] for message in body["messages"]] for body in router.bodies]  # type: ignore[attr-defined]
    assert contents == [["first"], ["first", "answer 1", "second"], ["third"]]


def test_the_key_of_the_environment_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "my-key")
    with open_router(GenerationOptions(url="http://router")) as router:
        assert router._http.headers["authorization"] == "Bearer my-key"
    monkeypatch.delenv("BATON_API_KEY")
    with open_router(GenerationOptions(url="http://router")) as router:
        assert "authorization" not in router._http.headers


@pytest.mark.parametrize("key", ["two\nlines-of-a-key", "schlüssel-0123456789", "two words-of-a-key"])
def test_what_cannot_be_a_key_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setenv("BATON_API_KEY", key)
    assert main(["complete", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("baton: error: BATON_API_KEY: ")
    assert not set(key.split()) & set(error.split())


def test_space_around_the_key_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", " team-key\n")
    with open_router(GenerationOptions()) as opened:
        assert opened._http.headers["authorization"] == "Bearer team-key"


@pytest.mark.parametrize(
    "url", ["http://[", "http://host:port", "http://:80", "http://host:0", "ftp://host", "host:80"]
)
def test_what_is_no_url_names_the_option(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["complete", "x", "--url", url]) == 2
    assert capsys.readouterr().err == f"baton: error: --url: expected http://host:port, got {url!r}\n"


def test_tls_that_fails_is_told_from_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "router.pem", tmp_path / "router.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        for served, expected in ((context, "--tls-ca names the authority"), (None, "does it speak plain http?")):
            server = threading.Thread(target=_serve_once, args=(listener, served))
            server.start()
            assert main(["complete", "x", "--url", url]) == 3
            server.join(30)
            error = capsys.readouterr().err
            assert error.startswith(f"baton: error: TLS with {url} failed: ")
            assert expected in error


def _serve_once(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    """One connection, with TLS or as a server that knows none."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        if context is None:
            connection.recv(1024)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        else:
            context.wrap_socket(connection, server_side=True)


def test_an_authority_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca.pem").write_text("nonsense")
    for file in ("ca.pem", "absent.pem"):
        assert main(["complete", "Hello", "--url", "https://router", "--tls-ca", str(tmp_path / file)]) == 2
        assert f"--tls-ca: {tmp_path / file} cannot be used" in capsys.readouterr().err
