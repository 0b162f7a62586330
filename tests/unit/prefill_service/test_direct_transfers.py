"""A prefill pod with a direct connector; the test is the decode pod, whose KV cache is the pod's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from common.engine.executor.fake import expected_tokens
from common.engine.kv_connector import ConnectorFacts
from common.engine.messages import TransferTarget
from common.errors import NonFiniteError
from common.pb import common_pb2, pods_pb2
from common.rpc.errors import from_rpc_error
from prefill_service.producer import Producer
from prefill_service.transfers import TransferRegistry
from tests.pods import (
    CHUNK,
    DEADLINE_S,
    HandoffStream,
    RunningPod,
    SlowConnector,
    engine_request,
    kinds,
    prefill_pod,
    prompt_of,
    start_prefill,
    wait_for,
)

PROMPT = prompt_of(2 * CHUNK + 5)
BLOCKS = [200, 201, 202, 203, 204]  # of the pod itself; the LRU queue hands them out last


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    connector = SlowConnector()
    async with prefill_pod(None, executor={"connector": connector}) as running:
        yield running
        connector.let_go()


def connector_of(pod: RunningPod) -> SlowConnector:
    (connector,) = pod.executor._connectors
    assert isinstance(connector, SlowConnector)
    return connector


def digests_of(events: list[pods_pb2.HandoffEvent]) -> list[bytes]:
    found: list[bytes] = []
    for event in events:
        kind = event.WhichOneof("event")
        assert kind is not None
        found += getattr(getattr(event, kind), "digests", [])
    return found


async def start_and_write(pod: RunningPod, stream: HandoffStream) -> grpc.aio.UnaryUnaryCall:
    """A prefill that has computed two of three chunks, and a save under way for as long as the connector is held."""
    told = asyncio.Event()
    engine = pod.context.engine
    tell_engine = engine.set_transfer_target

    def tell(target: TransferTarget) -> None:
        tell_engine(target)
        told.set()

    engine.set_transfer_target = tell  # type: ignore[method-assign]
    connector_of(pod).hold()
    pod.gate.shut()
    call = start_prefill(pod, engine_request("a", PROMPT))
    assert kinds([await stream.event()]) == ["computing"]  # type: ignore[list-item]
    await stream.reserve(BLOCKS)
    await told.wait()
    pod.gate.allow(2)
    await wait_for(lambda: connector_of(pod).is_writing)
    return call


class DatedConnector(SlowConnector):
    """Ends its writes within 20 s."""

    def register_kv_cache(self, *args: Any, **how: Any) -> ConnectorFacts:
        return replace(super().register_kv_cache(*args, **how), max_write_s=20.0)


@pytest.mark.parametrize(("settings", "told"), [({}, 50.0), ({"handoff_quarantine_s": 7.0}, 7.0)])
async def test_decode_pods_learn_how_long_a_lost_pod_may_write(settings: dict[str, float], told: float) -> None:
    """Unless it is set, the connector's time and 30 s, in which the loss is noticed and a step ends."""
    async with prefill_pod(None, executor={"connector": DatedConnector()}, **settings) as pod:
        async with HandoffStream(pod, "t-a") as stream:
            call = start_prefill(pod, engine_request("a", PROMPT))
            event = await stream.event()
            assert event is not None
            assert event.computing.quarantine_s == told
            await stream.cancel()
        with suppress(grpc.aio.AioRpcError):
            await call


@pytest.mark.parametrize("first", ["reservation", "token"])
async def test_each_block_is_written_once_and_its_digest_told_once(pod: RunningPod, first: str) -> None:
    pod.gate.shut()
    async with HandoffStream(pod, "t-a") as stream:
        call = start_prefill(pod, engine_request("a", PROMPT))
        computing = await stream.event()
        assert computing is not None
        assert computing.HasField("computing")
        if first == "reservation":
            await stream.reserve(BLOCKS)
            pod.gate.open()
            await call
        else:
            pod.gate.open()
            await call
            await stream.reserve(BLOCKS)
        events = await stream.events()
    assert set(kinds(events[:-1])) <= {"progress"}
    assert events[-1].delivered.first_token_id == expected_tokens(PROMPT, 1)[0]
    assert events[-1].delivered.num_ready_tokens == len(PROMPT)
    assert len(set(digests_of(events))) == len(digests_of(events)) == len(BLOCKS)


async def test_held_prefix_is_neither_written_nor_digested(pod: RunningPod) -> None:
    async with HandoffStream(pod, "t-a") as stream:
        call = start_prefill(pod, engine_request("a", PROMPT))
        await stream.event()
        await stream.reserve(BLOCKS[2:], num_held_tokens=CHUNK)
        events = await stream.events()
        await call
    assert kinds(events)[-1] == "delivered"
    assert len(digests_of(events)) == len(BLOCKS) - 2
    written = [block for save in pod.connector.saves for block in save.destination.block_ids]
    assert written == BLOCKS[2:]


def num_aborted(pod: RunningPod) -> float:
    return pod.metric("baton_pod_request_success_total", finished_reason="abort")


@pytest.mark.parametrize("how", ["cancel", "router"])
async def test_verdict_waits_for_the_last_write(pod: RunningPod, how: str) -> None:
    async with HandoffStream(pod, "t-a") as stream:
        call = await start_and_write(pod, stream)
        if how == "cancel":
            await stream.cancel()
        else:
            call.cancel()
            await wait_for(lambda: num_aborted(pod) == 1)  # before its first token, which would end it well
        verdict = asyncio.create_task(stream.events())
        pod.gate.open()
        await wait_for(lambda: bool(connector_of(pod).cancelled))
        assert (await pod.integrity()).num_transfers > 0
        assert not verdict.done()
        connector_of(pod).let_go()
        events = await verdict
        assert kinds(events)[-1] == "failed"
        assert events[-1].failed.error.code == common_pb2.ERROR_CODE_CANCELLED
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await call


async def test_break_of_the_stream_ends_the_writes(pod: RunningPod) -> None:
    """The decode pod cannot lend its blocks for ever."""
    async with HandoffStream(pod, "t-a") as stream:
        call = await start_and_write(pod, stream)
        stream.call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert from_rpc_error(caught.value).code.label == "unavailable"
    await wait_for(lambda: pod.metric("baton_pod_handoff_total", outcome="broken") == 1)
    pod.gate.open()
    connector_of(pod).let_go()
    await pod.wait_clean()


@pytest.mark.parametrize("block_ids", [BLOCKS[1:], [*BLOCKS, 205], [0, *BLOCKS[1:]], [BLOCKS[1], *BLOCKS[1:]]])
async def test_blocks_that_do_not_fit_the_prompt_are_not_written(pod: RunningPod, block_ids: list[int]) -> None:
    async with HandoffStream(pod, "t-a") as stream:
        call = start_prefill(pod, engine_request("a", PROMPT))
        await stream.event()
        await stream.reserve(block_ids)
        assert kinds(await stream.events()) == ["failed"]
        await call  # the router gets its token
    assert not pod.connector.saves


async def test_second_reservation_fails_the_transfer(pod: RunningPod) -> None:
    pod.gate.shut()
    async with HandoffStream(pod, "t-a") as stream:
        call = start_prefill(pod, engine_request("a", PROMPT))
        await stream.event()
        await stream.reserve(BLOCKS)
        await stream.reserve(BLOCKS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert from_rpc_error(caught.value).param == "reserved"
        pod.gate.open()
        assert kinds(await stream.events())[-1] == "failed"


async def test_a_decode_pod_that_waits_for_blocks_renews_its_lease(
    pod: RunningPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = asyncio.Event()
    monkeypatch.setattr(TransferRegistry, "renew", lambda *_: renewed.set())
    async with HandoffStream(pod, "t-a") as stream:
        call = start_prefill(pod, engine_request("a", PROMPT))
        await stream.event()
        await stream.call.write(pods_pb2.HandoffCommand(renew=pods_pb2.HandoffRenew()))
        async with asyncio.timeout(DEADLINE_S):
            await renewed.wait()
        await stream.reserve(BLOCKS)
        assert kinds(await stream.events())[-1] == "delivered"
        await call


async def test_reservation_must_come_within_the_lease() -> None:
    async with prefill_pod(None, transfer_lease_s=0.05) as pod, HandoffStream(pod, "t-a") as stream:
        await start_prefill(pod, engine_request("a", PROMPT))
        *_, failed = await stream.events()
        assert failed.failed.error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        assert "reserved no blocks" in failed.failed.error.message


async def test_delivery_that_nobody_asks_for_is_given_up_after_the_lease() -> None:
    async with prefill_pod(None, transfer_lease_s=0.05) as pod:
        await start_prefill(pod, engine_request("a", PROMPT))
        await pod.wait_clean()


async def test_decode_pod_without_address_is_refused(pod: RunningPod) -> None:
    async with HandoffStream(pod, "t-a", connector_address=b"") as stream:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.event()
    error = from_rpc_error(caught.value)
    assert (error.code.label, error.param) == ("incompatible", "connector_address")


async def test_closing_pod_says_no_verdict_while_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_service.servicers.FLUSH_TIMEOUT_S", 0.05)
    connector = SlowConnector()
    async with prefill_pod(None, executor={"connector": connector}) as pod, HandoffStream(pod, "t-a") as stream:
        call = await start_and_write(pod, stream)
        pod.gate.open()
        pod.is_dead = True
        closing = asyncio.create_task(pod.runtime.stop())
        with pytest.raises(grpc.aio.AioRpcError):
            assert not await stream.events()
        await closing
        with suppress(grpc.aio.AioRpcError):
            await call


async def test_a_failed_prefill_keeps_its_transfer_until_nothing_is_written_any_more(pod: RunningPod) -> None:
    async with HandoffStream(pod, "t-a") as stream:
        call = await start_and_write(pod, stream)
        pod.executor.is_finite = False
        pod.gate.open()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert isinstance(from_rpc_error(caught.value), NonFiniteError)
        assert pod.context.requests  # it still writes
        connector_of(pod).let_go()
        assert kinds(await stream.events())[-1] == "failed"


async def test_a_dead_engine_writes_nothing(pod: RunningPod) -> None:
    async with HandoffStream(pod, "t-a") as stream:
        call = await start_and_write(pod, stream)
        pod.executor.failure = RuntimeError("the device is gone")
        pod.gate.open()
        assert kinds(await stream.events())[-1] == "failed"
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_no_verdict_on_writes_that_a_fault_has_lost_sight_of(
    pod: RunningPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Producer, "_note_first_token", lambda *_: 1 / 0)
    async with HandoffStream(pod, "t-a") as stream:
        call = await start_and_write(pod, stream)
        pod.gate.open()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert "failed" not in kinds(await stream.events())
        assert from_rpc_error(caught.value).code.label == "internal"
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    connector_of(pod).let_go()
