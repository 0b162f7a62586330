"""A request whose prompts are pooled, under way.

Each prompt is one call to one pod, and has no state there that outlives it: a call that fails for want of the pod is
made again on another one. So many prompts of a request are under way at once; when one fails, all end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.cancellation import end_tasks
from common.errors import BatonError, DeadlineExceededError, ErrorCode, OverloadedError, UnavailableError
from common.observability.logging import fields
from common.pb import common_pb2, pods_pb2
from common.rpc.convert import pooling_to_pb
from common.types.pooling import PER_TOKEN
from router.dispatching.attempts import ADAPTER_PARAM, Attempts, Backoff
from router.dispatching.dispatcher import Dispatcher
from router.dispatching.validity import checked_seconds
from router.fairness.queue import Ticket
from router.metrics import RouterMetrics
from router.pods.pod import Pod
from router.requests.request import GenerationRequest
from router.timelines.timeline import Timeline
from router.tracing.spans import leg_context

logger = logging.getLogger(__name__)

_RETRIABLE = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED})


class Pooled(NamedTuple):
    """The numbers of one prompt."""

    numbers: npt.NDArray[np.float32]  # [1, size], or [tokens, size]
    num_cached_tokens: int


class PoolingRun:
    """Begun by `start`, ended by `close`. The timeline is of all prompts; its attempts are those of the first."""

    def __init__(
        self, requests: Sequence[GenerationRequest], dispatcher: Dispatcher, metrics: RouterMetrics, ticket: Ticket
    ) -> None:
        """So many prompts may be under way at once as `ticket` has places for."""
        self.ticket = ticket
        self.request_id = requests[0].request_id
        self.requests = requests
        self.timeline = Timeline(requests[0], dispatcher.name_of(requests[0]))
        self.timeline.num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._found: list[Pooled | None] = [None] * len(requests)
        self._tokens = asyncio.Condition()  # of prompts under way
        self._num_tokens = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that pods found in their prefix caches."""
        return sum(found.num_cached_tokens for found in self._found if found is not None)

    @property
    def is_started(self) -> bool:
        """Its turn has come."""
        return bool(self._tasks)

    def start(self) -> None:
        """It is its turn."""
        waiting = iter(enumerate(self.requests))
        self._tasks = [asyncio.create_task(self._work(waiting)) for _ in range(self.ticket.num_requests)]

    async def results(self) -> list[Pooled]:
        """The numbers of all prompts, in order. Raises the error of the first that failed, DeadlineExceededError, and
        what `fail` was called with."""
        first = self.requests[0]
        try:
            async with asyncio.timeout(first.deadline - time.monotonic()):
                pending: set[asyncio.Future[None]] = {*self._tasks}
                if self._stopped.done():
                    self._stopped.result()
                while pending:
                    done, _ = await asyncio.wait({*pending, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    pending -= done
        except TimeoutError as error:
            timeout_s = first.deadline - first.arrived_at
            overdue = DeadlineExceededError(f"the request was not finished within {timeout_s:g} s")
            self.note_failure(overdue)
            raise overdue from error
        except BatonError as error:
            self.note_failure(error)
            raise
        now = time.monotonic()
        self.timeline.end(now, finish_reason="stop")
        assert first.pooling is not None
        self._dispatcher.metrics.pooled.labels(first.pooling.task).inc(len(self.requests))
        self._dispatcher.metrics.pooling_latency.observe(now - first.arrived_at)
        return [found for found in self._found if found is not None]

    def fail(self, error: BatonError) -> None:
        """Ends it with an error, unless it has ended."""
        if not self._stopped.done():
            self._stopped.set_exception(error)
            self._stopped.exception()  # retrieved, even if its front has just gone

    async def close(self) -> None:
        """Ends what is still under way, on pods as well."""
        await end_tasks(self._tasks)
        if not self.timeline.is_over:
            self.timeline.end(time.monotonic(), error=ErrorCode.CANCELLED.label)
            self._metrics.errors.labels(ErrorCode.CANCELLED.label).inc()

    async def _work(self, waiting: Iterator[tuple[int, GenerationRequest]]) -> None:
        for number, request in waiting:
            num_tokens = len(request.prompt_token_ids)
            async with self._tokens:
                await self._tokens.wait_for(partial(self._has_room, num_tokens))
                self._num_tokens += num_tokens
            try:
                self._found[number] = await self._pool(request, is_first=number == 0)
            finally:
                self._num_tokens -= num_tokens
            async with self._tokens:
                self._tokens.notify_all()

    def _has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens may begin beside the others: a long request leaves pods room for others'
        prompts."""
        return not self._num_tokens or self._num_tokens + num_tokens <= self._dispatcher.pooled_tokens_at_once

    async def _pool(self, request: GenerationRequest, *, is_first: bool) -> Pooled:
        attempts, backoff = Attempts(self._dispatcher.survival.max_attempts), Backoff()
        failed: set[str] = set()
        pod_id = self._dispatcher.new_transfer_id(request)
        while True:
            number = attempts.start()
            began = time.monotonic()
            route = self._dispatcher.route_pooling(request, failed)
            if is_first:
                self.timeline.begin_attempt(number, "", route.decode.address, route.reason, began)
            try:
                response = await self._call(request, route.decode, f"{pod_id}.{number}", number, route.decode_rank)
                pooled = _checked(request, response, route.decode)
            except BatonError as error:
                if error.code not in _RETRIABLE and error.param != ADAPTER_PARAM:
                    raise
                self._note_retry(error, pod_id, route.decode)
                failed.add(route.decode.address)
                if isinstance(error, OverloadedError):
                    attempts.refused()
                    await asyncio.sleep(backoff.next())
                if attempts.exhausted:
                    raise
                await self._wait_for_pod(error, request)
            else:
                route.decode_claim.prefilled(time.monotonic())
                self._note_answer(request, response, is_first=is_first)
                return pooled
            finally:
                route.release(time.monotonic())

    async def _call(
        self, request: GenerationRequest, pod: Pod, engine_id: str, number: int, rank: int
    ) -> pods_pb2.PoolResponse:
        assert request.pooling is not None
        message = common_pb2.EngineRequest(
            request_id=engine_id,
            prompt_token_ids=request.prompt_token_ids,
            cache_salt=request.cache_salt,
            adapter=request.adapter_digest,
            extra_keys=[common_pb2.ExtraKey(**key._asdict()) for key in request.extra_keys],
            priority=request.priority,
            tenant=request.terms.tenant.name,
            data_parallel_rank=rank,
            pooling=pooling_to_pb(request.pooling),
        )
        trace = leg_context(request, number, "prefill")
        timeout_s = max(0.0, request.deadline - time.monotonic())
        return await pod.pool(
            pods_pb2.PoolRequest(request=message), timeout_s, request, None if trace is None else trace.metadata
        )

    async def _wait_for_pod(self, error: BatonError, request: GenerationRequest) -> None:
        pods = self._dispatcher.pods
        if not await pods.wait_until_pooling(self._dispatcher.survival.pod_wait_s, request.adapter_digest):
            raise UnavailableError(f"{error.message}; {pods.explain_pooling()}")

    def _note_retry(self, error: BatonError, name: str, pod: Pod) -> None:
        self._metrics.survival.prefill_retries.labels(error.code.label).inc()
        self.timeline.event("prefill_retry", error.code.label, pod.address)
        text = "%s: pod %s failed, another one pools the prompt: %s"
        logger.info(text, name, pod.address, error.message, extra=fields(request_id=self.request_id))

    def _note_answer(self, request: GenerationRequest, response: pods_pb2.PoolResponse, *, is_first: bool) -> None:
        metrics = self._dispatcher.metrics
        num_cached = min(response.num_cached_tokens, len(request.prompt_token_ids))
        queue_s, compute_s = checked_seconds(response.timing.queue_s), checked_seconds(response.timing.compute_s)
        metrics.cached_tokens.inc(num_cached)
        self.timeline.num_cached_tokens += num_cached
        if is_first:
            self.timeline.prefilled(queue_s, compute_s, time.monotonic())

    def note_failure(self, error: BatonError) -> None:
        """It has failed, or was refused: its timeline and the log say why."""
        self.timeline.end(time.monotonic(), error=error.code.label)
        level = logging.WARNING if error.code.value.http_status >= 500 else logging.INFO
        text = "%s: failed: %s: %s"
        logger.log(
            level, text, self.request_id, error.code.label, error.message, extra=fields(request_id=self.request_id)
        )


def _checked(request: GenerationRequest, response: pods_pb2.PoolResponse, pod: Pod) -> Pooled:
    """Raises UnavailableError for an invalid answer."""
    assert request.pooling is not None
    num_rows = len(request.prompt_token_ids) if request.pooling.task in PER_TOKEN else 1
    size, wanted = response.row_size, request.pooling.dimensions
    problem = ""
    if len(response.values) != 4 * num_rows * size or not size or (wanted and size != wanted):
        problem = f"{len(response.values)} bytes for {num_rows} rows of {wanted or size} numbers"
    numbers = np.frombuffer(response.values, dtype="<f4") if not problem else np.empty(0, dtype=np.float32)
    if not problem and not np.isfinite(numbers).all():
        problem = "numbers that are not finite"
    if problem:
        error = UnavailableError(f"a pod sent an invalid answer: {problem}")
        pod.note_invalid(error, request)
        raise error
    return Pooled(numbers.reshape(num_rows, size), min(response.num_cached_tokens, len(request.prompt_token_ids)))
