"""A server whose every byte has a time, on an event loop with a clock of its own: what is measured is known exactly."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
CLOSE = b""  # in a script: the server closes the connection


class VirtualLoop(asyncio.SelectorEventLoop):
    """Does not wait: when nothing else is left to do, time jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)  # only a thread can wake it
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))


class Request(NamedTuple):
    number: int  # from 0 on, in the order of arrival
    time: float
    path: str
    headers: str
    body: Any


Part = tuple[float, bytes]  # seconds after the request, and what the server sends then
Script = Callable[[Request], Sequence[Part]]


class ScriptedServer:
    """Answers each request as the script says."""

    def __init__(self, loop: asyncio.AbstractEventLoop, script: Script) -> None:
        self.requests: list[Request] = []
        self.num_connections = 0
        self.refused = 0  # connections still to be refused
        self._loop = loop
        self._script = script

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> None:
        if self.refused:
            self.refused -= 1
            raise ConnectionRefusedError(111, "Connection refused")
        self.num_connections += 1
        protocol = factory()
        protocol.connection_made(_Transport(self, protocol))  # type: ignore[arg-type]

    def answer(self, data: bytes, transport: _Transport) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        request = Request(len(self.requests), self._loop.time(), path, head.decode(), json.loads(body or b"null"))
        self.requests.append(request)
        for delay_s, part in self._script(request):
            self._loop.call_at(request.time + delay_s, transport.send, part)


class _Transport:
    def __init__(self, server: ScriptedServer, protocol: asyncio.Protocol) -> None:
        self._server = server
        self._protocol = protocol
        self._is_open = True

    def write(self, data: bytes) -> None:
        self._server.answer(data, self)

    def send(self, part: bytes) -> None:
        if self._is_open and part:
            self._protocol.data_received(part)
        elif self._is_open:
            self._is_open = False
            self._protocol.connection_lost(None)

    def abort(self) -> None:
        self._is_open = False


def http_answer(status: int, document: object, *headers: str) -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    lines = [f"HTTP/1.1 {status} Status", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def stream_head() -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def piece(data: bytes) -> bytes:
    """A part of a chunked body; the last if it is empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(document: object) -> bytes:
    return b"data: " + (b"[DONE]" if document == "[DONE]" else json.dumps(document).encode()) + b"\n\n"


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None})


def usage(prompt: int, completion: int, **more: object) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}})


def stream(times: Sequence[float], *, prompt: int = 7, completion: int | None = None) -> Iterator[Part]:
    """A completion with a chunk at each time, and usage after the last."""
    yield 0.001, stream_head()
    for number, at_s in enumerate(times):
        yield at_s, piece(token(f" t{number}", "length" if number == len(times) - 1 else None))
    yield times[-1] + 0.5, piece(usage(prompt, completion or len(times)) + event("[DONE]")) + piece(b"")
