"""`baton complete` and `baton chat` with a client that gives canned answers."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.answers import Answer, Choice, FinishReason, Model, Piece, Usage
from cli import chat, complete
from cli.generation import GenerationOptions, describe_speed, open_router
from cli.main import main
from cli.router_address import RouterAddress
from deploy.cluster_state import ClusterState, claim


class FakeRouter:
    """Answers every request in words of its number, and remembers the requests. Stands for a Client."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.num_streams = 0

    def models(self) -> list[Model]:
        return [Model("demo", 4096), Model("other", 4096)]

    def generate(self, prompt: str, **request: Any) -> Answer:
        return answer_to(self._remember(prompt=prompt, **request))

    def chat(self, messages: list[dict[str, str]], **request: Any) -> Answer:
        return answer_to(self._remember(messages=messages, **request))

    def stream(self, prompt: str, **request: Any) -> Iterator[Piece]:
        return self._stream(prompt=prompt, **request)

    def stream_chat(self, messages: list[dict[str, str]], **request: Any) -> Iterator[Piece]:
        return self._stream(messages=messages, **request)

    def _stream(self, **request: Any) -> Iterator[Piece]:
        self.num_streams += 1
        text = self._remember(**request)
        yield piece(text[:3])
        yield piece(text[3:], Usage(3, 7, 0, None))

    def _remember(self, **request: Any) -> str:
        self.requests.append(request)
        return f"answer {len(self.requests)}"

    def __enter__(self) -> FakeRouter:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def answer_to(text: str) -> Answer:
    return Answer("id", [Choice(0, text, [1], FinishReason.STOP, [], [], None, "", [])], Usage(3, 7, 0, None))


def piece(text: str, usage: Usage | None = None) -> Piece:
    return Piece("id", 0, text, [], [], None if usage is None else FinishReason.STOP, usage, [], None, "", [])


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    fake = FakeRouter()
    for module in (complete, chat):
        monkeypatch.setattr(module, "open_router", lambda options: fake)
    return fake


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_complete(router: FakeRouter, capsys: pytest.CaptureFixture[str], stream: str) -> None:
    argv = ["Hello", stream, "--max-tokens", "5", "--temperature", "0", "--stop", "a, b", "--stop", "c"]
    assert complete.main(argv) == 0
    assert capsys.readouterr().out == "answer 1\n"
    assert router.num_streams == (stream == "--stream")
    request = {"model": "demo", "prompt": "Hello", "max_tokens": 5, "temperature": 0.0, "stop": ["a, b", "c"]}
    assert router.requests == [request]


def test_complete_reads_stdin(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert complete.main([]) == 0
    assert router.requests[0]["prompt"] == "from a pipe"


def test_chat_one_shot(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["How", "are", "you?", "--system", "Be kind."]) == 0
    assert capsys.readouterr().out == "answer 1\n"
    assert router.requests[0]["messages"] == [
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
    return [[message["content"] for message in request["messages"]] for request in router.requests]


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
    first, second = router.requests
    assert (first["temperature"], first["stop"], first["model"]) == (0.5, ["a, b"], "other")
    assert contents(router) == [["Be brief.", "first"], ["first", "answer 1", "second"]]
    assert "temperature" not in second
    assert router.num_streams == 1  # the first
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
    def until_ctrl_c(messages: list[dict[str, str]], **request: object) -> Iterator[Piece]:
        router.requests.append({"messages": messages})
        if len(router.requests) < 3:
            yield piece("one, two" if len(router.requests) == 1 else "")
            raise KeyboardInterrupt
        yield piece("done")

    monkeypatch.setattr(router, "stream_chat", until_ctrl_c)
    assert converse("count", "wait", "go on") == 0
    assert contents(router) == [["count"], ["count", "one, two", "wait"], ["count", "one, two", "go on"]]
    assert capsys.readouterr().out.count("(stopped)") == 2


def test_verbose_tells_the_speed(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete.main(["Hello", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert out == "answer 1\n"
    assert re.fullmatch(r"7 tokens in \d\.\d\d s, the first after \d\.\d\d s, then [\d.]+ tokens/s\n", err)
    assert complete.main(["Hello", "--verbose", "--no-stream"]) == 0
    assert capsys.readouterr().err.startswith("7 tokens in ")
    assert describe_speed(9, 2.5, 0.5) == "9 tokens in 2.50 s, the first after 0.50 s, then 4.0 tokens/s"


def test_the_url_of_the_environment_or_of_the_cluster_in_the_background(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def find(url: str, tls_ca: str) -> RouterAddress:
        asked.append(url)
        return RouterAddress("127.0.0.1:1", tls=False)

    monkeypatch.setattr("cli.generation.find_router", find)

    def url(**given: str) -> str:
        open_router(GenerationOptions(**given)).close()
        return asked.pop()

    assert url() == "http://127.0.0.1:8000"
    claimed = claim("mine")
    claimed.save(ClusterState("mine", 1, 1, url="http://127.0.0.1:1234", grpc_address="127.0.0.1:1235"))
    assert url() == "grpc://127.0.0.1:1235"
    monkeypatch.setenv("BATON_URL", " http://environment:80/ ")
    assert url() == "http://environment:80/"
    assert url(url="grpc://option:9000") == "grpc://option:9000"
    monkeypatch.setenv("BATON_URL", "environment:80")
    assert main(["complete", "x"]) == 2
    assert capsys.readouterr().err == (
        "baton: error: BATON_URL: expected http://host:port or grpc://host:port, got 'environment:80'\n"
    )
    os.close(claimed.lock)


@pytest.mark.parametrize("key", ["two\nlines-of-a-key", "schlüssel-0123456789", "two words-of-a-key"])
def test_what_cannot_be_a_key_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setenv("BATON_API_KEY", key)
    assert main(["complete", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("baton: error: BATON_API_KEY: ")
    assert not set(key.split()) & set(error.split())


@pytest.mark.parametrize(
    "url", ["http://[", "http://host:port", "http://:80", "http://host:0", "ftp://host", "host:80", "grpc://host"]
)
def test_what_is_no_url_names_the_option(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["complete", "x", "--url", url]) == 2
    expected = "http://host:port or grpc://host:port"
    assert capsys.readouterr().err == f"baton: error: --url: expected {expected}, got {url!r}\n"
