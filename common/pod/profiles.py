"""Profiles of this pod's engine, for the calls that ask for them: one at a time, each as long as its call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from common.engine.client.base import EngineClient, EngineProfile
from common.errors import InvalidRequestError, OverloadedError, UnavailableError
from common.pb import pods_pb2
from common.pod.convert import phase_seconds_to_pb

MAX_SECONDS = 60.0
_PART_BYTES = 256 * 1024
_SEND_TIMEOUT_S = 60.0  # for the whole trace, of some megabytes
_ENDS = {
    "seconds": pods_pb2.PROFILE_END_SECONDS,
    "steps": pods_pb2.PROFILE_END_STEPS,
    "events": pods_pb2.PROFILE_END_EVENTS,
}


class PodProfiles:
    """Called on the event loop."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._task: asyncio.Task[Any] | None = None  # of the call that takes one
        self._over_at = 0.0
        self._is_closed = False

    async def take(
        self, request: pods_pb2.ProfileRequest, send: Callable[[pods_pb2.ProfileEvent], Awaitable[None]]
    ) -> None:
        """Takes a profile and sends it. Raises InvalidRequestError, OverloadedError while another is taken,
        UnavailableError if the pod shuts down meanwhile or the engine cannot take one."""
        _validate(request)
        if self._is_closed:
            raise UnavailableError("the pod is shutting down and takes no profile")
        if self._task is not None:
            left_s = max(1.0, self._over_at - time.monotonic())
            problem = f"a profile of this pod is being taken already, for another {left_s:.0f} s"
            raise OverloadedError(problem, retry_after_s=left_s)
        self._task = task = asyncio.current_task()
        self._over_at = time.monotonic() + request.seconds
        try:
            async with self._engine.profile(seconds=request.seconds, max_steps=request.max_steps) as profile:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    await _send(profile, send)
        except TimeoutError as error:
            raise UnavailableError(f"the trace was not read within {_SEND_TIMEOUT_S:g} s") from error
        except asyncio.CancelledError:
            if not self._is_closed or task is None:
                raise
            task.uncancel()
            raise UnavailableError("the pod is shutting down") from None
        finally:
            self._task = None

    async def close(self) -> None:
        """Ends the profile that is being taken. Idempotent."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


async def _send(profile: EngineProfile, send: Callable[[pods_pb2.ProfileEvent], Awaitable[None]]) -> None:
    report = profile.report
    trace = await asyncio.to_thread(profile.trace.read_bytes)
    summary = pods_pb2.ProfileReport(
        seconds=report.seconds,
        paused_s=report.paused_s,
        num_steps=report.num_steps,
        num_tokens=report.num_tokens,
        num_events=report.num_events,
        ended_by=_ENDS[report.ended_by],
        phases=phase_seconds_to_pb(report.phases),
        num_bytes=len(trace),
    )
    await send(pods_pb2.ProfileEvent(report=summary))
    for start in range(0, len(trace), _PART_BYTES):
        await send(pods_pb2.ProfileEvent(part=trace[start : start + _PART_BYTES]))


def _validate(request: pods_pb2.ProfileRequest) -> None:
    if not 0 < request.seconds <= MAX_SECONDS:  # NaN is not
        raise InvalidRequestError(
            f"seconds must be above 0 and at most {MAX_SECONDS:g}, got {request.seconds:g}", param="seconds"
        )
