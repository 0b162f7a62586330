"""The generations of one request of a client: they get their turn together and end together.

A generation takes half a millisecond to dispatch, and longer if it has a long prompt or many biases, so they are
dispatched a few at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from common.errors import BatonError, DeadlineExceededError, ErrorCode, OverloadedError, UnattainableError
from router.admission.goodput import OVERDUE, Timing, kept_limits
from router.dispatching.generation import Generation
from router.fairness.queue import Ticket
from router.metrics import RouterMetrics
from router.requests.request import GenerationRequest
from router.timelines.book import TimelineBook
from router.tracing.tracing import RequestTracing

_AT_ONCE = 16
_SIZE_AT_ONCE = 2**17  # tokens of prompts; to copy them into messages takes some 7 ms
_SIZE_OF_ENTRY = 8  # tokens that take as long as one entry of a sampling parameter


class Batch:
    """A context: leaving it ends what was dispatched."""

    def __init__(
        self,
        generations: Sequence[Generation],
        ticket: Ticket,
        metrics: RouterMetrics,
        timelines: TimelineBook,
        tracing: RequestTracing,
    ) -> None:
        """Keeps the timelines of the generations in `timelines`, but for parts of a larger search. `tracing` exports
        them in the end."""
        self.generations = generations
        self.ticket = ticket
        self._metrics = metrics
        self._timelines = timelines
        self._tracing = tracing
        self._kept = [timelines.keep(each.timeline) for each in generations if not each.request.is_part]
        self._stack = ExitStack()
        self._num_sent = 0

    @property
    def is_over(self) -> bool:
        """All have ended."""
        return all(generation.is_over for generation in self.generations)

    @property
    def is_dispatched(self) -> bool:
        """All were sent that are to be."""
        return self._num_sent == len(self.generations) or self.is_over

    def dispatch(self) -> None:
        """Send the next few except those that were aborted while they waited. Raises what dispatching raises; leaving
        the context then ends those that were sent."""
        size = 0
        for generation in self.generations[self._num_sent : self._num_sent + _AT_ONCE]:
            if size >= _SIZE_AT_ONCE:
                break
            size += _size_of(generation.request)
            self._num_sent += 1
            if not generation.is_over:
                self._stack.enter_context(generation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(exc_type, exc, traceback)
        self._end_timelines(exc)
        if self._num_sent:
            self._count_limits([generation.timing for generation in self.generations])
        elif isinstance(exc, DeadlineExceededError):
            self._count_limits([OVERDUE] * len(self.generations))
        elif exc_type is not None and issubclass(exc_type, asyncio.CancelledError):
            self._metrics.errors.labels(ErrorCode.CANCELLED.label).inc(len(self.generations))

    def _end_timelines(self, error: BaseException | None) -> None:
        """Ends the timelines of generations that were not dispatched. Nothing is kept of a request that was refused at
        once: its client was told why."""
        if isinstance(error, OverloadedError | UnattainableError) and not self._num_sent:
            self._timelines.drop(*self._kept)
        code = ErrorCode.INTERNAL if isinstance(error, Exception) else ErrorCode.CANCELLED
        if isinstance(error, BatonError):
            code = error.code
        for generation in self.generations:
            generation.timeline.end(time.monotonic(), error=code.label)
        generations = self.generations
        self._tracing.export([each.request for each in generations], [each.timeline for each in generations])

    def _count_limits(self, timings: Sequence[Timing]) -> None:
        for generation, timing in zip(self.generations, timings, strict=True):
            for limit, is_kept in kept_limits(generation.request, timing).items():
                self._metrics.limits.labels(limit, "met" if is_kept else "missed").inc()


def _size_of(request: GenerationRequest) -> int:
    sampling = request.sampling
    lists = (sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_word_token_ids)
    num_entries = sum(len(entries) for entries in lists if entries)
    return len(request.prompt_token_ids) + _SIZE_OF_ENTRY * num_entries
