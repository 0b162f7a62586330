"""The neighbour, in a process of its own: `python -m benchmarks.neighbours.neighbour URL KEY MODEL`.

Orders, as `Child.ask` gives them:

    warm_up          one request of each kind, so that nothing is loaded later
    begin STREAMS    streams that go on until they are ended, a new one for each that is complete
    watch SECONDS    what they and short requests beside them have seen in this time: a Sight
    end              drops the streams

Beside the streams it asks, one after the other, for short answers, whose time to first token is noted, and for answers
that follow a grammar that is new to the cluster. Its own loop is watched, too: what it is late is not the cluster's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from benchmarks.harness.client import in_background
from benchmarks.harness.processes import obey
from loadgen.events import AnswerReader
from loadgen.http_client import HttpClient, RequestFailed

_NICENESS = -10  # where that is allowed, so that its clock is right on busy cores
_TIMEOUT_S = 120.0
_STREAM_TOKENS = 3500
_PAUSE_S = 0.1  # between short requests; also after a failure
_GRAMMAR_PAUSE_S = 0.5
_TICK_S = 0.005
_BEGIN_TIMEOUT_S = 60.0
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True)
class Sight:
    """The neighbour's measurements. Times are seconds; those of what had not come in time are as long as it waited."""

    gaps_s: list[float]  # between tokens of one stream, sorted
    ttfts_s: list[float]  # of short requests, sorted
    grammars_s: list[float]  # to the first token under a new grammar, sorted
    late_s: float  # what this process itself was late, at most
    failures: list[str]


@dataclass(slots=True)
class Asked:
    """A request."""

    sent_s: float
    reader: AnswerReader = field(default_factory=AnswerReader)
    has_ended: bool = False


class Neighbour:
    """Carries out orders."""

    def __init__(self, url: str, api_key: str, model: str) -> None:
        self._client = HttpClient(url, api_key=api_key)
        self._model = model
        self._random = random.Random(0)
        self._num_grammars = itertools.count(1)
        self._streams: list[Asked] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: list[str] = []

    async def warm_up(self) -> dict[str, Any]:
        """Raises RuntimeError if a request fails."""
        self._failures = []
        await self._ask([], max_tokens=2)
        await self._ask_under_grammar([])
        if self._failures:
            raise RuntimeError(self._failures[0])
        return {}

    async def begin(self, streams: int) -> dict[str, Any]:
        """Returns when each stream has had its first token."""
        self._streams = []
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(streams)]
        async with asyncio.timeout(_BEGIN_TIMEOUT_S):
            while sum(bool(stream.reader.times) for stream in self._streams) < streams:  # noqa: ASYNC110
                await asyncio.sleep(_TICK_S)
        return {}

    async def watch(self, seconds: float) -> dict[str, Any]:
        """Measures from now on."""
        self._failures = []
        started = self._client.clock()
        short: list[Asked] = []
        constrained: list[Asked] = []
        late = [0.0]
        work = (self._ask_shortly(short), self._ask_constrained(constrained), _watch_loop(late))
        async with in_background(*work):
            await asyncio.sleep(seconds)
        ended = self._client.clock()
        sight = Sight(
            gaps_s=sorted(gap for stream in self._streams for gap in gaps_of(stream, started, ended)),
            ttfts_s=sorted(_ttft(asked, ended) for asked in short),
            grammars_s=sorted(_ttft(asked, ended) for asked in constrained),
            late_s=late[0],
            failures=self._failures,
        )
        self._streams = [stream for stream in self._streams if not stream.has_ended]
        return asdict(sight)

    async def end(self) -> dict[str, Any]:
        """Drops the streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        return {}

    async def _stream(self) -> None:
        while True:
            await self._ask(self._streams, max_tokens=_STREAM_TOKENS)

    async def _ask_shortly(self, asked: list[Asked]) -> None:
        while True:
            await self._ask(asked, max_tokens=2)
            await asyncio.sleep(_PAUSE_S)

    async def _ask_constrained(self, asked: list[Asked]) -> None:
        while True:
            await self._ask_under_grammar(asked)
            await asyncio.sleep(_GRAMMAR_PAUSE_S)

    async def _ask_under_grammar(self, asked: list[Asked]) -> None:
        regex = f"(yes|no|perhaps){{1,{next(self._num_grammars)}}}"
        await self._ask(asked, max_tokens=2, structured_outputs={"regex": regex})

    async def _ask(self, asked: list[Asked], **fields: Any) -> None:
        prompt = " ".join(self._random.choices(_WORDS, k=24))
        body = {"model": self._model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        one = Asked(self._client.clock())
        asked.append(one)
        try:
            response = await self._client.request(
                "POST", "/v1/completions", json.dumps(body).encode(), timeout_s=_TIMEOUT_S, on_body=one.reader.feed
            )
            if response.status != 200:
                raise RequestFailed(f"status {response.status}", response.body.decode(errors="replace"))
        except RequestFailed as error:
            self._failures.append(f"{error.kind}: {error.message}"[:200])
            await asyncio.sleep(_PAUSE_S)
        finally:
            one.has_ended = True


def gaps_of(stream: Asked, started: float, ended: float) -> list[float]:
    """Gaps that ended between the two times, and the one that has not ended."""
    times = [at for at in stream.reader.times if at <= ended]
    if times and not stream.has_ended:
        times.append(ended)
    return [later - earlier for earlier, later in itertools.pairwise(times) if started < later]


def _ttft(asked: Asked, ended: float) -> float:
    return (asked.reader.times or [ended])[0] - asked.sent_s


async def _watch_loop(late: list[float]) -> None:
    """Keeps in `late` the most that this loop was late."""
    while True:
        due = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        late[0] = max(late[0], time.perf_counter() - due)


async def main() -> None:
    """Takes orders until stdin ends."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    await obey(Neighbour(*sys.argv[1:]))


if __name__ == "__main__":
    uvloop.run(main())
