"""Profiles as a pod gives them to its callers."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common.pb import pods_pb2
from common.pb.pods_pb2_grpc import PodStub
from tests.pods import DEADLINE_S, SLOW, FakeRouter, RunningPod, decode_pod, engine_request, prompt_of, wait_for


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    async with decode_pod({}, executor=SLOW) as running:
        yield running


def call(pod: RunningPod, seconds: float = DEADLINE_S, max_steps: int = 0) -> Any:
    request = pods_pb2.ProfileRequest(seconds=seconds, max_steps=max_steps)
    return PodStub(pod.channel).Profile(request, timeout=2 * DEADLINE_S)


async def taken(profile: Any) -> tuple[pods_pb2.ProfileReport, list[dict[str, Any]]]:
    """The report, and the events of the trace."""
    first, *parts = [event async for event in profile]
    trace = b"".join(event.part for event in parts)
    assert len(trace) == first.report.num_bytes
    return first.report, json.loads(gzip.decompress(trace))["traceEvents"]


async def is_being_taken(pod: RunningPod) -> None:
    await wait_for(lambda: bool(pod.context.engine._calls))


async def refusal(profile: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await taken(profile)
    return refused.value


async def test_a_profile_of_a_pod_that_serves(pod: RunningPod) -> None:
    async with FakeRouter(pod) as router:
        answer = await router.submit(engine_request("a", prompt_of(40), max_tokens=2000))
        report, events = await taken(call(pod, max_steps=5))
        await router.abort("a")
        await answer.wait_finished()
    assert (report.num_steps, report.ended_by) == (5, pods_pb2.PROFILE_END_STEPS)
    assert len([event for event in events if event["name"].startswith("step ")]) == 5
    assert sum(getattr(report.phases, field.name) for field in report.phases.DESCRIPTOR.fields) > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, 60.5, math.inf, math.nan])
async def test_bad_durations_are_refused_by_name(pod: RunningPod, seconds: float) -> None:
    error = await refusal(call(pod, seconds))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["baton-error-param"] == "seconds"
    assert (error.details() or "").startswith("seconds must be above 0 and at most 60")


async def test_a_second_profile_is_refused_until_the_first_caller_leaves(pod: RunningPod) -> None:
    first = call(pod)
    reading = asyncio.create_task(first.read())
    await is_being_taken(pod)
    error = await refusal(call(pod))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "is being taken already" in (error.details() or "")
    assert float(dict(error.trailing_metadata())["baton-retry-after-s"]) > 1
    reading.cancel()
    first.cancel()
    await wait_for(lambda: not pod.context.engine._calls)
    report, _ = await taken(call(pod, 0.05))
    assert report.num_steps == 0


async def test_a_draining_pod_is_profiled_until_it_ends(pod: RunningPod) -> None:
    pod.context.admission.drain()
    ending = asyncio.create_task(refusal(call(pod)))
    await is_being_taken(pod)
    pod.is_dead = True  # and cannot be asked afterwards
    await pod.runtime.stop()
    error = await ending
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the pod is shutting down")


async def test_an_engine_that_dies_ends_the_profile(pod: RunningPod) -> None:
    ending = asyncio.create_task(refusal(call(pod)))
    await is_being_taken(pod)
    pod.is_dead = True
    pod.executor.failure = MemoryError("out of device memory")
    async with FakeRouter(pod) as router:
        await (await router.submit(engine_request("a", prompt_of(5)))).wait_finished()
    error = await ending
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "out of device memory" in (error.details() or "")
