"""Each tenant's use of its quota."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from common.errors import InvalidRequestError, OverloadedError
from router.metrics import SecurityMetrics
from router.security.buckets import TokenBucket
from router.security.keys import Quota
from router.security.usage import Usage

_WEIGHT_OF_LATEST = 0.2  # in the mean duration
_MAX_RETRY_AFTER_S = 60.0


class Generated(Protocol):
    """Output of a request."""

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""


class Account:
    """One tenant's use. What is refused costs it nothing, and no other tenant notices."""

    def __init__(
        self, name: str, quota: Quota, metrics: SecurityMetrics, usage: Usage, clock: Callable[[], float]
    ) -> None:
        """Raises ConfigError if `usage` has no place left."""
        self._name = name
        self._metrics = metrics
        self._clock = clock
        self._row = usage.row(name)
        self._mean_duration_s = 1.0
        self.set_quota(quota)

    def set_quota(self, quota: Quota) -> None:
        """Limits from now on; what runs goes on."""
        now, row = self._clock(), self._row
        self.quota = quota
        requests, tokens = quota.requests_per_minute, quota.tokens_per_minute
        self._requests = TokenBucket(requests, now, row.requests) if requests else None
        self._tokens = TokenBucket(tokens, now, row.tokens) if tokens else None

    @contextmanager
    def admit(self, num_generations: int = 1) -> Iterator[None]:
        """Holds the place of one request for the time of the context. Raises OverloadedError if a limit is reached."""
        started = self._clock()
        self._check(num_generations, started)
        self._count(num_generations, 1, started)
        try:
            self._check(num_generations, started, is_counted=True)  # another worker may have had the same room
        except OverloadedError:
            self._count(-num_generations, -1, started)
            raise
        try:
            yield
        finally:
            self._row.add_running(-num_generations)
            duration_s = self._clock() - started
            self._mean_duration_s += _WEIGHT_OF_LATEST * (duration_s - self._mean_duration_s)

    @contextmanager
    def admit_choices(self, num_generations: int) -> Iterator[None]:
        """Holds the places of all generations of a request that was admitted with one, before it was known how many
        they are. Raises InvalidRequestError for more than may ever run, and OverloadedError if the limit is reached."""
        num_more = num_generations - 1
        self._check_concurrency(num_generations, num_more)
        self._row.add_running(num_more)
        try:
            self._check_concurrency(num_generations, num_more, is_counted=True)
            yield
        finally:
            self._row.add_running(-num_more)

    def spend(self, num_tokens: int) -> None:
        """Counts tokens of a prompt or an output. Overdrawn, the tenant waits until it has paid back."""
        self._metrics.tokens.labels(self._name).inc(num_tokens)
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    @contextmanager
    def spending(self, generations: Sequence[Generated]) -> Iterator[None]:
        """Counts the output tokens that come within the context; a resumed stream has some from before."""
        before = sum(generation.num_tokens for generation in generations)
        try:
            yield
        finally:
            self.spend(sum(generation.num_tokens for generation in generations) - before)

    def _count(self, num_generations: int, num_requests: int, now: float) -> None:
        if self._requests is not None:
            self._requests.take(num_requests, now)
        self._row.add_running(num_generations)

    def _check(self, num_generations: int, now: float, *, is_counted: bool = False) -> None:
        """Whether there is room for these, which may be counted. Raises InvalidRequestError or OverloadedError."""
        quota = self.quota
        self._check_concurrency(num_generations, num_generations, is_counted=is_counted)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now, is_counted)) > 0:
            self._refuse("requests", f"{quota.requests_per_minute:g} requests per minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now)) > 0:
            self._refuse("tokens", f"{quota.tokens_per_minute:g} tokens per minute", wait_s)

    def _check_concurrency(self, num_generations: int, num_new: int, *, is_counted: bool = False) -> None:
        """Whether there is room for `num_new` of a request's generations; the others, if any, run."""
        limit = self.quota.max_concurrent
        if limit is None:
            return
        if num_generations > limit:
            raise InvalidRequestError(f"n: this key may run {limit} generations at once", param="n")
        num_running = self._row.num_running - is_counted * num_new
        if num_running + num_new > limit:
            self._refuse("concurrency", f"{limit} generations at once", self._mean_duration_s / num_running)

    def _refuse(self, limit: str, what: str, wait_s: float) -> None:
        self._metrics.refused.labels(self._name, limit).inc()
        retry_after_s = max(1.0, wait_s) if limit != "concurrency" else min(max(1.0, wait_s), _MAX_RETRY_AFTER_S)
        raise OverloadedError(f"this key may use {what}; try again later", retry_after_s=math.ceil(retry_after_s))
