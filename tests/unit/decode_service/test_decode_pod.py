"""A decode pod alone: colocated serving over real gRPC."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.engine.executor.fake import expected_tokens
from common.pb import common_pb2, pods_pb2
from common.pb.pods_pb2_grpc import PodStub
from common.pod.tasks import TaskSet
from common.rpc.channel import ChannelPool
from common.types import SamplingParams
from decode_service import front
from decode_service.config import DecodeConfig
from decode_service.handoff import HandoffTimeouts
from decode_service.quarantine import Quarantine
from decode_service.request import PodServices
from decode_service.session import RouterSession
from tests.pods import (
    DEADLINE_S,
    SLOW,
    FakeRouter,
    RunningPod,
    StepGate,
    decode_pod,
    engine_request,
    prompt_of,
    wait_for,
)


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    async with decode_pod({}) as running:
        yield running


@pytest.fixture
async def slow_pod() -> AsyncIterator[RunningPod]:
    async with decode_pod({}, executor=SLOW) as running:
        yield running


@pytest.fixture
async def router(pod: RunningPod) -> AsyncIterator[FakeRouter]:
    async with FakeRouter(pod) as connected:
        yield connected


async def test_answers_are_right_for_many_at_once(pod: RunningPod, router: FakeRouter) -> None:
    prompts = {f"r{length}": prompt_of(length) for length in (1, 15, 16, 17, 40, 70)}
    answers = {name: await router.submit(engine_request(name, prompt)) for name, prompt in prompts.items()}
    for name, answer in answers.items():
        await answer.wait_finished()
        assert answer.tokens == expected_tokens(prompts[name], 8)
        assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert answer.report is not None
        assert not answer.report.recompute_reason
    assert pod.metric("baton_pod_request_success_total", finished_reason="length") == len(prompts)


async def test_one_message_carries_a_step_of_all_requests(pod: RunningPod, router: FakeRouter) -> None:
    pod.gate.shut()
    answers = [await router.submit(engine_request(f"r{n}", prompt_of(3, seed=n))) for n in range(4)]
    await wait_for(lambda: len(pod.context.requests) == 4)
    pod.gate.open()
    for answer in answers:
        await answer.wait_finished()
    assert max(len(message.deltas) for message in router.messages) == 4


async def test_logprobs_and_cached_tokens_are_reported(router: FakeRouter) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=3, num_logprobs=1)
    first = await (await router.submit(engine_request("a", prompt_of(40), sampling=sampling))).wait_finished()
    assert len(first.logprobs) == 3
    assert first.logprobs[0].top[0].token_id == first.tokens[0]
    second = await (await router.submit(engine_request("b", prompt_of(40)))).wait_finished()
    assert second.report is not None
    assert second.report.num_cached_tokens == 32


async def test_continues_after_tokens_generated_elsewhere(router: FakeRouter) -> None:
    prompt, tokens = prompt_of(20), expected_tokens(prompt_of(20), 8)
    answer = await router.submit(engine_request("a", prompt, output_token_ids=tokens[:3]))
    answer.tokens += tokens[:3]  # the first delta continues at index 3
    await wait_for(lambda: answer.finish_reason)
    assert answer.tokens == tokens


async def test_block_hashes_of_older_routers_are_ignored(router: FakeRouter) -> None:
    prompt = prompt_of(40)
    packed = engine_request("a", prompt).SerializeToString() + b"\x2a\x10" + b"x" * 16  # field 5, 16 bytes
    answer = await (await router.submit(common_pb2.EngineRequest.FromString(packed))).wait_finished()
    assert answer.tokens == expected_tokens(prompt, 8)
    again = await (await router.submit(engine_request("b", prompt))).wait_finished()
    assert again.report is not None
    assert again.report.num_cached_tokens == 32


@pytest.mark.parametrize(
    ("request_message", "code", "param"),
    [
        (engine_request("a", []), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "prompt_token_ids"),
        (engine_request("a", [1, 512]), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "prompt_token_ids"),
        (engine_request("a", prompt_of(4090)), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "prompt_token_ids"),
    ],
)
async def test_bad_request_ends_with_an_error(
    router: FakeRouter, request_message: common_pb2.EngineRequest, code: int, param: str
) -> None:
    answer = await (await router.submit(request_message)).wait_finished()
    assert answer.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert answer.error is not None
    assert (answer.error.code, answer.error.param) == (code, param)


async def test_duplicate_id_is_refused_and_the_first_goes_on(pod: RunningPod, router: FakeRouter) -> None:
    pod.gate.shut()
    await router.submit(engine_request("a", prompt_of(5)))
    await wait_for(lambda: len(pod.context.requests) == 1)
    await router.submit(engine_request("a", prompt_of(6)))
    answer = await router.answers["a"].wait_finished()
    assert answer.error is not None
    assert answer.error.param == "request_id"
    assert len(pod.context.requests) == 1
    answer.finish_reason = 0
    pod.gate.open()
    await answer.wait_finished()
    assert answer.tokens == expected_tokens(prompt_of(5), 8)


async def test_two_routers_may_choose_the_same_id(pod: RunningPod, router: FakeRouter) -> None:
    async with FakeRouter(pod) as other:
        one = await router.submit(engine_request("a", prompt_of(5)))
        two = await other.submit(engine_request("a", prompt_of(9)))
        assert (await one.wait_finished()).tokens == expected_tokens(prompt_of(5), 8)
        assert (await two.wait_finished()).tokens == expected_tokens(prompt_of(9), 8)


async def test_abort_ends_a_running_request_and_ignores_unknown_ones(slow_pod: RunningPod) -> None:
    async with FakeRouter(slow_pod) as router:
        answer = await router.submit(engine_request("a", prompt_of(5), max_tokens=4000))
        await answer.wait_tokens(2)
        await router.abort("nobody")
        await router.prefill_failed("nobody")
        await router.abort("a")
        assert (await answer.wait_finished()).finish_reason == common_pb2.FINISH_REASON_ABORT
        assert slow_pod.metric("baton_pod_request_success_total", finished_reason="abort") == 1
        await slow_pod.wait_clean()


async def test_overdue_request_ends_with_deadline_exceeded(pod: RunningPod, router: FakeRouter) -> None:
    pod.gate.shut()
    answer = await (await router.submit(engine_request("a", prompt_of(5)), timeout_s=0.05)).wait_finished()
    assert answer.error is not None
    assert answer.error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    assert pod.metric("baton_pod_request_failure_total", code="deadline_exceeded") == 1


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_end_of_session_aborts_its_requests_only(slow_pod: RunningPod, how: str) -> None:
    async with FakeRouter(slow_pod) as router:
        staying = await router.submit(engine_request("stays", prompt_of(5), max_tokens=3000))
        async with FakeRouter(slow_pod) as leaving:
            for n in range(3):
                await (await leaving.submit(engine_request(f"r{n}", prompt_of(5), max_tokens=3000))).wait_tokens(1)
            if how == "half-close":
                await leaving.call.done_writing()
                await leaving.wait_ended()
        await wait_for(lambda: len(slow_pod.context.requests) == 1)
        assert slow_pod.context.admission.num_open == 1
        await router.abort("stays")
        await staying.wait_finished()


async def test_a_half_close_cuts_no_message_short(slow_pod: RunningPod) -> None:
    """gRPC sends no status after a write that was cancelled: the router would wait for one."""
    is_writing, may_write = asyncio.Event(), asyncio.Event()
    written: list[pods_pb2.TokenDelta] = []

    async def commands() -> AsyncIterator[pods_pb2.DecodeCommand]:
        request = engine_request("a", prompt_of(5), max_tokens=3000)
        yield pods_pb2.DecodeCommand(submit=pods_pb2.Submit(request=request))
        await is_writing.wait()

    async def write(events: pods_pb2.DecodeEvents) -> None:
        is_writing.set()
        await may_write.wait()
        written.extend(events.deltas)

    quarantine = Quarantine(1)
    timeouts = HandoffTimeouts(queue_s=DEADLINE_S, connect_s=DEADLINE_S)
    session = RouterSession(
        PodServices(slow_pod.context, DecodeConfig(), ChannelPool(), TaskSet(), quarantine, timeouts)
    )
    running = asyncio.create_task(session.run(commands(), write))
    await wait_for(lambda: is_writing.is_set() and len(session) == 0)
    may_write.set()
    await asyncio.wait_for(running, DEADLINE_S)
    assert written[-1].finish_reason == common_pb2.FINISH_REASON_ABORT


async def test_draining_pod_refuses_new_work_and_finishes_the_old(pod: RunningPod, router: FakeRouter) -> None:
    pod.gate.shut()
    old = await router.submit(engine_request("old", prompt_of(5)))
    await wait_for(lambda: len(pod.context.requests) == 1)
    drained = PodStub(pod.channel).Drain(pods_pb2.DrainRequest(), timeout=DEADLINE_S)
    await wait_for(lambda: pod.context.admission.draining)
    new = await (await router.submit(engine_request("new", prompt_of(5)))).wait_finished()
    assert new.error is not None
    assert new.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert pod.metric("baton_pod_request_failure_total", code="unavailable") == 1
    pod.gate.open()
    assert (await old.wait_finished()).tokens == expected_tokens(prompt_of(5), 8)
    assert (await drained).num_unfinished == 0


async def test_full_pod_refuses(router: FakeRouter, pod: RunningPod) -> None:
    pod.context.admission.max_open = 1
    pod.gate.shut()
    await router.submit(engine_request("a", prompt_of(5)))
    answer = await (await router.submit(engine_request("b", prompt_of(5)))).wait_finished()
    assert answer.error is not None
    assert answer.error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED


async def test_death_of_the_engine_fails_every_request() -> None:
    gate = StepGate(is_open=False)
    async with decode_pod({}, gate=gate) as pod, FakeRouter(pod) as router:
        answer = await router.submit(engine_request("a", prompt_of(5)))
        await wait_for(lambda: len(pod.context.requests) == 1)
        pod.executor.failure = RuntimeError("the device is gone")
        gate.open()
        await answer.wait_finished()
        assert answer.error is not None
        assert answer.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        after = await (await router.submit(engine_request("b", prompt_of(5)))).wait_finished()
        assert after.error is not None
        assert after.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert pod.context.admission.num_open == 0


async def test_each_refusal_is_told_although_the_router_is_slow(pod: RunningPod) -> None:
    written: list[str] = []

    async def commands() -> AsyncIterator[pods_pb2.DecodeCommand]:
        for name in ("a", "b"):
            yield pods_pb2.DecodeCommand(submit=pods_pb2.Submit(request=engine_request(name, [])))

    async def write(events: pods_pb2.DecodeEvents) -> None:
        written.extend(delta.request_id for delta in events.deltas)

    quarantine = Quarantine(1)
    timeouts = HandoffTimeouts(queue_s=DEADLINE_S, connect_s=DEADLINE_S)
    session = RouterSession(PodServices(pod.context, DecodeConfig(), ChannelPool(), TaskSet(), quarantine, timeouts))
    await asyncio.wait_for(session.run(commands(), write), DEADLINE_S)
    assert written == ["a", "b"]


async def test_closing_pod_tells_the_router_what_it_did_not_finish(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "FLUSH_TIMEOUT_S", DEADLINE_S)
    async with decode_pod({}, executor=SLOW) as pod, FakeRouter(pod) as router:
        answer = await router.submit(engine_request("a", prompt_of(5), max_tokens=4000))
        await answer.wait_tokens(1)
        await pod.runtime.stop()
        pod.is_dead = True
        await answer.wait_finished()
        assert answer.error is not None
        assert answer.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        await router.wait_ended()
    assert "did not take their last events" not in caplog.text
