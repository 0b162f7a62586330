"""A client of a router that notes when each token of a stream came, and loads that run beside others."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import uvloop

from loadgen.events import AnswerReader, error_in
from loadgen.http_client import HttpClient, RequestFailed

_TIMEOUT_S = 600.0

_Result = TypeVar("_Result")
_Options = ParamSpec("_Options")


class Generation:
    """One streamed completion. A context manager: leaving it drops the stream. Times are the client's clock's."""

    def __init__(self, client: HttpClient, body: bytes) -> None:
        self.token_times: list[float] = []
        self._reader = AnswerReader()
        self._client = client
        self._first = asyncio.get_running_loop().create_future()
        self.sent_at = client.clock()
        self._request = asyncio.create_task(self._send(body))

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    async def begin(self) -> Self:
        """Waits for the first token. Raises RequestFailed if there is none."""
        await asyncio.wait((self._first, self._request), return_when=asyncio.FIRST_COMPLETED)
        return self if self.token_times else await self.finish()

    async def finish(self) -> Self:
        """Waits for the last token. Raises RequestFailed if the stream does not end as it should."""
        await self._request
        return self

    async def _send(self, body: bytes) -> None:
        response = await self._client.request("POST", "/v1/completions", body, timeout_s=_TIMEOUT_S, on_body=self._take)
        if response.status != 200:
            raise RequestFailed(f"status {response.status}", error_in(response.body))
        if not self._reader.is_complete:
            raise RequestFailed("disconnected", "the stream ended before its last token")

    def _take(self, body: bytes, arrived_s: float) -> None:
        self._reader.feed(body, arrived_s)
        num_tokens = self._reader.usage.completion_tokens or len(self._reader.times)  # a chunk may have several
        self.token_times += [arrived_s] * (num_tokens - len(self.token_times))
        if self.token_times and not self._first.done():
            self._first.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._request.cancel()


class Client:
    """Sends random prompts to one router, within one event loop."""

    def __init__(self, url: str, model: str, vocab_size: int, numbers: random.Random) -> None:
        self.random = numbers
        self._http = HttpClient(url)
        self._model = model
        self._vocab_size = vocab_size

    def send(self, num_prompt_tokens: int, num_tokens: int) -> Generation:
        """Starts a greedy completion of `num_tokens` after a prompt that no cache holds."""
        body = {
            "model": self._model,
            "prompt": [self.random.randrange(3, self._vocab_size) for _ in range(num_prompt_tokens)],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return Generation(self._http, json.dumps(body).encode())

    async def complete(self, num_prompt_tokens: int, num_tokens: int) -> Generation:
        """Sends a prompt and waits for the last token. Raises RequestFailed."""
        with self.send(num_prompt_tokens, num_tokens) as generation:
            return await generation.finish()

    async def complete_at_once(self, num_prompts: int, num_prompt_tokens: int, num_tokens: int) -> list[Generation]:
        """Several at the same time."""
        return await asyncio.gather(*(self.complete(num_prompt_tokens, num_tokens) for _ in range(num_prompts)))

    def close(self) -> None:
        """Drops all connections."""
        self._http.close()


class Driver:
    """Runs loads on one router to their end, each in an event loop of its own."""

    def __init__(self, url: str, model: str, vocab_size: int, seed: int = 0) -> None:
        self._url = url
        self._model = model
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def run(
        self,
        load: Callable[Concatenate[Client, _Options], Awaitable[_Result]],
        *arguments: _Options.args,
        **options: _Options.kwargs,
    ) -> _Result:
        """Raises TimeoutError if a load takes longer than any should."""

        async def bounded() -> _Result:
            client = Client(self._url, self._model, self._vocab_size, self._random)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    return await load(client, *arguments, **options)
            finally:
                client.close()

        return uvloop.run(bounded())


@asynccontextmanager
async def in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs endless `work` beside the body and ends it after; its failure is raised in the body's place."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        yield
        for task in tasks:
            task.cancel()
