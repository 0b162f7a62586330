"""Whatever pods are told over gRPC: they answer or refuse, nothing is left of it, and good requests are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.executor.fake import expected_tokens
from common.pb import common_pb2, pods_pb2
from common.pb.pods_pb2_grpc import DecodeStub, HandoffStub, PodStub, PrefillStub
from common.pod.convert import layout_to_pb
from decode_service.handoff import HandoffTimeouts
from tests.fuzz.budget import Budget
from tests.fuzz.host import DEADLINE_S, Footprint, Host, hosted, profile, sizes
from tests.fuzz.pod_strategies import METHODS, Facts, Step, steps
from tests.fuzz.proto_strategies import bytes_of
from tests.pods import FakeRouter, RunningPod, decode_pod, engine_request, prefill_pod, prompt_of, start_prefill

SHORT_S = 0.05  # what a pod waits for the other side of a handoff: often in vain here
NUM_TOKENS = 6
_STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,  # a decode pod that does not fit
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # nobody came for the transfer
}
_MET_THE_END = "Internal error from Core"  # the caller's own gRPC says so where a write meets the end of the call
_SPEAKING = {"Decode.Session", "Handoff.Open"}  # the caller says more than one thing
_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the call has: its status tells why
_STUBS: dict[str, Any] = {"Prefill": PrefillStub, "Decode": DecodeStub, "Handoff": HandoffStub, "Pod": PodStub}


@dataclass
class Pods:
    """One of each role, over one connector."""

    prefill: RunningPod
    decode: RunningPod
    num_good: int = 0

    @property
    def facts(self) -> Facts:
        spec = self.prefill.context.spec
        connector = self.prefill.context.config.connector or ""
        return Facts(self.prefill.address, spec.fingerprint, connector, layout_to_pb(spec.layout))

    def channel(self, method: str) -> grpc.aio.Channel:
        return (self.decode if method == "Decode.Session" else self.prefill).channel

    def start(self, method: str) -> Any:
        service, _, name = method.partition(".")
        return getattr(_STUBS[service](self.channel(method)), name)


@asynccontextmanager
async def running_pods(*, is_direct: bool) -> AsyncIterator[Pods]:
    store = None if is_direct else {}
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            prefill_pod(store, transfer_lease_s=SHORT_S, handoff_quarantine_s=SHORT_S)
        )
        timeouts = HandoffTimeouts(queue_s=SHORT_S, connect_s=SHORT_S, stall_s=SHORT_S)
        decode = await stack.enter_async_context(decode_pod(store, front={"timeouts": timeouts}))
        yield Pods(prefill, decode)


@pytest.fixture(scope="module", params=[False, True], ids=["store", "direct"])
def host(request) -> Iterator[Host[Pods]]:
    with hosted(lambda: running_pods(is_direct=request.param)) as host:
        yield host


def budget(host: Host[Pods]) -> Budget:
    """Of what is sent to the pods; a neighbour asks both who they are meanwhile."""

    async def ask() -> None:
        for pod in (host.value.prefill, host.value.decode):
            await PodStub(pod.channel).GetInfo(pods_pb2.GetInfoRequest(), timeout=DEADLINE_S)

    return Budget(host, ask)


@sizes(40, 3_000)
def test_no_sequence_of_calls_harms_a_pod(host, num_examples):
    pods = host.value
    host.run(check_served(pods))
    footprint = Footprint(host)

    @profile(num_examples)
    @given(st.lists(steps(pods.facts), min_size=1, max_size=5))
    def holds(sequence: list[Step]) -> None:
        with budget(host):
            host.run(run_all(pods, sequence))
        host.run(check_clean(pods))
        host.run(check_served(pods))

    holds()
    footprint.check()


@sizes(40, 5_000)
def test_any_bytes_are_answered_or_refused(host, num_examples):
    pods = host.value
    host.run(check_served(pods))
    footprint = Footprint(host)

    @profile(num_examples)
    @given(st.sampled_from(METHODS), st.data())
    def holds(method: str, data: st.DataObject) -> None:
        good = steps(pods.facts, method).map(lambda step: step.sent[0] if step.sent else pods_pb2.GetInfoRequest())
        sent = data.draw(bytes_of(good))
        with budget(host):
            host.run(check_raw(pods, method, sent))

    holds()
    host.run(check_clean(pods))
    host.run(check_served(pods))
    footprint.check()


async def check_raw(pods: Pods, method: str, sent: bytes) -> None:
    """Bytes that are no message are refused in gRPC's own words; the pod goes on."""
    call = pods.channel(method).stream_stream(f"/baton.v1.{method.replace('.', '/')}")(timeout=DEADLINE_S)
    with suppress(*_ENDED):
        await call.write(sent)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF and method != "Pod.WatchStats":  # which never ends
            pass
    call.cancel()
    code, details = await call.code(), await call.details()
    assert code in _STATUSES or details == _MET_THE_END, (method, code, details)


async def run_all(pods: Pods, sequence: list[Step]) -> None:
    """At once; each begins a little later than the one before."""
    async with asyncio.TaskGroup() as group:
        for step in sequence:
            group.create_task(run_step(pods, step))
            await asyncio.sleep(0)


async def run_step(pods: Pods, step: Step) -> None:
    """The call ends, and with no fault of the pod's."""
    method = pods.start(step.method)
    if step.method in _SPEAKING:
        call = method(timeout=DEADLINE_S)
    else:
        call = method(step.sent[0], timeout=DEADLINE_S)
    listener = Listener(call)
    async with asyncio.TaskGroup() as group:
        group.create_task(listener.listen())
        if step.method in _SPEAKING:
            await speak(call, step)
        await let_turn(step.num_turns)
        await listener.wait(min(step.num_answers, step.num_sure_answers))
        if step.is_cancelled:
            call.cancel()
        elif step.method in _SPEAKING:
            with suppress(*_ENDED):
                await call.done_writing()
    code, details = await call.code(), await call.details()
    assert code in _STATUSES or (step.method in _SPEAKING and details == _MET_THE_END), (step.method, code, details)
    assert "\n" not in (details or ""), details


async def speak(call: Any, step: Step) -> None:
    """Say all of it, or as much as is listened to."""
    with suppress(*_ENDED):
        for message in step.sent:
            await let_turn(step.num_turns)
            await call.write(message)


async def let_turn(num_turns: int) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


class Listener:
    """Takes what a call brings, whatever that is, until its end."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._changed = asyncio.Condition()
        self._num_answers = 0
        self._has_ended = False

    async def listen(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):  # of the call, whose status is looked at
            if hasattr(self._call, "read"):
                async for message in self._call:
                    await self._note(check_event(message))
            else:
                await self._call
        self._has_ended = True
        await self._note(0)

    async def wait(self, num_answers: int) -> None:
        """Until there are so many, or no more will come."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_ended or self._num_answers >= num_answers)

    async def _note(self, num_answers: int) -> None:
        async with self._changed:
            self._num_answers += num_answers
            self._changed.notify_all()


def check_event(message: Any) -> int:
    """No answer in it tells of a fault of the pod's; how many there are."""
    if not isinstance(message, pods_pb2.DecodeEvents):
        return 1
    for delta in message.deltas:
        check_error(delta.error)
    return len(message.deltas)


def check_error(error: common_pb2.Error) -> None:
    assert error.code != common_pb2.ERROR_CODE_INTERNAL, error
    assert "\n" not in error.message, error


async def check_clean(pods: Pods) -> None:
    """Nothing of any call is left, and each engine lives."""
    for pod in (pods.prefill, pods.decode):
        await pod.wait_clean()


async def check_served(pods: Pods) -> None:
    """A request gets the right tokens, wherever its prompt is computed."""
    pods.num_good += 1
    prompt = prompt_of(40, seed=1000 + pods.num_good)
    expected = expected_tokens(prompt, NUM_TOKENS)
    request = engine_request(f"good-{pods.num_good}", prompt, max_tokens=NUM_TOKENS)
    first = await start_prefill(pods.prefill, request, transfer=False)
    assert first.first_token_id == expected[0]
    async with FakeRouter(pods.decode) as router:
        handed_over = start_prefill(pods.prefill, request)
        answer = await router.submit(request, prefill_address=pods.prefill.address)
        await answer.wait_finished()
        assert answer.tokens == expected
        handed_over.cancel()  # if it has not ended: the decode pod had it too late
    await check_clean(pods)
