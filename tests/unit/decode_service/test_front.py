"""What the sessions of a decode pod share, and their end."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.pb import pods_pb2
from decode_service import front as front_module
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront
from tests.pods import DEADLINE_S, decode_pod


@pytest.mark.parametrize(("share", "num_blocks"), [(0.25, 64), (0.001, 1)])
async def test_a_share_of_the_blocks_may_be_in_quarantine(share: float, num_blocks: int) -> None:
    async with decode_pod({}) as pod:
        assert pod.context.spec.num_blocks == 256
        quarantine = DecodeFront(pod.context, DecodeConfig(), max_quarantined_share=share)._services.quarantine
        assert not quarantine.is_full
        quarantine.hold("a", num_blocks - 1, DEADLINE_S, lambda: None)
        assert not quarantine.is_full
        quarantine.hold("a", 1, DEADLINE_S, lambda: None)
        assert quarantine.is_full
        quarantine.close()


async def test_a_router_that_reads_nothing_does_not_keep_the_pod_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front_module, "FLUSH_TIMEOUT_S", 0.01)
    is_writing = asyncio.Event()

    class Context:
        async def write(self, _: object) -> None:
            is_writing.set()
            await asyncio.Event().wait()

    async def commands() -> AsyncIterator[pods_pb2.DecodeCommand]:
        yield pods_pb2.DecodeCommand(submit=pods_pb2.Submit())  # is refused
        await asyncio.Event().wait()

    async with decode_pod({}) as pod:
        front = DecodeFront(pod.context, DecodeConfig())
        session = asyncio.create_task(front.Session(commands(), Context()))  # type: ignore[arg-type]
        await is_writing.wait()
        async with asyncio.timeout(DEADLINE_S):
            await front.close()
        assert "1 routers did not read their last events" in caplog.text
        session.cancel()
        await asyncio.wait({session})
