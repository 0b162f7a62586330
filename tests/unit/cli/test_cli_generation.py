"""`baton complete` and `baton chat` against a router made of canned answers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from cli import chat, complete
from cli.generation import GenerationOptions, describe_speed, open_router
from cli.main import main
from cli.router_client import Piece, RouterClient, RouterError, RouterUnreachableError
from deploy.certificates import make_certificates
from deploy.cluster_state import ClusterState, claim
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def converse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`baton chat` at a terminal where these lines are typed."""

    def run(*lines: str, options: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))
        return chat.main([*options])

    return run


def contents(router: FakeRouter) -> list[list[str]]:
    return [[message["content"] for message in body["messages"]] for body in router.bodies]  # type: ignore[attr-defined]


def test_a_conversation_keeps_its_history(router: FakeRouter, converse: Callable[..., int]) -> None:
    assert converse("first", "second", "/clear", "third", "/exit", "never") == 0
    assert contents(router) == [["first"], ["first", "answer 1", "second"], ["third"]]


def test_messages_of_several_lines(router: FakeRouter, converse: Callable[..., int]) -> None:
    converse('"""one', "  two", "", 'three"""', "four \\", "five", '"""', "/clear", '"""', '"""six"""')
    assert [said[-1] for said in contents(router)] == ["one\n  two\n\nthree", "four \nfive", "/clear", "six"]


def test_settings_and_the_system_message_change(
    router: FakeRouter, converse: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["/system Be brief.", "/set temperature 0.5", "/set stop a, b", "/set model other", "first", "/system none"]
    lines += [
        "/set temperature none",
        "/set top_p 2",
        "/set max_token 3",
        "/set stream off",
        "/sett",
        "/set seed",
        "second",
    ]
    assert converse(*lines) == 0
    first, second = router.bodies
    assert (first["temperature"], first["stop"], first["model"]) == (0.5, ["a, b"], "other")
    assert contents(router) == [["Be brief.", "first"], ["first", "answer 1", "second"]]
    assert "temperature" not in second
    assert "stream" not in second
    out = capsys.readouterr().out
    for said in ("--top-p: must be <= 1", "max_token: unknown setting; did you mean max_tokens?", "did you mean /set?"):
        assert said in out
    assert "seed: a value is missing" in out


def test_what_was_typed_is_there_in_the_next_conversation(state_home: Path) -> None:
    readline = pytest.importorskip("readline")
    file = state_home / "baton" / "chat_history"
    try:
        with chat._line_editing():
            readline.add_history("a question")
        readline.clear_history()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with chat._line_editing():
            assert readline.get_history_item(1) == "a question"
    finally:
        readline.clear_history()


def test_an_answer_that_is_stopped_stays_in_the_conversation(
    router: FakeRouter,
    converse: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def until_ctrl_c(self: RouterClient, body: dict[str, object]) -> Iterator[Piece]:
        router.bodies.append(body)
        if len(router.bodies) < 3:
            yield Piece("one, two" if len(router.bodies) == 1 else "")
            raise KeyboardInterrupt
        yield Piece("done")

    monkeypatch.setattr(RouterClient, "stream_chat", until_ctrl_c)
    assert converse("count", "wait", "go on") == 0
    assert contents(router) == [["count"], ["count", "one, two", "wait"], ["count", "one, two", "go on"]]
    assert capsys.readouterr().out.count("(stopped)") == 2


def test_verbose_tells_the_speed(
    monkeypatch: pytest.MonkeyPatch, router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        response = router(request)
        if request.url.path == "/v1/models":
            return response
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}
        return sse({"choices": [{"text": "a"}]}, usage)

    monkeypatch.setattr(complete, "open_router", lambda options: client(respond))
    assert complete.main(["Hello", "--verbose"]) == 0
    assert router.bodies[0]["stream_options"] == {"include_usage": True}
    out, err = capsys.readouterr()
    assert out == "a\n"
    assert re.fullmatch(r"7 tokens in \d\.\d\d s, the first after \d\.\d\d s, then [\d.]+ tokens/s\n", err)
    assert describe_speed(9, 2.5, 0.5) == "9 tokens in 2.50 s, the first after 0.50 s, then 4.0 tokens/s"


def test_the_url_of_the_environment_or_of_the_cluster_in_the_background(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def url(**given: str) -> str:
        with open_router(GenerationOptions(**given)) as opened:
            return opened.url

    assert url() == "http://127.0.0.1:8000"
    claimed = claim("mine")
    claimed.save(ClusterState("mine", 1, 1, url="http://127.0.0.1:1234"))
    assert url() == "http://127.0.0.1:1234"
    monkeypatch.setenv("BATON_URL", " http://environment:80/ ")
    assert url() == "http://environment:80"
    assert url(url="http://option") == "http://option"
    monkeypatch.setenv("BATON_URL", "environment:80")
    assert main(["complete", "x"]) == 2
    assert capsys.readouterr().err == "baton: error: BATON_URL: expected http://host:port, got 'environment:80'\n"
    os.close(claimed.lock)


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
