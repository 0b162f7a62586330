"""A prefill pod: the prefill leg and the handoff stream over real gRPC, with the test as router and decode pod."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest

from common.engine.contract.layout import KVLayout
from common.engine.executor.fake import ONE_GROUP, expected_tokens
from common.engine.messages import KVSaved, RequestOutput
from common.errors import ErrorCode, NonFiniteError, UnavailableError
from common.pb import common_pb2, pods_pb2
from common.pb.pods_pb2_grpc import PodStub
from common.pod.admission import Admission
from common.pod.convert import layout_to_pb
from common.rpc.errors import from_rpc_error
from common.types import RequestId, SampledToken, SamplingParams, TransferId
from prefill_service import servicers
from prefill_service.transfers import TransferKey, TransferRegistry
from tests.pods import (
    BLOCK_SIZE,
    CHUNK,
    DEADLINE_S,
    HandoffStream,
    RunningPod,
    engine_request,
    kinds,
    prefill_pod,
    prompt_of,
    start_prefill,
    wait_for,
)


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    async with prefill_pod({}) as running:
        yield running


async def failure_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def stream_failure(stream: HandoffStream) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.event()
    return caught.value


async def test_prefill_returns_the_first_token_and_delivers_the_kv(pod: RunningPod) -> None:
    prompt = prompt_of(2 * CHUNK + 5)
    async with HandoffStream(pod, "t-a") as stream:
        response = await start_prefill(
            pod,
            engine_request("a", prompt, sampling=SamplingParams(temperature=0.0, max_tokens=8, num_logprobs=1)),
        )
        events = await stream.events()
    first = expected_tokens(prompt, 1)[0]
    assert response.first_token_id == first
    assert response.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    assert response.HasField("logprobs")
    assert response.timing.compute_s > 0
    assert kinds(events)[0] == "computing"
    assert events[0].computing.incarnation == pod.context.incarnation
    assert events[0].computing.lease_s == pod.context.config.transfer_lease_s
    assert pod.metric("baton_pod_request_success_total", finished_reason="handoff") == 1
    ready = [event.progress.num_ready_tokens for event in events[1:-1]]
    assert ready == sorted(set(ready))
    assert events[-1].delivered == pods_pb2.HandoffDelivered(
        num_ready_tokens=len(prompt), first_token_id=first, logprobs=response.logprobs
    )


async def test_decode_pod_may_come_after_the_prefill(pod: RunningPod) -> None:
    prompt = prompt_of(20)
    await start_prefill(pod, engine_request("a", prompt))
    async with HandoffStream(pod, "t-a") as stream:
        events = await stream.events()
    assert (kinds(events)[0], kinds(events)[-1]) == ("computing", "delivered")


async def test_second_prefill_of_a_prompt_reports_cached_tokens(pod: RunningPod) -> None:
    for name, cached in (("a", 0), ("b", 32)):
        async with HandoffStream(pod, f"t-{name}") as stream:
            response = await start_prefill(pod, engine_request(name, prompt_of(40)))
            assert kinds(await stream.events())[-1] == "delivered"
        assert response.num_cached_tokens == cached


async def test_saves_that_overtake_the_news_of_their_step(pod: RunningPod) -> None:
    """Cached blocks leave beside the step, and may be in the store before the engine says that the prefill began."""
    await pod.occupy()
    call = start_prefill(pod, engine_request("a", prompt_of(40)))
    sinks = pod.context.requests._sinks
    await wait_for(lambda: len(sinks) == 2)
    producer = list(sinks.values())[-1]
    producer.take_output(RequestOutput(request_id=RequestId("a"), events=[KVSaved(num_tokens=32)]))
    async with HandoffStream(pod, "t-a") as stream:
        assert kinds([await stream.event(), await stream.event()]) == ["computing", "progress"]
        pod.gate.open()
        assert kinds(await stream.events())[-1] == "delivered"
    await call
    await pod.other_work


async def test_prefill_without_transfer_is_a_single_token(pod: RunningPod) -> None:
    response = await start_prefill(pod, engine_request("a", prompt_of(20)), transfer=False)
    assert response.first_token_id == expected_tokens(prompt_of(20), 1)[0]
    assert response.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    for name, max_tokens, reason in (("b", 4, common_pb2.FINISH_REASON_LENGTH), ("c", 5, 0)):
        resumed = engine_request(name, prompt_of(20), max_tokens=max_tokens, output_token_ids=[7, 8, 9])
        response = await start_prefill(pod, resumed, transfer=False)
        assert response.finish_reason == reason
    await pod.wait_clean()
    assert pod.context.stats.latest.num_generation_tokens == 3


async def test_generation_that_ends_with_its_first_token_is_delivered_all_the_same(pod: RunningPod) -> None:
    prompt = prompt_of(20)
    stop = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(expected_tokens(prompt, 1)[0],))
    async with HandoffStream(pod, "t-a") as stream:
        response = await start_prefill(pod, engine_request("a", prompt, sampling=stop))
        assert kinds(await stream.events())[-1] == "delivered"
    assert response.finish_reason == common_pb2.FINISH_REASON_STOP


def layout(**changes: int) -> pods_pb2.KVLayout:
    """The pod's, but for the changes."""
    return layout_to_pb(replace(KVLayout(BLOCK_SIZE, ONE_GROUP), **changes))


@pytest.mark.parametrize(
    ("start", "param"),
    [
        ({"fingerprint": b"other"}, "fingerprint"),
        ({"connector": "nixl"}, "connector"),
        ({"layout": layout(block_size=32), "fingerprint": b"other"}, "fingerprint"),
        ({"layout": layout(block_size=32)}, "block_size"),
        ({"layout": layout(tensor_parallel_size=0)}, "tensor_parallel_size"),
        ({"layout": None}, "kv_dtype"),
    ],
)
async def test_pods_that_do_not_fit_are_refused(pod: RunningPod, start: dict, param: str) -> None:
    async with HandoffStream(pod, "t-a", **start) as stream:
        error = from_rpc_error(await stream_failure(stream))
    assert (error.code.label, error.param) == ("incompatible", param)
    assert pod.context.admission.num_open == 0


async def test_what_does_not_fit_is_named(pod: RunningPod) -> None:
    async with HandoffStream(pod, "t-a", layout=layout(block_size=24)) as stream:
        error = from_rpc_error(await stream_failure(stream))
    assert error.message == "block_size differs: 16 at the producer, 24 at the consumer"


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"connector": "nixl"}, "connector differs: 'shared-storage' here, 'nixl' on decode-test"),
        ({"fingerprint": b"another model"}, "fingerprint differs: {ours} here, 616e6f746865 on decode-test"),
        (
            {
                "fingerprint": b"other",
                "layout": layout_to_pb(KVLayout(BLOCK_SIZE, (replace(ONE_GROUP[0], dtype="int8"),))),
            },
            "kv_dtype differs: 'float32' here, 'int8' on decode-test",
        ),
    ],
)
async def test_what_differs_is_shown(pod: RunningPod, start: dict, message: str) -> None:
    async with HandoffStream(pod, "t-a", **start) as stream:
        error = from_rpc_error(await stream_failure(stream))
    assert error.message == message.format(ours=pod.context.spec.fingerprint.hex()[:12])


@pytest.mark.parametrize(("transfer_id", "epoch", "param"), [("", 1, "transfer_id"), ("t", 0, "epoch")])
async def test_nameless_handoff_is_refused(pod: RunningPod, transfer_id: str, epoch: int, param: str) -> None:
    async with HandoffStream(pod, transfer_id, epoch=epoch) as stream:
        assert from_rpc_error(await stream_failure(stream)).param == param


async def test_handoff_must_begin_with_start(pod: RunningPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicers, "HANDOFF_START_TIMEOUT_S", 0.05)
    silent = HandoffStream(pod, "t-a")
    assert from_rpc_error(await stream_failure(silent)).param == "start"
    impatient = HandoffStream(pod, "t-a")
    await impatient.cancel()
    assert from_rpc_error(await stream_failure(impatient)).param == "start"


async def test_bad_and_duplicate_prefills_are_refused(pod: RunningPod) -> None:
    error = await failure_of(start_prefill(pod, engine_request("a", [])))
    assert from_rpc_error(error).param == "prompt_token_ids"
    assert pod.metric("baton_pod_request_failure_total", code="invalid_argument") == 1
    pod.gate.shut()
    first = start_prefill(pod, engine_request("b", prompt_of(20)))
    await wait_for(lambda: len(pod.context.requests) == 1)
    error = await failure_of(start_prefill(pod, engine_request("b", prompt_of(20))))
    assert from_rpc_error(error).param == "transfer_id"
    async with HandoffStream(pod, "t-b") as stream:
        async with HandoffStream(pod, "t-b") as second:
            assert from_rpc_error(await stream_failure(second)).param == "transfer_id"
        pod.gate.open()
        await first
        assert kinds(await stream.events())[-1] == "delivered"


async def test_router_cancels_the_prefill(pod: RunningPod) -> None:
    pod.gate.shut()
    call = start_prefill(pod, engine_request("a", prompt_of(3 * CHUNK)))
    async with HandoffStream(pod, "t-a") as stream:
        await wait_for(lambda: len(pod.context.requests) == 1)
        call.cancel()
        *earlier, failed = await stream.events()
        assert kinds(earlier) in ([], ["computing"])
        assert failed.failed.error.code == common_pb2.ERROR_CODE_CANCELLED
    pod.gate.open()
    await pod.wait_clean()
    assert sum(step.total_num_scheduled_tokens for step in pod.executor.steps) <= CHUNK  # the step that was under way


async def test_call_deadline_ends_the_prefill(pod: RunningPod) -> None:
    pod.gate.shut()
    request = pods_pb2.PrefillRequest(request=engine_request("a", prompt_of(20)), transfer_id="t-a", epoch=1)
    error = await failure_of(servicers.pods_pb2_grpc.PrefillStub(pod.channel).Prefill(request, timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_for(lambda: len(pod.context.requests) == 0 and pod.context.admission.num_open == 0)


async def test_decode_pod_cancels_a_running_prefill(pod: RunningPod) -> None:
    pod.gate.shut()
    call = start_prefill(pod, engine_request("a", prompt_of(2 * CHUNK)))
    async with HandoffStream(pod, "t-a") as stream:
        pod.gate.allow(1)
        assert kinds([await stream.event()]) == ["computing"]  # type: ignore[list-item]
        await stream.cancel()
        error = from_rpc_error(await failure_of(call))
        assert (error.code.label, error.message) == ("cancelled", "the decode pod cancelled: test")
        assert kinds(await stream.events())[-1] == "failed"
    assert pod.metric("baton_pod_handoff_total", outcome="cancelled") == 1


async def test_cancellation_that_overtakes_the_prefill_refuses_it(pod: RunningPod) -> None:
    async with HandoffStream(pod, "t-a") as stream:
        await stream.cancel(reason="")
        assert kinds(await stream.events()) == ["failed"]
    error = from_rpc_error(await failure_of(start_prefill(pod, engine_request("a", prompt_of(20)))))
    assert (error.code.label, error.message) == ("cancelled", "the decode pod cancelled: cancelled")
    assert not pod.executor.steps


async def test_break_of_the_stream_does_not_end_the_prefill(pod: RunningPod) -> None:
    pod.gate.shut()
    call = start_prefill(pod, engine_request("a", prompt_of(2 * CHUNK)))
    async with HandoffStream(pod, "t-a") as stream:
        pod.gate.allow(1)
        assert await stream.event()
        stream.call.cancel()
        await wait_for(lambda: pod.metric("baton_pod_handoff_total", outcome="broken") == 1)
    pod.gate.open()
    assert (await call).first_token_id == expected_tokens(prompt_of(2 * CHUNK), 1)[0]


async def test_start_without_prefill_fails_after_the_lease() -> None:
    async with prefill_pod({}, transfer_lease_s=0.05) as pod, HandoffStream(pod, "t-a") as stream:
        (failed,) = await stream.events()
        assert failed.failed.error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        await wait_for(lambda: pod.metric("baton_pod_handoff_total", outcome="failed") == 1)


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_the_verdict_carries_what_was_not_told_before(pod: RunningPod, is_delivered: bool) -> None:
    registry = TransferRegistry(Admission(8), max_transfers=8, lease_s=DEADLINE_S, is_direct=False)
    events: list[pods_pb2.HandoffEvent] = []
    is_left = asyncio.Event()

    async def commands() -> AsyncIterator[pods_pb2.HandoffCommand]:
        yield pods_pb2.HandoffCommand(start=HandoffStream(pod, "t-a")._start)
        await is_left.wait()

    class Context:
        async def write(self, event: pods_pb2.HandoffEvent) -> None:
            events.append(event)

    telling = asyncio.create_task(
        servicers.HandoffServicer(pod.context, registry, quarantine_s=60.0).Open(commands(), Context())
    )
    transfer = registry.attach_producer(TransferKey(TransferId("t-a"), 1), SimpleNamespace())
    registry.note_computing(transfer)
    registry.note_ready(transfer, 16, [b"1"])
    await wait_for(lambda: len(events) == 2)
    registry.note_ready(transfer, 32, [b"2"])
    if is_delivered:
        registry.deliver(transfer, SampledToken(7))
    else:
        registry.fail(transfer, UnavailableError("no"))
    await wait_for(lambda: len(events) == 3)
    is_left.set()
    await telling
    assert kinds(events) == ["computing", "progress", "delivered" if is_delivered else "failed"]
    assert (events[1].progress.num_ready_tokens, list(events[1].progress.digests)) == (16, [b"1"])
    verdict = events[2].delivered if is_delivered else events[2].failed
    assert (verdict.num_ready_tokens, list(verdict.digests)) == (32, [b"2"])


async def test_decode_pod_that_does_not_hang_up_is_left(pod: RunningPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicers, "HANG_UP_TIMEOUT_S", 0.05)
    async with HandoffStream(pod, "t-a") as stream:
        await start_prefill(pod, engine_request("a", prompt_of(20)))
        async with asyncio.timeout(DEADLINE_S):
            while await stream.event() is not None:
                pass


async def test_closing_waits_until_every_decode_pod_was_told(pod: RunningPod) -> None:
    registry = TransferRegistry(Admission(8), max_transfers=8, lease_s=DEADLINE_S, is_direct=False)
    handoffs = servicers.HandoffServicer(pod.context, registry, quarantine_s=60.0)
    is_slow, may_write = asyncio.Event(), asyncio.Event()

    class SlowContext:
        async def write(self, _: pods_pb2.HandoffEvent) -> None:
            is_slow.set()
            await may_write.wait()

    class Context:
        async def write(self, _: pods_pb2.HandoffEvent) -> None: ...

    async def commands(name: str) -> AsyncIterator[pods_pb2.HandoffCommand]:
        yield pods_pb2.HandoffCommand(start=HandoffStream(pod, name)._start)

    streams = [
        asyncio.create_task(handoffs.Open(commands(name), context))
        for name, context in (("t-a", SlowContext()), ("t-b", Context()))
    ]
    await wait_for(lambda: len(registry) == 2)
    registry.close()
    await is_slow.wait()
    await streams[1]
    closing = asyncio.create_task(handoffs.close())
    done, _ = await asyncio.wait({closing}, timeout=0.05)
    assert not done
    may_write.set()
    await asyncio.gather(closing, *streams)


async def test_delivery_that_nobody_fetches_is_forgotten_after_the_lease() -> None:
    async with prefill_pod({}, transfer_lease_s=0.05) as pod:
        await start_prefill(pod, engine_request("a", prompt_of(20)))
        await wait_for(lambda: pod.context.admission.num_open == 0)


async def test_too_many_transfers_are_refused() -> None:
    async with prefill_pod({}, front={"max_transfers": 1}) as pod, HandoffStream(pod, "t-a") as stream:
        await wait_for(lambda: pod.context.admission.num_open == 1)
        error = from_rpc_error(await failure_of(start_prefill(pod, engine_request("b", prompt_of(20)))))
        assert error.code.label == "resource_exhausted"
        stream.call.cancel()


async def test_failed_transfers_do_not_keep_others_out() -> None:
    async with prefill_pod({}, front={"max_transfers": 2}) as pod:
        for name in "abc":
            async with HandoffStream(pod, f"t-{name}") as stream:
                await stream.cancel()
                assert kinds(await stream.events()) == ["failed"]
        for name in "bc":  # these are remembered, the oldest is not
            error = from_rpc_error(await failure_of(start_prefill(pod, engine_request(name, prompt_of(20)))))
            assert error.code.label == "cancelled"
        async with HandoffStream(pod, "t-d") as stream:
            await start_prefill(pod, engine_request("d", prompt_of(20)))
            assert kinds(await stream.events())[-1] == "delivered"


async def test_drain_finishes_handoffs_and_takes_no_new_ones(pod: RunningPod) -> None:
    pod.gate.shut()
    call = start_prefill(pod, engine_request("a", prompt_of(20)))
    await wait_for(lambda: len(pod.context.requests) == 1)
    drained = PodStub(pod.channel).Drain(pods_pb2.DrainRequest(), timeout=DEADLINE_S)
    await wait_for(lambda: pod.context.admission.draining)
    error = from_rpc_error(await failure_of(start_prefill(pod, engine_request("b", prompt_of(20)))))
    assert error.code.label == "unavailable"
    async with HandoffStream(pod, "t-b") as stream:
        assert from_rpc_error(await stream_failure(stream)).code.label == "unavailable"
    pod.gate.open()
    await call
    async with HandoffStream(pod, "t-a") as stream:
        assert kinds(await stream.events())[-1] == "delivered"
    assert (await drained).num_unfinished == 0


async def test_closing_pod_fails_its_transfers() -> None:
    async with prefill_pod({}) as pod, HandoffStream(pod, "t-a") as stream:
        await wait_for(lambda: pod.context.admission.num_open == 1)
        pod.is_dead = True
        await pod.runtime.stop()
        (failed,) = await stream.events()
        assert failed.failed.error.code == common_pb2.ERROR_CODE_UNAVAILABLE


async def test_death_of_the_engine_fails_both_legs(pod: RunningPod) -> None:
    pod.gate.shut()
    async with HandoffStream(pod, "t-a") as stream:
        call = start_prefill(pod, engine_request("a", prompt_of(20)))
        await wait_for(lambda: len(pod.context.requests) == 1)
        pod.executor.failure = RuntimeError("the device is gone")
        pod.gate.open()
        assert from_rpc_error(await failure_of(call)).code.label == "unavailable"
        assert (await stream.events())[-1].failed.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert pod.context.admission.num_open == 0


async def test_logits_that_are_not_finite_fail_both_legs_by_name(pod: RunningPod) -> None:
    pod.executor.is_finite = False
    async with HandoffStream(pod, "t-a") as stream:
        error = from_rpc_error(await failure_of(start_prefill(pod, engine_request("a", prompt_of(2 * CHUNK + 5)))))
        assert isinstance(error, NonFiniteError)
        last = (await stream.events())[-1]
    assert last.failed.error.code == ErrorCode.NON_FINITE.value.number
