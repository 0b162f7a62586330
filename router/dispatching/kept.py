"""Streams that clients may resume: those that run, and for a while those that broke.

A client that lost its connection, or was told of an error, comes back with the id of the last event that it has
got. What is known of the answer then need not be computed again: it goes on from there like a migration.

Kept is what the answer's tokens were, nothing else: not the prompt, which the client sends again.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.errors import BatonError, ErrorCode
from common.types import FinishReason
from router.metrics import SurvivalMetrics
from router.requests.request import NO_DRAFTS, SpeculationCounts

_MAX_STREAMS = 1024  # kept; clients that resume do so within seconds, so more are of clients that will not
_OVERHEAD_BYTES = 1024  # of a kept stream beside its tokens, roughly


class ResumedElsewhereError(BatonError):
    """The client has come back on another connection while this one still looked alive."""

    code = ErrorCode.CANCELLED


class StreamKey(NamedTuple):
    """Tenants know nothing of each other's streams."""

    tenant: str
    request_id: str


class KnownChoice(NamedTuple):
    """The known part of one choice."""

    token_ids: array[int]
    finish_reason: FinishReason | None  # None while the stream goes on
    speculation: SpeculationCounts = NO_DRAFTS


class KeptStream(NamedTuple):
    """A stream that broke."""

    identity: bytes  # digest of what was asked for, and of the seed
    choices: tuple[KnownChoice, ...]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, roughly."""
        return _OVERHEAD_BYTES + sum(len(choice.token_ids) * choice.token_ids.itemsize for choice in self.choices)


class ResumableGeneration(Protocol):
    """A generation of a running stream."""

    def known(self) -> KnownChoice:
        """All of it so far."""

    def fail(self, error: BatonError) -> None:
        """End it."""


@dataclass(eq=False, slots=True)
class Running:
    """A stream that has not ended."""

    identity: bytes  # see KeptStream
    generations: Sequence[ResumableGeneration] = ()  # set once there are any
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def known(self) -> KeptStream:
        """All of it so far."""
        return KeptStream(self.identity, tuple(generation.known() for generation in self.generations))


Elsewhere = Callable[[StreamKey, bytes], Awaitable[KeptStream | None]]
"""Gives up a stream of this key and identity that another process keeps. None: there is none."""


async def _nowhere(key: StreamKey, identity: bytes) -> KeptStream | None:
    return None


class ResumableStreams:
    """Bounded in number, bytes and time; what does not fit is forgotten, the oldest first. A stream that is not here
    any more can still be resumed, by computing it again."""

    def __init__(
        self,
        *,
        window_s: float,
        max_bytes: int,
        metrics: SurvivalMetrics,
        elsewhere: Elsewhere = _nowhere,
        max_streams: int = _MAX_STREAMS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`window_s`: seconds for which a broken stream is kept; `elsewhere` is asked for those that are not here;
        `clock` gives seconds."""
        self._elsewhere = elsewhere
        self._window_s = window_s
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._clock = clock
        self._metrics = metrics
        self._running: dict[StreamKey, Running] = {}
        self._kept: OrderedDict[StreamKey, tuple[float, KeptStream]] = OrderedDict()  # with the end of their time
        self.num_bytes = 0  # of the kept ones

    def __len__(self) -> int:
        """Streams kept."""
        return len(self._kept)

    @contextmanager
    def running(self, key: StreamKey, identity: bytes) -> Iterator[Running]:
        """A stream from its start to its end. If it ends with an exception, it is kept."""
        running = Running(identity)
        self._running.setdefault(key, running)  # a second one of this id is about to be refused
        try:
            yield running
        except BaseException:
            self._keep(key, running.known())
            raise
        finally:
            if self._running.get(key) is running:
                del self._running[key]
            running.ended.set()

    async def take_over(self, key: StreamKey, identity: bytes, timeout_s: float) -> KeptStream | None:
        """Returns the known part of the stream, here or elsewhere, where it is forgotten. If it still runs, as its
        connection looks alive, it is ended, which takes at most `timeout_s` seconds or raises TimeoutError. None:
        nothing is known."""
        stream = await self.give_up(key, identity, timeout_s) or await self._elsewhere(key, identity)
        self._metrics.resumed.labels("computed_again" if stream is None else "kept").inc()
        return stream

    async def give_up(self, key: StreamKey, identity: bytes, timeout_s: float) -> KeptStream | None:
        """Does the same as `take_over` for streams that are here."""
        running = self._running.get(key)
        if running is not None and running.identity == identity:
            for generation in running.generations:
                generation.fail(ResumedElsewhereError("the stream was resumed on another connection"))
            async with asyncio.timeout(timeout_s):
                await running.ended.wait()
        self._expire()
        entry = self._kept.get(key)
        if entry is None or entry[1].identity != identity:
            return None
        self._drop(key)
        return entry[1]

    def _keep(self, key: StreamKey, stream: KeptStream) -> None:
        if not any(choice.token_ids for choice in stream.choices):
            return  # a stream without tokens is not worth keeping
        self._drop(key)
        self._kept[key] = self._clock() + self._window_s, stream
        self.num_bytes += stream.num_bytes
        self._metrics.streams_kept.inc()
        self._expire()
        while len(self._kept) > self._max_streams or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            key, (expires_at, _) = next(iter(self._kept.items()))
            if expires_at > now:
                return
            self._drop(key)

    def _drop(self, key: StreamKey) -> None:
        if (entry := self._kept.pop(key, None)) is not None:
            self.num_bytes -= entry[1].num_bytes
            self._metrics.streams_kept.dec()
