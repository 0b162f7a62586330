"""The decode side of the handoff against a prefill pod that follows a script."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from common.rpc.channel import ChannelPool
from common.rpc.server import RpcServer
from common.types import SampledToken
from decode_service import handoff as handoff_module
from decode_service.config import DecodeConfig
from decode_service.handoff import Handoff, Offer, Phase
from tests.pods import DEADLINE_S, wait_for

Context = grpc.aio.ServicerContext
Script = Callable[[AsyncIterator[pods_pb2.HandoffCommand], Context], Awaitable[None]]

COMPUTING = pods_pb2.HandoffEvent(computing=pods_pb2.HandoffComputing(incarnation=1))


def progress(num_tokens: int) -> pods_pb2.HandoffEvent:
    return pods_pb2.HandoffEvent(progress=pods_pb2.HandoffProgress(num_ready_tokens=num_tokens))


def delivered(num_tokens: int, token: int = 7) -> pods_pb2.HandoffEvent:
    return pods_pb2.HandoffEvent(delivered=pods_pb2.HandoffDelivered(num_ready_tokens=num_tokens, first_token_id=token))


def failed(num_tokens: int, code: Any = common_pb2.ERROR_CODE_INTERNAL) -> pods_pb2.HandoffEvent:
    error = common_pb2.Error(code=code, message="out of luck")
    return pods_pb2.HandoffEvent(failed=pods_pb2.HandoffFailed(error=error, num_ready_tokens=num_tokens))


class ScriptedHandoff(pods_pb2_grpc.HandoffServicer):
    def __init__(self, events: list[pods_pb2.HandoffEvent]) -> None:
        self.events = events
        self.commands: list[pods_pb2.HandoffCommand] = []
        self.script: Script = self.say_events
        self.is_left = False  # the decode pod has hung up after the last event

    async def Open(self, request_iterator, context):  # noqa: N802
        await self.script(request_iterator, context)

    async def say_events(self, request_iterator, context):
        self.commands.append(await anext(request_iterator))
        for event in self.events:
            await context.write(event)
        if self.events and self.events[-1].WhichOneof("event") in ("delivered", "failed"):
            async for command in request_iterator:
                self.commands.append(command)
        self.is_left = True


class RecordingConsumer:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def reserve(self) -> None:
        self.calls.append(("reserve",))

    def load(self, num_ready_tokens: int, digests: Sequence[bytes]) -> None:
        self.calls.append(("load", num_ready_tokens, *digests))

    def complete(self, num_ready_tokens: int, first_token: SampledToken, digests: Sequence[bytes]) -> None:
        self.calls.append(("complete", num_ready_tokens, first_token.token_id, *digests))

    def recompute(self, reason: str, num_ready_tokens: int, digests: Sequence[bytes], *, is_quiet: bool) -> None:
        self.calls.append(("recompute", reason, num_ready_tokens, *digests))
        if is_quiet:
            self.calls.append(("quiet",))

    def note_quiet(self) -> None:
        self.calls.append(("quiet",))

    def quarantine(self, num_blocks: int) -> None:
        self.calls.append(("quarantine", num_blocks))


@asynccontextmanager
async def handoff_with(
    events: list[pods_pb2.HandoffEvent],
) -> AsyncIterator[tuple[Handoff, RecordingConsumer, ScriptedHandoff]]:
    server = RpcServer("127.0.0.1", 0, ["baton.v1.Handoff"])
    servicer = ScriptedHandoff(events)
    pods_pb2_grpc.add_HandoffServicer_to_server(servicer, server.grpc_server)
    async with server, ChannelPool() as peers:
        offer = Offer(server.address, "t", 1, 40, 500, b"f", "shared-storage", "decode-0", 16, 64)
        consumer = RecordingConsumer()
        yield Handoff(offer, consumer, peers, DecodeConfig(handoff_connect_timeout_s=DEADLINE_S)), consumer, servicer


async def test_good_handoff_in_order() -> None:
    async with handoff_with([COMPUTING, progress(16), progress(32), delivered(40)]) as (handoff, consumer, servicer):
        await handoff.run()
    assert consumer.calls == [("reserve",), ("load", 16), ("load", 32), ("complete", 40, 7)]
    assert handoff.phase is Phase.DELIVERED
    assert servicer.commands[0].start.decode_pod_id == "decode-0"
    assert not any(command.HasField("cancel") for command in servicer.commands)


@pytest.mark.parametrize(
    ("events", "reason", "num_ready"),
    [
        ([], "handoff_broken", 0),
        ([COMPUTING, progress(16)], "handoff_broken", 16),
        ([failed(0)], "prefill_failed", 0),
        ([failed(0, common_pb2.ERROR_CODE_DEADLINE_EXCEEDED)], "handoff_timeout", 0),
        ([COMPUTING, failed(16, common_pb2.ERROR_CODE_CANCELLED)], "prefill_failed", 16),
        ([COMPUTING, progress(16), failed(32)], "prefill_failed", 32),
        ([progress(16)], "handoff_invalid", 0),
        ([delivered(40)], "handoff_invalid", 0),
        ([COMPUTING, COMPUTING], "handoff_invalid", 0),
        ([COMPUTING, progress(41)], "handoff_invalid", 0),
        ([COMPUTING, progress(16), progress(15)], "handoff_invalid", 16),
        ([COMPUTING, delivered(39)], "handoff_invalid", 39),
        ([COMPUTING, delivered(40, token=500)], "handoff_invalid", 40),
        ([pods_pb2.HandoffEvent()], "handoff_invalid", 0),
    ],
)
async def test_bad_handoff_is_recomputed_once(events: list[pods_pb2.HandoffEvent], reason: str, num_ready: int) -> None:
    async with handoff_with(events) as (handoff, consumer, _):
        await handoff.run()
    assert consumer.calls[-1] == ("recompute", reason, num_ready)
    assert sum(call[0] == "recompute" for call in consumer.calls) == 1
    assert handoff.phase is Phase.FAILED
    handoff.fail("prefill_failed")  # too late to matter
    assert consumer.calls[-1][1] == reason


async def test_request_whose_prefill_was_cancelled_may_yet_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "ABORT_TIMEOUT_S", DEADLINE_S)
    async with handoff_with([COMPUTING, failed(0, common_pb2.ERROR_CODE_CANCELLED)]) as (handoff, consumer, servicer):
        running = asyncio.create_task(handoff.run())
        await wait_for(lambda: servicer.is_left)
        handoff.leave()
        await running
    assert consumer.calls == [("reserve",)]
    assert handoff.phase is Phase.CANCELLED


async def test_prefill_pod_is_told_of_the_reservation() -> None:
    async with handoff_with([COMPUTING]) as (handoff, consumer, servicer):
        consumer.reserve = lambda: handoff.note_held(16)  # type: ignore[method-assign]

        async def deliver_once_reserved(request_iterator, context):
            await anext(request_iterator)
            await context.write(COMPUTING)
            servicer.commands.append(await anext(request_iterator))
            await context.write(delivered(40))
            async for command in request_iterator:
                servicer.commands.append(command)

        servicer.script = deliver_once_reserved
        await handoff.run()
    assert [command.reserved.num_held_tokens for command in servicer.commands] == [16]
    assert handoff.phase is Phase.DELIVERED


async def test_fault_of_the_consumer_is_a_reason_too(caplog: pytest.LogCaptureFixture) -> None:
    async with handoff_with([COMPUTING]) as (handoff, consumer, _):
        consumer.reserve = lambda: 1 / 0  # type: ignore[method-assign]
        await handoff.run()
    assert consumer.calls == [("recompute", "internal", 0)]
    assert "ZeroDivisionError" in caplog.text
