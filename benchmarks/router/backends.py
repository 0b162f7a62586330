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

import uvloop

from benchmarks.harness.http_server import Connection
from benchmarks.router.pace import Pace
from benchmarks.router.workload import ANSWER, MAX_MODEL_LEN, MODEL

_WORDS = [json.dumps(" " + word).encode() for word in ANSWER.split()]
_HEAD = b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"'
_HEAD += MODEL.encode() + b'","choices":[{"index":0,"text":'
_OPEN = b',"logprobs":null,"finish_reason":null}]}\n\n'
_ENDED = b',"logprobs":null,"finish_reason":"length"}]}\n\n'
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

    def __init__(self, connection: Connection, size: int) -> None:
        self.connection = connection
        self.index = 0
        self.size = size

    def step(self) -> bool:
        """Send its next token; True: it was the last."""
        word = _WORDS[self.index % len(_WORDS)]
        self.index += 1
        ended = self.index == self.size
        event = _HEAD + word + (_ENDED if ended else _OPEN)
        self.connection.send_part(event + b"data: [DONE]\n\n" if ended else event, is_last=ended)
        return ended


class _Backend:
    """All streams of the process."""

    def __init__(self, role: str) -> None:
        self.pace = Pace()
        self._is_prefill = role == "prefill"
        self._facts = json.dumps({**_FACTS, "disaggregation_mode": role}).encode()
        self._new: set[_Stream] = set()
        self._running: set[_Stream] = set()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await self.pace.next_step(lambda: bool(self._new or (self._running and not self.pace.is_held)))
            stepping = self._new if self.pace.is_held else self._new | self._running
            self._running |= self._new
            self._new = set()
            for stream in stepping:
                connection = stream.connection
                if not connection.is_open or (connection.is_writable and stream.step()):
                    self._running.discard(stream)

    def answer(self, connection: Connection, path: str, body: bytes) -> None:
        """Answers a request, or begins to."""
        if not body:
            connection.send(b"ok" if path.startswith("/health") else self._facts)
            return
        request = json.loads(body)
        size = request["max_tokens"]
        if not request.get("stream"):
            connection.send(_whole(size))
            return
        connection.begin_stream()
        stream = _Stream(connection, 1 if self._is_prefill else size)
        if self._is_prefill:
            stream.step()
        else:
            self._new.add(stream)
            self.pace.wake()


def _whole(size: int) -> bytes:
    text = " ".join(ANSWER.split()[:size])
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 100, "completion_tokens": size, "total_tokens": 100 + size}
    answer = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}
    return json.dumps({**answer, "usage": usage}).encode()


async def _serve(role: str) -> None:
    backend = _Backend(role)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(backend.answer), sock=listener)
    stepping = asyncio.create_task(backend.run())
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await backend.pace.obey()
    stepping.cancel()
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
