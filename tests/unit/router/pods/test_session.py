"""The stream of commands to a decode pod."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest.mock import Mock

from common.errors import UnavailableError
from common.pb import common_pb2, pods_pb2
from common.rpc.channel import open_channel
from router.pods.session import DecodeSession
from router.testing import FakeDecodePod

DEADLINE_S = 60.0


def _submit(name: str) -> pods_pb2.Submit:
    sampling = common_pb2.SamplingParams(max_tokens=3)
    return pods_pb2.Submit(
        request=common_pb2.EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)
    )


async def test_of_a_request_that_ends_before_it_is_sent_the_pod_hears_nothing() -> None:
    pod = FakeDecodePod()
    await pod.allow(0)
    await pod.start()
    channel = open_channel(pod.address)
    session = DecodeSession(channel, on_broken=Mock(), on_end=Mock())
    running = asyncio.create_task(session.run())
    try:
        session.submit(_submit("a"), Mock())
        session.submit(_submit("b"), Mock())
        session.abort("a")
        await pod.until(lambda: len(pod.submits) == 1, timeout_s=DEADLINE_S)
        session.abort("b")
        session.submit(_submit("b"), Mock())  # again, behind its abort
        session.submit(_submit("c"), Mock())
        await pod.until(lambda: len(pod.submits) == 3, timeout_s=DEADLINE_S)
        assert [submit.request.request_id for submit in pod.submits] == ["b", "b", "c"]
        assert pod.aborts == ["b"]
        assert set(pod.live) == {"b", "c"}
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, UnavailableError):
            await running
        await channel.close(None)
        await pod.stop()
