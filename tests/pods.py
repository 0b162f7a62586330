"""Real pods in this process: real gRPC, a real engine on a thread, a model that does not exist.

The fake executors of all pods share one dict as their connector's medium; a store of None stands for a direct
connector. A StepGate holds an engine at a chosen step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import torch

from common.engine.client.threaded import AsyncInprocClient
from common.engine.config import CacheConfig, SchedulerConfig
from common.engine.contract.step import ModelRunnerOutput, NoToken, SchedulerOutput
from common.engine.executor.fake import DirectMemoryConnector, FakeExecutor, MemoryConnector
from common.engine.kv_connector import BlockTransfer, TransferResult
from common.pb import common_pb2, pods_pb2
from common.pb.pods_pb2_grpc import DecodeStub, HandoffStub, PodStub, PrefillStub
from common.pod.context import PodContext
from common.pod.convert import layout_to_pb
from common.pod.runtime import PodRuntime
from common.rpc.channel import open_channel
from common.rpc.convert import sampling_to_pb
from common.types import BlockHash, SamplingParams
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront
from decode_service.handoff import HandoffTimeouts
from prefill_service.config import PrefillConfig
from prefill_service.front import PrefillFront

BLOCK_SIZE = 16
CHUNK = 32  # tokens per step
DEADLINE_S = 60.0  # of everything that is awaited here; far more than it takes

SLOW = {"step_s": 0.01}  # an executor on which an answer of thousands of tokens outlasts every test

Store = dict[BlockHash, torch.Tensor]


class _Recorded:
    """Mixed into connectors: which jobs were started."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loads: list[BlockTransfer] = []
        self.saves: list[BlockTransfer] = []

    def start_load(self, transfer: BlockTransfer) -> None:
        self.loads.append(transfer)
        super().start_load(transfer)  # type: ignore[misc]

    def start_save(self, transfer: BlockTransfer) -> None:
        self.saves.append(transfer)
        super().start_save(transfer)  # type: ignore[misc]


class RecordedConnector(_Recorded, MemoryConnector):
    """A MemoryConnector that knows which jobs were started."""


class RecordedDirectConnector(_Recorded, DirectMemoryConnector):
    """A DirectMemoryConnector that knows which jobs were started."""


class SlowConnector(RecordedDirectConnector):
    """Saves that were started while it is held take place, and settle, when it is let go, cancelled or not."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._is_held = False
        self._held: list[BlockTransfer] = []
        self.cancelled: list[int] = []
        self.corrupt_next = False  # one digest will be wrong

    @property
    def is_writing(self) -> bool:
        return bool(self._held)

    def hold(self) -> None:
        self._is_held = True

    def let_go(self) -> None:
        with self._lock:
            self._is_held = False
            held, self._held = self._held, []
        for transfer in held:
            super().start_save(transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        with self._lock:
            if self._is_held:
                self._held.append(transfer)
                return
        super().start_save(transfer)

    def poll(self) -> list[TransferResult]:
        settled = super().poll()
        if self.corrupt_next and settled and settled[0].digests:
            self.corrupt_next = False
            settled[0] = replace(settled[0], digests=(b"wrong", *settled[0].digests[1:]))
        return settled

    def cancel(self, job_id: int) -> None:
        self.cancelled.append(job_id)


class StepGate:
    """Lets an engine compute, or holds it before its next step that computes."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._condition = threading.Condition()
        self._permits: float = float("inf") if is_open else 0
        self.is_holding = False  # an engine waits in its step

    def open(self) -> None:
        self._give(float("inf"))

    def allow(self, num_steps: int) -> None:
        self._give(num_steps)

    def shut(self) -> None:
        with self._condition:
            self._permits = 0

    def pass_through(self) -> None:
        with self._condition:
            self.is_holding = self._permits == 0
            assert self._condition.wait_for(lambda: self._permits > 0, DEADLINE_S)
            self.is_holding = False
            self._permits -= 1

    def _give(self, permits: float) -> None:
        with self._condition:
            self._permits += permits
            self._condition.notify_all()


class BreakableExecutor(FakeExecutor):
    """A FakeExecutor behind a gate, which can be told to fail."""

    def __init__(self, gate: StepGate, **options: Any) -> None:
        super().__init__(**options)
        self._gate = gate
        self.failure: Exception | None = None
        self.is_finite = True  # False: no logit is

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.num_scheduled_tokens:
            self._gate.pass_through()
        if self.failure is not None:
            raise self.failure
        result = super().execute(step)
        return result if self.is_finite else ModelRunnerOutput(dict.fromkeys(result.outcomes, NoToken.NON_FINITE))


@dataclass
class RunningPod:
    """A started pod and a client's channel to it."""

    runtime: PodRuntime
    executor: BreakableExecutor
    connector: Any
    gate: StepGate
    channel: grpc.aio.Channel
    front: Any
    is_dead: bool = False

    @property
    def address(self) -> str:
        return self.runtime.address

    @property
    def context(self) -> PodContext:
        return self.runtime.context

    def metric(self, name: str, **labels: str) -> float:
        registry = self.context.metrics.registry
        value = registry.get_sample_value(name, labels)
        if value is None:
            of_model = {"model_name": self.context.config.model_name, **labels}
            value = registry.get_sample_value(name, of_model)
        return value or 0.0

    async def occupy(self) -> None:
        """Shut the gate on a step that computes a chunk for somebody else: what comes now waits for its turn."""
        self.gate.shut()
        other = engine_request("other", prompt_of(CHUNK, seed=99), max_tokens=1)
        self.other_work = start_prefill(self, other, transfer=False)
        await wait_for(lambda: self.gate.is_holding)

    async def kill(self) -> None:
        """Its connections break at once, as if the process were gone."""
        self.is_dead = True
        await self.runtime.server.grpc_server.stop(None)

    async def integrity(self) -> pods_pb2.CheckIntegrityResponse:
        return await PodStub(self.channel).CheckIntegrity(pods_pb2.CheckIntegrityRequest(), timeout=DEADLINE_S)

    async def wait_clean(self) -> None:
        """Every request ended, every transfer settled, every block accounted for."""
        if self.is_dead:
            return

        async def is_clean() -> bool:
            report = await self.integrity()
            assert not report.violations
            return report.num_requests == report.num_transfers == report.num_blocks_in_use == 0

        await wait_for(is_clean)
        assert len(self.context.requests) == 0


@asynccontextmanager
async def prefill_pod(
    store: Store | None,
    *,
    gate: StepGate | None = None,
    executor: dict[str, Any] | None = None,
    front: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[RunningPod]:
    """`executor` and `front`: keyword arguments of these; `settings`: those of the pod."""
    config = PrefillConfig(**_settings(settings))
    make_front = partial(PrefillFront, config=config, **(front or {}))
    async with _pod("prefill", config, make_front, store, gate, executor) as pod:
        yield pod


@asynccontextmanager
async def decode_pod(
    store: Store | None,
    *,
    gate: StepGate | None = None,
    executor: dict[str, Any] | None = None,
    front: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[RunningPod]:
    """`executor`, `front` and `runtime`: keyword arguments of these; `settings`: those of the pod."""
    config = DecodeConfig(**_settings(settings))
    timeouts = HandoffTimeouts(queue_s=config.handoff_queue_timeout_s, connect_s=DEADLINE_S)  # or it computes by itself
    make_front = partial(DecodeFront, config=config, **{"timeouts": timeouts, **(front or {})})
    async with _pod("decode", config, make_front, store, gate, executor, runtime) as pod:
        yield pod


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "cache": CacheConfig(block_size=BLOCK_SIZE),
        "scheduler": SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=8),
        **settings,
    }


@asynccontextmanager
async def _pod(
    role: Any,
    config: Any,
    make_front: Any,
    store: Store | None,
    gate: StepGate | None,
    options: dict[str, Any] | None,
    runtime_options: dict[str, Any] | None = None,
) -> AsyncIterator[RunningPod]:
    gate = gate or StepGate()
    connector: Any = RecordedDirectConnector() if store is None else RecordedConnector(store)
    options = {"block_size": BLOCK_SIZE, "connector": connector, **(options or {})}
    executor = BreakableExecutor(gate, **options)
    engine = AsyncInprocClient(config.engine_config(), lambda _: executor)
    fronts: list[Any] = []

    def make_and_keep(context: PodContext) -> Any:
        fronts.append(make_front(context))
        return fronts[0]

    with opened_at_last(gate):
        runtime = PodRuntime(role, config, engine, make_and_keep, **(runtime_options or {}))
        async with runtime, open_channel(runtime.address) as channel:
            pod = RunningPod(runtime, executor, options["connector"], gate, channel, fronts[0])
            yield pod
            gate.open()
            if executor.failure is None:
                await pod.wait_clean()


@contextmanager
def opened_at_last(gate: StepGate) -> Iterator[None]:
    """A test that fails leaves no engine waiting at its gate."""
    try:
        yield
    finally:
        gate.open()


async def wait_for(condition: Callable[[], Any]) -> None:
    """Return once `condition()`, awaited if it is a coroutine, is true."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        met = condition()
        if asyncio.iscoroutine(met):
            met = await met
        if met:
            return
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.005)


async def wait_no_tasks() -> None:
    """All tasks of this loop but the test's own have ended."""
    await wait_for(lambda: not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()])


def engine_request(
    request_id: str, prompt: list[int], *, max_tokens: int = 8, **fields: Any
) -> common_pb2.EngineRequest:
    sampling = fields.pop("sampling", SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return common_pb2.EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=sampling_to_pb(sampling), **fields
    )


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(7 * index + 13 * seed + 1) % 500 for index in range(num_tokens)]


@dataclass
class Answer:
    """What a router has got of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finish_reason: int = 0
    error: common_pb2.Error | None = None
    report: pods_pb2.DecodeReport | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: pods_pb2.TokenDelta) -> None:
        if delta.token_ids:
            assert delta.start_index == len(self.tokens)
            assert delta.HasField("report") == (self.report is None)
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.HasField("report"):
            self.report = delta.report
        if delta.HasField("error"):
            self.error = delta.error
        assert not self.finish_reason
        self.finish_reason = delta.finish_reason
        self.changed.set()

    async def wait_finished(self) -> Answer:
        await self._wait(lambda: bool(self.finish_reason))
        return self

    async def wait_tokens(self, num_tokens: int) -> None:
        await self._wait(lambda: len(self.tokens) >= num_tokens)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class FakeRouter:
    """A session with a decode pod."""

    def __init__(self, pod: RunningPod) -> None:
        self._channel = open_channel(pod.address)
        self.call = DecodeStub(self._channel).Session()
        self._writing = asyncio.Lock()
        self.answers: dict[str, Answer] = {}
        self._reader = asyncio.create_task(self._read())
        self.messages: list[pods_pb2.DecodeEvents] = []

    async def _write(self, command: pods_pb2.DecodeCommand) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self.call.write(command)

    async def submit(
        self,
        request: common_pb2.EngineRequest,
        *,
        prefill_address: str | None = None,
        timeout_s: float = 0.0,
        epoch: int = 1,
        policy: common_pb2.KVFailurePolicy.ValueType = common_pb2.KV_FAILURE_POLICY_UNSPECIFIED,
    ) -> Answer:
        submit = pods_pb2.Submit(request=request, timeout_s=timeout_s, kv_failure_policy=policy)
        if prefill_address is not None:
            submit.remote_prefill.CopyFrom(
                pods_pb2.RemotePrefill(
                    transfer_id=f"t-{request.request_id}", epoch=epoch, prefill_address=prefill_address
                )
            )
        answer = self.answers.setdefault(request.request_id, Answer())
        await self._write(pods_pb2.DecodeCommand(submit=submit))
        return answer

    async def abort(self, request_id: str) -> None:
        await self._write(pods_pb2.DecodeCommand(abort=pods_pb2.AbortCommand(request_id=request_id)))

    async def prefill_failed(
        self,
        request_id: str,
        epoch: int = 1,
        code: common_pb2.ErrorCode.ValueType = common_pb2.ERROR_CODE_UNAVAILABLE,
    ) -> None:
        failed = pods_pb2.PrefillFailed(request_id=request_id, epoch=epoch, reason=code)
        await self._write(pods_pb2.DecodeCommand(prefill_failed=failed))

    async def leave(self) -> None:
        self.call.cancel()
        await self._channel.close(None)
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self._reader

    async def wait_ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({self._reader})

    async def _read(self) -> None:
        async for events in self.call:
            self.messages.append(events)
            for delta in events.deltas:
                self.answers.setdefault(delta.request_id, Answer()).take(delta)

    async def __aenter__(self) -> FakeRouter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()


def start_prefill(
    pod: RunningPod, request: common_pb2.EngineRequest, *, transfer: bool = True, epoch: int = 1
) -> grpc.aio.UnaryUnaryCall[pods_pb2.PrefillRequest, pods_pb2.PrefillResponse]:
    """The router's prefill leg of `request`."""
    transfer_id = f"t-{request.request_id}" if transfer else ""
    return PrefillStub(pod.channel).Prefill(
        pods_pb2.PrefillRequest(request=request, transfer_id=transfer_id, epoch=epoch), timeout=DEADLINE_S
    )


class HandoffStream:
    """A decode pod's end of a handoff stream, by hand."""

    def __init__(self, pod: RunningPod, transfer_id: str, *, epoch: int = 1, **start: Any) -> None:
        fields = {
            "fingerprint": pod.context.spec.fingerprint,
            "connector": pod.context.config.connector,
            "decode_pod_id": "decode-test",
            "connector_address": pod.context.spec.connector_addresses[0],  # its own, but for tests that have another
            "layout": layout_to_pb(pod.context.spec.layout),
            **start,
        }
        self._start = pods_pb2.HandoffStart(transfer_id=transfer_id, epoch=epoch, **fields)
        self.call = HandoffStub(pod.channel).Open(timeout=DEADLINE_S)

    async def __aenter__(self) -> HandoffStream:
        await self.call.write(pods_pb2.HandoffCommand(start=self._start))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()

    async def event(self) -> pods_pb2.HandoffEvent | None:
        event = await self.call.read()
        return event if isinstance(event, pods_pb2.HandoffEvent) else None

    async def events(self) -> list[pods_pb2.HandoffEvent]:
        """All that are left; hangs up after the last, as a decode pod does."""
        rest = []
        while (event := await self.event()) is not None:
            rest.append(event)
            if event.HasField("delivered") or event.HasField("failed"):
                await self.call.done_writing()
        return rest

    async def reserve(self, block_ids: list[int], num_held_tokens: int = 0) -> None:
        reserved = pods_pb2.HandoffReserved(num_held_tokens=num_held_tokens, block_ids=block_ids)
        await self.call.write(pods_pb2.HandoffCommand(reserved=reserved))

    async def cancel(self, reason: str = "test") -> None:
        await self.call.write(pods_pb2.HandoffCommand(cancel=pods_pb2.HandoffCancel(reason=reason)))


def kinds(events: list[pods_pb2.HandoffEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]
