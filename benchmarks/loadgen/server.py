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

import uvloop

from benchmarks.harness.http_server import Connection

MODEL = "scripted"
_AT_ONCE = 16  # tokens as fast as they go, before other streams have their turn


def _event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _token(*, is_chat: bool, finish_reason: str | None) -> bytes:
    content: dict[str, Any] = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    return _event({"id": "cmpl-0123456789abcdef0123456789abcdef", "model": MODEL, "choices": [choice], "usage": None})


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

    def answer(self, connection: Connection, path: str, body: bytes) -> None:
        """Begins an answer."""
        if path == "/v1/models":
            connection.send(json.dumps({"data": [{"id": MODEL}]}).encode())
            return
        if path not in ("/v1/completions", "/v1/chat/completions"):
            connection.send(b"", "404 Not Found")
            return
        request = json.loads(body)
        count = request["max_completion_tokens" if "messages" in request else "max_tokens"]
        ttft_s, gap_s = 0.0, 0.0
        if self._is_paced and count > 1:
            ttft_s, gap_s = timetable(self._number)
            self._number += 1
        connection.begin_stream()
        task = asyncio.create_task(_generate(connection, request, count, ttft_s, gap_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _generate(connection: Connection, request: dict[str, Any], count: int, ttft_s: float, gap_s: float) -> None:
    token, last = (_token(is_chat="messages" in request, finish_reason=reason) for reason in (None, "length"))
    loop = asyncio.get_running_loop()
    due_s = loop.time() + ttft_s
    for number in range(count):
        if ttft_s:
            await asyncio.sleep(due_s - loop.time())
            due_s += gap_s
        elif number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        connection.send_part(token if number < count - 1 else last)
    num_prompt = len(str(request.get("prompt", "")).split())
    usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
    connection.send_part(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n", is_last=True)


async def _serve(server: Server) -> None:
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server.answer), "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--paced", action="store_true")
    uvloop.run(_serve(Server(is_paced=parser.parse_args().paced)))
