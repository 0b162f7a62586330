"""`baton complete` and `baton chat` against a router made of canned answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli import chat, complete
from cli.generation import GenerationOptions, open_router
from cli.main import main
from cli.router_client import RouterClient, RouterError, RouterUnreachableError
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
        assert list(router.stream_complete({})) == ["a", "b"]


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

    monkeypatch.setattr("sys.stdin", Terminal("first\nsecond\n/reset\nthird\n/exit\nnever\n"))
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


def test_an_authority_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca.pem").write_text("nonsense")
    for file in ("ca.pem", "absent.pem"):
        assert main(["complete", "Hello", "--url", "https://router", "--tls-ca", str(tmp_path / file)]) == 2
        assert f"--tls-ca: {tmp_path / file} cannot be used" in capsys.readouterr().err
