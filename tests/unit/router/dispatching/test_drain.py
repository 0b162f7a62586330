"""When streams are asked to leave a pod that drains."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from router.dispatching.drain import DrainWatch
from router.pods.pod import PodState


class Pod:
    state = PodState.DRAINING


@pytest.fixture
def left():
    return []


async def timers_due():
    """All timers that are due by now have run."""
    due = asyncio.Event()
    asyncio.get_running_loop().call_later(0, due.set)
    await due.wait()


def watch_over(pods, left, delay_s=0.0):
    return DrainWatch(SimpleNamespace(decode_pods=pods), delay_s, [SimpleNamespace(leave=left.append)])


async def test_each_pod_that_drains_is_left_once(left):
    draining, ready = Pod(), Pod()
    ready.state = PodState.READY
    watch = watch_over([draining, ready], left)
    for _ in range(3):
        watch.look()
        await timers_due()
    assert left == [draining]


@pytest.mark.parametrize("how", ["it is ready again", "closed", "it has time", "never"])
async def test_a_pod_is_not_left(left, how):
    pod = Pod()
    watch = watch_over([pod], left, {"it has time": 3600.0, "never": None}.get(how, 0.0))
    watch.look()
    if how == "it is ready again":
        pod.state = PodState.READY
        watch.look()
    elif how == "closed":
        watch.close()
    await timers_due()
    assert left == []
    watch.close()


async def test_a_pod_that_drains_again_is_left_again(left):
    pod = Pod()
    watch = watch_over([pod], left)
    for state in (PodState.DRAINING, PodState.READY, PodState.DRAINING):
        pod.state = state
        watch.look()
        await timers_due()
    assert left == [pod, pod]
