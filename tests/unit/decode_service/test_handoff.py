"""The decode side of the handoff against a prefill pod that follows a script."""

import asyncio
import gc
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from common.engine.contract.layout import KVLayout
from common.engine.executor.fake import ONE_GROUP
from common.errors import (
    BatonError,
    DeadlineExceededError,
    IncompatiblePeerError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from common.pod.convert import layout_to_pb
from common.rpc.channel import ChannelPool
from common.rpc.errors import abort_with
from common.rpc.server import RpcServer
from common.types import Logprobs, SampledToken
from decode_service import handoff as handoff_module
from decode_service.handoff import DEFAULT_QUARANTINE_S, Handoff, HandoffTimeouts, Offer, Phase
from tests.pods import DEADLINE_S, wait_for

Context = grpc.aio.ServicerContext
Script = Callable[[AsyncIterator[pods_pb2.HandoffCommand], Context], Awaitable[None]]

LAYOUT = KVLayout(16, ONE_GROUP)


def computing(layout: KVLayout = LAYOUT, **fields: float) -> pods_pb2.HandoffEvent:
    told = pods_pb2.HandoffComputing(incarnation=1, layout=layout_to_pb(layout), **fields)
    return pods_pb2.HandoffEvent(computing=told)


COMPUTING = computing(quarantine_s=41.5)


def progress(num_tokens: int, *digests: bytes) -> pods_pb2.HandoffEvent:
    return pods_pb2.HandoffEvent(progress=pods_pb2.HandoffProgress(num_ready_tokens=num_tokens, digests=digests))


def delivered(num_tokens: int, *digests: bytes, token: int = 7) -> pods_pb2.HandoffEvent:
    event = pods_pb2.HandoffDelivered(num_ready_tokens=num_tokens, first_token_id=token, digests=digests)
    return pods_pb2.HandoffEvent(delivered=event)


def failed(num_tokens: int, *digests: bytes, code: Any = common_pb2.ERROR_CODE_INTERNAL) -> pods_pb2.HandoffEvent:
    error = common_pb2.Error(code=code, message="out of luck")
    event = pods_pb2.HandoffFailed(error=error, num_ready_tokens=num_tokens, digests=digests)
    return pods_pb2.HandoffEvent(failed=event)


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
        self.first_token: SampledToken | None = None

    def reserve(self) -> None:
        self.calls.append(("reserve",))

    def is_alive(self) -> bool:
        return True

    def load(self, num_ready_tokens: int, digests: Sequence[bytes]) -> None:
        self.calls.append(("load", num_ready_tokens, *digests))

    def complete(self, num_ready_tokens: int, first_token: SampledToken, digests: Sequence[bytes]) -> None:
        self.first_token = first_token
        self.calls.append(("complete", num_ready_tokens, first_token.token_id, *digests))

    def recompute(self, reason: str, num_ready_tokens: int, digests: Sequence[bytes], *, is_quiescent: bool) -> None:
        self.calls.append(("recompute", reason, num_ready_tokens, *digests))
        if is_quiescent:
            self.calls.append(("quiescent",))

    def note_quiescent(self) -> None:
        self.calls.append(("quiescent",))

    def quarantine(self, num_blocks: int, duration_s: float) -> None:
        self.calls.append(("quarantine", num_blocks, duration_s))


@asynccontextmanager
async def handoff_with(
    events: list[pods_pb2.HandoffEvent], *, is_direct: bool = False
) -> AsyncIterator[tuple[Handoff, RecordingConsumer, ScriptedHandoff]]:
    server = RpcServer("127.0.0.1", 0, ["baton.v1.Handoff"])
    servicer = ScriptedHandoff(events)
    pods_pb2_grpc.add_HandoffServicer_to_server(servicer, server.grpc_server)
    async with server, ChannelPool() as peers:
        address = b"here" if is_direct else b""
        offer = Offer(server.address, "t", 1, 40, 500, b"f", "c", "decode-0", LAYOUT, is_direct, address)
        consumer = RecordingConsumer()
        timeouts = HandoffTimeouts(queue_s=DEADLINE_S, connect_s=DEADLINE_S)
        yield Handoff(offer, consumer, peers, timeouts), consumer, servicer


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
        ([failed(0, code=common_pb2.ERROR_CODE_DEADLINE_EXCEEDED)], "handoff_timeout", 0),
        ([COMPUTING, failed(16, code=common_pb2.ERROR_CODE_CANCELLED)], "prefill_failed", 16),
        ([COMPUTING, progress(16), failed(32)], "prefill_failed", 32),
        ([COMPUTING, failed(16, code=common_pb2.ERROR_CODE_INVALID_ARGUMENT)], "prefill_refused", 16),
        ([failed(0, code=common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED)], "prefill_refused", 0),
        ([progress(16)], "handoff_invalid", 0),
        ([delivered(40)], "handoff_invalid", 0),
        ([COMPUTING, COMPUTING], "handoff_invalid", 0),
        ([COMPUTING, progress(41)], "handoff_invalid", 0),
        ([COMPUTING, progress(16), progress(15)], "handoff_invalid", 16),
        ([COMPUTING, delivered(39)], "handoff_invalid", 39),
        ([COMPUTING, delivered(40, token=500)], "handoff_invalid", 40),
        ([COMPUTING, progress(16, b"a store has no digests")], "handoff_invalid", 0),
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnavailableError("no"), "handoff_broken"),
        (DeadlineExceededError("no"), "handoff_timeout"),
        (InvalidRequestError("no"), "handoff_refused"),
        (OverloadedError("no"), "handoff_refused"),
        (IncompatiblePeerError("no"), "incompatible"),
    ],
)
async def test_status_of_the_stream_is_a_reason(error: BatonError, reason: str) -> None:
    async with handoff_with([]) as (handoff, consumer, servicer):
        servicer.script = lambda _, context: abort_with(context, error)
        await handoff.run()
    assert consumer.calls == [("recompute", reason, 0)]


LOGPROBS = common_pb2.PositionLogprobs(sampled=-0.5, top=[common_pb2.TokenLogprob(token_id=7, logprob=-0.5)])


@pytest.mark.parametrize(("said", "passed_on"), [(None, None), (LOGPROBS, Logprobs(sampled=-0.5, top=[(7, -0.5)]))])
async def test_log_probabilities_come_with_the_first_token(said: Any, passed_on: Any) -> None:
    event = pods_pb2.HandoffDelivered(num_ready_tokens=40, first_token_id=7, logprobs=said)
    async with handoff_with([COMPUTING, pods_pb2.HandoffEvent(delivered=event)]) as (handoff, consumer, _):
        await handoff.run()
    assert consumer.first_token == SampledToken(7, passed_on)


async def test_request_whose_prefill_was_cancelled_may_yet_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "ABORT_TIMEOUT_S", DEADLINE_S)
    async with handoff_with([COMPUTING, failed(0, code=common_pb2.ERROR_CODE_CANCELLED)]) as (
        handoff,
        consumer,
        servicer,
    ):
        running = asyncio.create_task(handoff.run())
        await wait_for(lambda: servicer.is_left)
        handoff.leave()
        await running
    assert consumer.calls == [("reserve",)]
    assert handoff.phase is Phase.CANCELLED


async def test_goodbye_that_is_never_answered_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "CANCEL_TIMEOUT_S", 0.05)
    async with handoff_with([]) as (handoff, consumer, servicer):

        async def never_end(request_iterator, context):
            await context.write(COMPUTING)
            async for command in request_iterator:
                servicer.commands.append(command)
            await asyncio.Event().wait()

        servicer.script = never_end
        running = asyncio.create_task(handoff.run())
        await wait_for(lambda: consumer.calls == [("reserve",)])
        handoff.leave()
        async with asyncio.timeout(DEADLINE_S):
            await running
    assert servicer.commands[-1].cancel.reason == "the request ended"


async def test_prefill_pod_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class HangingCall:
        is_cancelled = False

        async def write(self, _):
            await asyncio.Event().wait()

        def done(self):
            return self.is_cancelled

        def cancel(self):
            self.is_cancelled = True

    call = HangingCall()
    monkeypatch.setattr(handoff_module, "WRITE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(handoff_module, "HandoffStub", lambda _: SimpleNamespace(Open=lambda _: call))
    async with handoff_with([]) as (handoff, consumer, _):
        async with asyncio.timeout(DEADLINE_S):
            await handoff.run()
    assert consumer.calls == [("recompute", "handoff_timeout", 0)]
    assert call.is_cancelled


@pytest.mark.parametrize(("said", "default"), [(0.03, 3600.0), (0.0, 0.03)])
async def test_lease_of_the_prefill_pod_is_renewed_in_time(
    said: float, default: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a direct connector's consumer has no blocks."""
    monkeypatch.setattr(handoff_module, "DEFAULT_LEASE_S", default)
    async with handoff_with([], is_direct=True) as (handoff, consumer, servicer):

        async def wait_for_renewals(request_iterator, context):
            await anext(request_iterator)
            await context.write(computing(lease_s=said))
            servicer.commands += [await anext(request_iterator) for _ in range(2)]
            await context.write(failed(0))

        servicer.script = wait_for_renewals
        async with asyncio.timeout(DEADLINE_S):
            await handoff.run()
    assert [command.WhichOneof("command") for command in servicer.commands] == ["renew", "renew"]
    assert consumer.calls == [("reserve",), ("recompute", "prefill_failed", 0), ("quiescent",)]


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


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_how_a_read_ends_that_was_left_is_not_logged(end: str, caplog: pytest.LogCaptureFixture) -> None:
    reading: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    reading.add_done_callback(handoff_module._see_exception)
    if end == "cancelled":
        reading.cancel()
    else:
        reading.set_exception(UnavailableError("the call was left"))
    await asyncio.sleep(0)
    del reading
    gc.collect()  # asyncio tells then
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize(
    ("field", "said", "problem"),
    [
        ("block_size", 32, "block_size differs: 32 at the producer, 16 at the consumer"),
        ("tensor_parallel_size", 0, "1 KV heads cannot be divided among 0 ranks"),
    ],
)
async def test_a_layout_that_does_not_fit_fails_the_handoff(
    field: str, said: int, problem: str, is_direct: bool, caplog
) -> None:
    caplog.set_level(logging.INFO)
    told = computing(replace(LAYOUT, **{field: said}))
    async with handoff_with([told], is_direct=is_direct) as (handoff, consumer, _):
        await handoff.run()
    assert consumer.calls[0][:2] == ("recompute", "incompatible")
    assert problem in caplog.text


async def test_a_prefill_pod_that_tells_no_layout_fails_the_handoff() -> None:
    untold = pods_pb2.HandoffEvent(computing=pods_pb2.HandoffComputing(incarnation=1))
    async with handoff_with([untold]) as (handoff, consumer, _):
        await handoff.run()
    assert consumer.calls[0][:2] == ("recompute", "incompatible")


# -- direct connectors: 40 tokens in blocks of 16, of which the decode pod holds the first -----------------------------


@asynccontextmanager
async def direct_handoff_with(
    events: list[pods_pb2.HandoffEvent], *, break_off: bool = False, on_cancel: pods_pb2.HandoffEvent | None = None
) -> AsyncIterator[tuple[Handoff, RecordingConsumer, ScriptedHandoff]]:
    """The prefill pod says `events` once blocks are reserved, then breaks off or answers a cancellation."""
    async with handoff_with([], is_direct=True) as (handoff, consumer, servicer):

        def reserve() -> None:
            consumer.calls.append(("reserve",))
            handoff.note_held(16, [5, 6])

        async def script(request_iterator, context):
            servicer.commands.append(await anext(request_iterator))
            await context.write(COMPUTING)
            servicer.commands.append(await anext(request_iterator))
            for event in events:
                await context.write(event)
            if break_off:
                return
            async for command in request_iterator:
                servicer.commands.append(command)
                if command.HasField("cancel") and on_cancel is None:
                    return
                if command.HasField("cancel"):
                    await context.write(on_cancel)
            if on_cancel == progress(16):  # not an answer
                await asyncio.Event().wait()

        consumer.reserve = reserve  # type: ignore[method-assign]
        servicer.script = script
        yield handoff, consumer, servicer


async def test_direct_handoff_names_blocks_and_passes_digests_on() -> None:
    events = [progress(32, b"1"), delivered(40, b"2")]
    async with direct_handoff_with(events) as (handoff, consumer, servicer):
        await handoff.run()
    assert consumer.calls == [("reserve",), ("load", 32, b"1"), ("complete", 40, 7, b"2")]
    start, reserved = servicer.commands[0].start, servicer.commands[1].reserved
    assert (start.connector_address, start.layout) == (b"here", layout_to_pb(LAYOUT))
    assert (reserved.num_held_tokens, list(reserved.block_ids)) == (16, [5, 6])


async def test_digests_of_a_failed_transfer_are_of_use() -> None:
    async with direct_handoff_with([failed(32, b"1")]) as (handoff, consumer, _):
        await handoff.run()
    assert consumer.calls == [("reserve",), ("recompute", "prefill_failed", 32, b"1"), ("quiescent",)]


@pytest.mark.parametrize(
    "event",
    [
        progress(32),
        progress(32, b"1", b"2"),
        progress(16, b"1"),
        progress(24, b"1"),  # half a block
        delivered(40, b"1"),
        failed(40, b"1"),
    ],
)
async def test_as_many_digests_as_blocks(event: pods_pb2.HandoffEvent) -> None:
    async with direct_handoff_with([event]) as (handoff, consumer, _):
        await handoff.run()
    assert consumer.calls[1] == ("recompute", "handoff_invalid", 0)


@pytest.mark.parametrize("verdict", [failed(32), delivered(40, b"1", b"2")])
async def test_blocks_are_free_when_the_cancellation_is_answered(
    verdict: pods_pb2.HandoffEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_module, "CANCEL_TIMEOUT_S", 0.0)  # not for the answer of a pod that may be writing
    async with direct_handoff_with([progress(16)], on_cancel=verdict) as (handoff, consumer, servicer):
        running = asyncio.create_task(handoff.run())
        await wait_for(lambda: ("load", 16) in consumer.calls)
        handoff.leave()
        await running
    assert consumer.calls == [("reserve",), ("load", 16), ("quiescent",)]
    assert servicer.commands[-1].HasField("cancel")


@pytest.mark.parametrize("how", ["leave", "fail", "broken"])
async def test_blocks_are_quarantined_without_a_verdict(how: str) -> None:
    async with direct_handoff_with([progress(16)], break_off=how == "broken") as (handoff, consumer, _):
        running = asyncio.create_task(handoff.run())
        await wait_for(lambda: ("load", 16) in consumer.calls)
        if how == "leave":
            handoff.leave()
        elif how == "fail":
            handoff.fail("prefill_failed")
        await running
    reason = {"leave": [], "fail": ["prefill_failed"], "broken": ["handoff_broken"]}[how]
    assert consumer.calls == [
        ("reserve",),
        ("load", 16),
        *(("recompute", each, 16) for each in reason),
        ("quarantine", 2, 41.5),
    ]


async def test_recompute_does_not_wait_for_the_goodbye() -> None:
    async with direct_handoff_with([progress(16)], on_cancel=progress(16)) as (handoff, consumer, servicer):
        running = asyncio.create_task(handoff.run())
        await wait_for(lambda: ("load", 16) in consumer.calls)
        handoff.fail("prefill_failed")
        assert consumer.calls[-1] == ("recompute", "prefill_failed", 16)
        await wait_for(lambda: servicer.commands[-1].HasField("cancel"))
        assert not running.done()  # it waits for the verdict
        running.cancel()
        await asyncio.wait({running})
    assert consumer.calls[-1] == ("quarantine", 2, 41.5)


async def test_blocks_that_were_not_named_are_free_at_once() -> None:
    async with handoff_with([COMPUTING], is_direct=True) as (handoff, consumer, _):
        await handoff.run()
        handoff.note_held(16, [5, 6])  # too late
    assert consumer.calls == [("reserve",), ("recompute", "handoff_broken", 0), ("quiescent",)]


@pytest.mark.parametrize("told", [0.0, -1.0, math.nan, math.inf, 1e300])
async def test_a_quarantine_that_is_none_is_the_default(told: float) -> None:
    async with handoff_with([], is_direct=True) as (handoff, consumer, servicer):

        async def script(request_iterator, context):
            await anext(request_iterator)
            await context.write(computing(quarantine_s=told))
            await anext(request_iterator)

        servicer.script = script
        consumer.reserve = lambda: handoff.note_held(16, [5, 6])  # type: ignore[method-assign]
        await handoff.run()
    assert consumer.calls[-1] == ("quarantine", 2, DEFAULT_QUARANTINE_S)
