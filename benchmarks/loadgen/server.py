"""An OpenAI endpoint whose answers cost almost nothing: `python -m benchmarks.loadgen.server [--paced]`.

It prints its port. Without --paced, tokens come as fast as the client reads them, each in a write of its own. With it,
each request has its own time to the first token (100 to 300 ms) and gap between tokens (10 to 30 ms), the same for the
n-th request of each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Any

import httptools
import uvloop

MODEL = "scripted"
_AT_ONCE = 16  # tokens as fast as they go, before other streams have their turn
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _event(document: Any) -> bytes:
    data = b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _token(*, is_chat: bool, finish_reason: str | None) -> bytes:
    content: dict[str, Any] = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    return _event({"id": "cmpl-0123456789abcdef0123456789abcdef", "model": MODEL, "choices": [choice], "usage": None})


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: Any = None
        self._path = b""
        self._body = b""
        self._parser: Any = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._path = self._body = b""

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._path == b"/v1/models":
            body = json.dumps({"data": [{"id": MODEL}]}).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return
        if self._path not in (b"/v1/completions", b"/v1/chat/completions"):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        request = json.loads(self._body)
        is_chat = "messages" in request
        count = request["max_completion_tokens" if is_chat else "max_tokens"]
        self._transport.write(_HEAD)
        self._server.start(self._transport, count, len(str(request.get("prompt", "")).split()), is_chat=is_chat)


def timetable(number: int) -> tuple[float, float]:
    """Seconds to the first token, and between tokens, of the n-th request."""
    choices = random.Random(number)
    return choices.uniform(0.1, 0.3), choices.uniform(0.01, 0.03)


class Server:
    """Answers of all connections."""

    def __init__(self, *, is_paced: bool) -> None:
        self._is_paced = is_paced
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, transport: Any, count: int, num_prompt: int, *, is_chat: bool) -> None:
        """Begins an answer."""
        ttft_s, gap_s = 0.0, 0.0
        if self._is_paced and count > 1:
            ttft_s, gap_s = timetable(self._number)
            self._number += 1
        task = asyncio.create_task(self._answer(transport, count, num_prompt, ttft_s, gap_s, is_chat=is_chat))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, transport: Any, count: int, num_prompt: int, ttft_s: float, gap_s: float, *, is_chat: bool
    ) -> None:
        token = _token(is_chat=is_chat, finish_reason=None)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + ttft_s
        for number in range(count):
            if ttft_s:
                await asyncio.sleep(due_s - loop.time())
                due_s += gap_s
            elif number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            transport.write(token if number < count - 1 else _token(is_chat=is_chat, finish_reason="length"))
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
        transport.write(_event({"choices": [], "usage": usage}) + _event(b"[DONE]") + b"0\r\n\r\n")


async def _serve(server: Server) -> None:
    listening = await asyncio.get_running_loop().create_server(lambda: _Connection(server), "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--paced", action="store_true")
    uvloop.run(_serve(Server(is_paced=parser.parse_args().paced)))
