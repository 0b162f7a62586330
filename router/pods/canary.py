"""Canary requests: one token through a pod's engine, when it is time to know whether that works.

They are no user's: no metric of requests counts them, and a cache salt of their own keeps them apart. Several routers
hardly add up: what one of them finds out is a sign of work to the others.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import NoReturn, Protocol

from common.errors import BatonError, DeadlineExceededError, UnavailableError
from common.pb import common_pb2, pods_pb2
from common.rpc.convert import pooling_to_pb, sampling_to_pb
from common.rpc.errors import error_from_pb
from common.types import PoolingParams, SamplingParams
from common.types.pooling import POOLING_TASKS
from router.pods.health import Outcome, PodHealth
from router.pods.session import DecodeSession

CANARY_PREFIX = "canary-"
_SALT = "baton-canary"
_PAUSE_S = 1.0  # seconds between two canaries, whatever their outcome

_router_id = secrets.token_hex(4)  # pods serve several routers
_numbers = count(1)


class Subject(Protocol):
    """The pod that is tried."""

    @property
    def can_be_tried(self) -> bool:
        """It is connected and says that it serves."""

    async def try_out(self, timeout_s: float) -> None:
        """Send a canary. Raises a BatonError."""


class CanaryLoop:
    """Sends canaries to one pod over one connection, when its health says that one is due."""

    def __init__(self, subject: Subject, health: PodHealth, note: Callable[[Outcome], None]) -> None:
        """`note` counts."""
        self._subject = subject
        self._health = health
        self._note = note
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Looks again at when the next canary is due."""
        self._changed.set()

    async def run(self) -> NoReturn:
        """Raises UnavailableError when a canary has ejected the pod: what runs there hangs, and must go elsewhere."""
        while True:
            await self._until_due()
            started, was_ejected = self._health.now(), self._health.is_ejected
            error = await self._try_out()
            self._note(self._health.note_canary(error, started))
            if self._health.is_ejected and not was_ejected:
                raise UnavailableError(f"it is ejected: {self._health.detail}")
            await asyncio.sleep(min(_PAUSE_S, self._health.canary_timeout_s) * random.uniform(0.5, 1.0))

    async def _until_due(self) -> None:
        while not self._subject.can_be_tried or self._health.canary_due_in_s > 0:
            self._changed.clear()
            due_in_s = self._health.canary_due_in_s if self._subject.can_be_tried else float("inf")
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_in_s == float("inf") else due_in_s):
                    await self._changed.wait()

    async def _try_out(self) -> BatonError | None:
        timeout_s = self._health.canary_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._subject.try_out(timeout_s)
        except TimeoutError:
            return DeadlineExceededError(f"no answer within {timeout_s:g} s")
        except BatonError as error:
            return error
        return None


async def try_prefill(
    prefill: Callable[[pods_pb2.PrefillRequest], Awaitable[pods_pb2.PrefillResponse]],
) -> None:
    """One token through a prefill pod. Raises a BatonError."""
    await prefill(pods_pb2.PrefillRequest(request=_request(), epoch=1))  # no transfer: no pod fetches the KV


async def try_pool(
    pool: Callable[[pods_pb2.PoolRequest], Awaitable[pods_pb2.PoolResponse]], tasks: Sequence[str]
) -> None:
    """One token through a pod whose model generates nothing, but does some of these tasks. Raises a BatonError."""
    request = _request()
    known = [task for task in POOLING_TASKS if task in tasks]
    request.pooling.CopyFrom(pooling_to_pb(PoolingParams(task=known[0] if known else "embed")))
    await pool(pods_pb2.PoolRequest(request=request))


async def try_decode(session: DecodeSession, timeout_s: float) -> None:
    """One token through a decode pod. Raises a BatonError."""
    request = _request()
    sink = _Sink()
    session.submit(pods_pb2.Submit(request=request, timeout_s=timeout_s), sink)
    try:
        await sink.end
    finally:
        session.abort(request.request_id)


def _request() -> common_pb2.EngineRequest:
    return common_pb2.EngineRequest(
        request_id=f"{CANARY_PREFIX}{_router_id}-{next(_numbers)}",
        prompt_token_ids=[0],
        sampling=sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=1)),
        cache_salt=_SALT,
    )


class _Sink:
    """Takes the answer to one canary. See DeltaSink."""

    cause = None

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: pods_pb2.TokenDelta, now: float) -> None:
        if self.end.done() or not delta.finish_reason:
            return
        if delta.HasField("error"):
            self.end.set_exception(error_from_pb(delta.error))
        elif delta.finish_reason == common_pb2.FINISH_REASON_ABORT:
            self.end.set_exception(UnavailableError("the pod ended the request"))
        else:
            self.end.set_result(None)

    def on_lost(self, error: BatonError) -> None:
        if not self.end.done():
            self.end.set_exception(error)
