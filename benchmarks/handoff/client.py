"""A client of a router that notes when each token of a stream came.

It is cheap, so that it hardly competes with what it measures: one connection for each stream, a C parser.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, Self

import httptools


class Generation(asyncio.Protocol):
    """One streamed completion. A context manager: leaving it closes the connection."""

    def __init__(self, request: bytes) -> None:
        self.sent_at = 0.0  # seconds of time.perf_counter, as are all times
        self.token_times: list[float] = []
        self._request = request
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._now = 0.0
        self._tail = b""  # of an event that has not come in full
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    async def begin(self) -> Self:
        """Waits for the first token. Raises RuntimeError if there is none."""
        await self._begun
        return self

    async def finish(self) -> Self:
        """Waits for the last token. Raises RuntimeError if the stream ends without [DONE]."""
        await self._ended
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio and the parser ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        self._transport = transport
        self.sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """All tokens of `data` came now."""
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a stream that is not over."""
        self._fail(f"the connection was closed: {exc}")

    def on_body(self, body: bytes) -> None:
        """Takes a part of the answer; an event may be cut in two."""
        *events, self._tail = (self._tail + body).split(b"\n\n")
        for event in events:
            self._take(event)

    def on_message_complete(self) -> None:
        """A stream is over when it said so; what else ends here is an error."""
        self._fail(f"status {self._parser.get_status_code()}: {self._tail!r}")

    def _take(self, event: bytes) -> None:
        if event == b"data: [DONE]":
            if not self._ended.done():
                self._ended.set_result(None)
        elif event.startswith(b"id: "):  # ends in the number of tokens so far, hexadecimal, "_" and a checksum
            position = event.partition(b"\n")[0].rpartition(b".")[2]
            num_tokens = int(position.partition(b"_")[0], 16)
            self.token_times += [self._now] * (num_tokens - len(self.token_times))
            if not self._begun.done():
                self._begun.set_result(None)
        else:
            self._tail = event

    def _fail(self, reason: str) -> None:
        for future in (self._begun, self._ended):
            if not future.done():
                future.set_exception(RuntimeError(reason))
                future.exception()  # retrieved: a stream that is dropped on purpose is no news


class Client:
    """Sends random prompts to one router."""

    def __init__(self, url: str, model: str, vocab_size: int, seed: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._model = model
        self._vocab_size = vocab_size
        self.random = random.Random(seed)

    async def send(self, num_prompt_tokens: int, num_tokens: int) -> Generation:
        """Starts a greedy completion of `num_tokens` after a prompt that no cache holds."""
        prompt = [self.random.randrange(3, self._vocab_size) for _ in range(num_prompt_tokens)]
        request = self._request(prompt, num_tokens)
        loop = asyncio.get_running_loop()
        _, generation = await loop.create_connection(lambda: Generation(request), self._host, self._port)
        return generation

    async def complete(self, num_prompt_tokens: int, num_tokens: int) -> Generation:
        """Sends a prompt and waits for the last token."""
        with await self.send(num_prompt_tokens, num_tokens) as generation:
            return await generation.finish()

    async def complete_at_once(self, num_prompts: int, num_prompt_tokens: int, num_tokens: int) -> Sequence[Generation]:
        """Several at the same time."""
        return await asyncio.gather(*(self.complete(num_prompt_tokens, num_tokens) for _ in range(num_prompts)))

    def _request(self, prompt: Sequence[int], num_tokens: int) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        # Event ids say how many tokens have come; routers that always have them ignore the header.
        return f"{head}x-baton-resumable: 1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
