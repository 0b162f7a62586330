"""A trivial HTTP backend for sglang-router: `python -m benchmarks.router.backends prefill|decode`, its own process.

It answers what the router asks of an SGLang server at its start, and /v1/completions: whole answers and the streams of
a prefill backend at once, the streams of a decode backend with one event per step, as fast as it can or as it is told
(see pace).
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import httptools
import uvloop

from benchmarks.router.pace import Pace
from benchmarks.router.workload import ANSWER, MAX_MODEL_LEN, MODEL

_WORDS = [json.dumps(" " + word).encode() for word in ANSWER.split()]
_HEAD = b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"'
_HEAD += MODEL.encode() + b'","choices":[{"index":0,"text":'
_OPEN = b',"logprobs":null,"finish_reason":null}]}\n\n'
_ENDED = b',"logprobs":null,"finish_reason":"length"}]}\n\n'
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FACTS = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "tokenizer_path": "",
    "is_generation": True,
    "version": "0.5.0",
    "max_total_num_tokens": MAX_MODEL_LEN,
    "disaggregation_mode": "",
    "tp_size": 1,
    "dp_size": 1,
}


class _Stream:
    """One answer under way."""

    __slots__ = ("connection", "index", "size")

    def __init__(self, connection: _Connection, size: int) -> None:
        self.connection = connection
        self.index = 0
        self.size = size

    def step(self) -> bool:
        """Send its next token; True: it was the last."""
        word = _WORDS[self.index % len(_WORDS)]
        self.index += 1
        ended = self.index == self.size
        event = _HEAD + word + (_ENDED if ended else _OPEN)
        self.connection.send_chunk(event + b"data: [DONE]\n\n" if ended else event, is_last=ended)
        return ended


class _Backend:
    """All streams of the process."""

    def __init__(self, role: str) -> None:
        self.pace = Pace()
        self.is_prefill = role == "prefill"
        self.facts = json.dumps({**_FACTS, "disaggregation_mode": role}).encode()
        self.new: set[_Stream] = set()
        self.running: set[_Stream] = set()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await self.pace.next_step(lambda: bool(self.new or (self.running and not self.pace.is_held)))
            stepping = self.new if self.pace.is_held else self.new | self.running
            self.running |= self.new
            self.new = set()
            for stream in stepping:
                if stream.connection.is_writable and stream.step():
                    self.running.discard(stream)


class _Connection(asyncio.Protocol):
    def __init__(self, backend: _Backend) -> None:
        self._backend = backend
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._body = b""
        self._url = b""
        self._stream: _Stream | None = None
        self.is_writable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._backend.new.discard(self._stream)
            self._backend.running.discard(self._stream)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.abort()  # the router tries at its start whether it is HTTP/2

    def on_message_begin(self) -> None:
        """A request begins."""
        self._body = b""

    def on_url(self, url: bytes) -> None:
        """Its path."""
        self._url = url

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer it."""
        if not self._body:
            self._send(b"ok" if self._url.startswith(b"/health") else self._backend.facts)
            return
        request = json.loads(self._body)
        size = request["max_tokens"]
        if not request.get("stream"):
            self._send(_whole(size))
            return
        self._transport.write(_STREAM)
        self._stream = _Stream(self, 1 if self._backend.is_prefill else size)
        if self._backend.is_prefill:
            self._stream.step()
        else:
            self._backend.new.add(self._stream)
            self._backend.pace.wake()

    def send_chunk(self, event: bytes, *, is_last: bool) -> None:
        """One chunk of the answer under way."""
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, b"0\r\n\r\n" if is_last else b""))

    def _send(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


def _whole(size: int) -> bytes:
    text = " ".join(ANSWER.split()[:size])
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 100, "completion_tokens": size, "total_tokens": 100 + size}
    answer = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}
    return json.dumps({**answer, "usage": usage}).encode()


async def _serve(role: str) -> None:
    backend = _Backend(role)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(backend), sock=listener)
    stepping = asyncio.create_task(backend.run())
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await backend.pace.obey()
    stepping.cancel()
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
