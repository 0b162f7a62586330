"""A prefill pod, a decode pod and a router in one thread: what is between gRPC and the model runs as in a real pod.

Real: servicers, sessions, handoffs, transfers, quarantine, schedulers. Simulated, so that a test decides everything:

- time: `VirtualLoop` stands still until it is told to go on, and then runs each timer at its moment;
- the network: a `Wire` is one call; its messages take as long as the test says, and it breaks when the test says, which
  either end notices in its own time;
- engines: a step happens when the test says; see `FakeEngine`, which notices KV that is not what it should be;
- the transport: writes into the decode pod's blocks land one by one, late, damaged, or after their sender has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from common.engine.config import CacheConfig, SchedulerConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.executor.fake import ONE_GROUP
from common.engine.kv_connector import BlockTransfer, TransferResult
from common.engine.messages import (
    EngineCoreOutputs,
    EngineSpec,
    RequestOutput,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.engine.speculation.base import Proposer
from common.errors import EngineDeadError, UnavailableError
from common.pb import common_pb2, pods_pb2
from common.pod.adapters import PodAdapters
from common.pod.admission import Admission
from common.pod.cache_view import CacheView
from common.pod.context import PodContext
from common.pod.convert import layout_to_pb
from common.pod.metrics import PodMetrics
from common.pod.outputs import EngineRequests
from common.pod.stats import StatsBoard
from common.pod.tasks import TaskSet
from common.rpc.convert import finish_reason_to_pb, sampling_to_pb
from common.types import FinishReason, RequestId, SamplingParams
from decode_service.config import DecodeConfig
from decode_service.handoff import HandoffTimeouts
from decode_service.quarantine import Quarantine
from decode_service.request import PodServices
from decode_service.session import RouterSession
from prefill_service.config import PrefillConfig
from prefill_service.front import PrefillFront
from tests.unit.common.engine.scheduler_factories import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    FakeEngine,
    Step,
    create_scheduler,
    valid_contents,
)

T = TypeVar("T")

MAX_MODEL_LEN = 24
LEASE_S = 30.0
QUARANTINE_S = 60.0
NOTICE_S = 15.0  # after which either end of a broken call has noticed
TRANSFER_TIMEOUT_S = 20.0  # of the connector; what it writes later it has called back
GARBAGE = [-9] * BLOCK_SIZE
ROOT = logging.getLogger()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self.errors: list[str] = []
        self.set_exception_handler(lambda _, context: self.errors.append(str(context)))

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def do(self, action: Callable[[], T]) -> T:
        """`action()`, inside the loop, and all that follows from it now."""

        async def act() -> T:
            return action()

        task = self.create_task(act())
        self.run_until_idle()
        return task.result()

    def run_until_idle(self) -> None:
        """Run what can run without waiting for a timer."""
        while True:
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready and not self._is_due(self._now):  # type: ignore[attr-defined]
                return

    def advance(self, seconds: float) -> None:
        """Let time pass, timer by timer."""
        end = self._now + seconds
        while self._is_due(end):
            self._now = max(self._now, self._timers[0].when())
            self.run_until_idle()
        self._now = end
        self.run_until_idle()

    @property
    def _timers(self) -> list[asyncio.TimerHandle]:
        """The next one first."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return timers

    def _is_due(self, moment: float) -> bool:
        return bool(self._timers) and self._timers[0].when() <= moment


# -- the network -------------------------------------------------------------------------------------------------------


class Pipe:
    """One direction of a call."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._in_transit: deque[object] = deque()
        self._arrives_at = 0.0
        self._arrived: asyncio.Queue[object] = asyncio.Queue()
        self.is_cut = False

    def send(self, message: object) -> None:
        loop = asyncio.get_running_loop()
        self._arrives_at = max(self._arrives_at, loop.time() + self._network.latency_s)
        self._in_transit.append(message)
        loop.call_at(self._arrives_at, self._arrive)

    async def receive(self) -> object:
        return await self._arrived.get()

    def put_last(self, message: object) -> None:
        """What the receiving end finds out by itself. Nothing that was sent arrives after it."""
        self.is_cut = True
        self._arrived.put_nowait(message)

    def _arrive(self) -> None:
        message = self._in_transit.popleft()
        if not self.is_cut:
            self._arrived.put_nowait(message)


@dataclass(frozen=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


LOST = Status(grpc.StatusCode.UNAVAILABLE, "connection lost")
GONE = object()  # the other end will send no more


class Wire:
    """One call: what the client sees of it (`read`, `write`, ...), and its ServicerContext."""

    def __init__(self, network: Network, serve: Callable[[AsyncIterator[Any], Wire], Coroutine[Any, Any, Any]]) -> None:
        self._up, self._down = Pipe(network), Pipe(network)
        self._network = network
        self._status: Status | None = None  # as the client knows it
        self._aborted = Status()
        self._task = asyncio.ensure_future(serve(self._commands(), self))
        self._task.add_done_callback(self._note_served)
        network.wires.append(self)

    # -- client

    async def read(self) -> object:
        if self._status is None:
            message = await self._down.receive()
            if not isinstance(message, Status):
                return message
            self._status = message
        if self._status.code is not grpc.StatusCode.OK:
            raise rpc_error(self._status)
        return grpc.aio.EOF

    async def write(self, message: object) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("the call has ended")
        self._up.send(message)

    async def done_writing(self) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("the call has ended")
        self._up.send(GONE)

    def done(self) -> bool:
        return self._status is not None

    def cancel(self) -> bool:
        if self._status is None:
            self._status = Status(grpc.StatusCode.CANCELLED)
            is_lost = self._down.is_cut
            self._down.put_last(self._status)
            if not is_lost:
                asyncio.get_running_loop().call_later(self._network.latency_s, self._task.cancel)
        return True

    # -- server

    async def context_write(self, message: object) -> None:
        self._down.send(message)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._aborted = Status(code, details, metadata)
        raise grpc.aio.AbortError

    async def _commands(self) -> AsyncIterator[Any]:
        while (command := await self._up.receive()) is not GONE:
            yield command

    def _note_served(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._down.send(LOST)
        elif (error := task.exception()) is None:
            if (answer := task.result()) is not None:
                self._down.send(answer)
            self._down.send(Status())
        else:
            assert isinstance(error, grpc.aio.AbortError), error
            self._down.send(self._aborted)

    # -- the network

    @property
    def is_over(self) -> bool:
        return self._task.done() and self._status is not None

    def lose(self, client_notices_s: float, server_notices_s: float) -> None:
        """Nothing sent arrives any more; each end learns of it after so many seconds."""
        loop = asyncio.get_running_loop()
        self._up.is_cut = self._down.is_cut = True
        loop.call_later(client_notices_s, self._down.put_last, LOST)
        loop.call_later(server_notices_s, self._task.cancel)


class _ServerContext:
    def __init__(self, wire: Wire) -> None:
        self.write = wire.context_write
        self.abort = wire.abort


def rpc_error(status: Status) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(status.code, nothing, grpc.aio.Metadata(*status.metadata), status.details)


class Network:
    """All calls between the pods, and the ChannelPool of the decode pod."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.wires: list[Wire] = []
        self.prefill: PrefillPod

    @contextlib.asynccontextmanager
    async def channel(self, address: str, connect_timeout_s: float) -> AsyncIterator[Network]:
        """See ChannelPool."""
        await asyncio.sleep(self.latency_s)
        if address != self.prefill.address:
            raise UnavailableError("connection refused")
        yield self

    def stream_stream(self, method: str, **_: object) -> Callable[[None], Wire]:
        """See grpc.aio.Channel."""
        assert method == "/baton.v1.Handoff/Open"
        return lambda _: self.prefill.open_handoff()

    @property
    def open_wires(self) -> list[Wire]:
        self.wires = [wire for wire in self.wires if not wire.is_over]
        return self.wires


# -- engines -----------------------------------------------------------------------------------------------------------


class SimulatedEngine(FakeEngine):
    """FakeEngine as the engine of a pod, always in the middle of a step: `step` ends one and begins the next. Transfers
    hear of commands at once, the scheduler at the end of the step."""

    def __init__(
        self,
        num_ranks: int = 1,
        *,
        num_blocks: int,
        groups: Sequence[KVGroupSpec] = ONE_GROUP,
        proposer: Proposer | None = None,
        **settings: Any,
    ) -> None:
        """`num_blocks` of each group."""
        self.groups = tuple(groups)
        settings |= {"num_blocks": 1 + (num_blocks - 1) * len(groups), "groups": groups}
        scheduler = create_scheduler(max_model_len=MAX_MODEL_LEN, is_direct=True, **settings)
        super().__init__(scheduler, proposer=proposer, num_ranks=num_ranks)
        self.on_save: Callable[[BlockTransfer], None] = lambda _: None
        self._said: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self.begin_step()

    async def take_outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while (outputs := await self._said.get()) is not None:
            yield outputs
        raise EngineDeadError("killed")

    def kill(self) -> None:
        self._said.put_nowait(None)

    def step(self) -> Step:
        step = self.end_step()
        self._said.put_nowait(EngineCoreOutputs(outputs=[], stats=self.scheduler.stats()))
        self.begin_step()
        return step

    def run(self, max_steps: int = 1000) -> int:
        num_steps = super().run(max_steps)
        self.step()  # to the end of the one that was under way
        return num_steps

    def start_save(self, transfer: BlockTransfer) -> None:
        super().start_save(transfer)
        self.on_save(transfer)

    @property
    def is_idle(self) -> bool:
        return not (self._deferred or self.jobs or self.scheduler.has_unfinished or self.scheduler.has_work)

    def _collect(self, outputs: list[RequestOutput]) -> None:
        super()._collect(outputs)
        if outputs:
            self._said.put_nowait(EngineCoreOutputs(outputs=outputs))


class _Client:
    """The EngineClient face of a SimulatedEngine."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self.outputs = engine.take_outputs
        self.add_request = engine.add
        self.update_transfer = self.set_transfer_target = self.quiesce_transfer = self._tell

    def abort_requests(self, request_ids: Sequence[RequestId]) -> None:
        self._engine.abort(*request_ids)

    def _tell(self, command: TransferUpdate | TransferTarget | TransferQuiesced) -> None:
        if isinstance(command, TransferQuiesced):
            self._engine.quiesce(command.request_id, epoch=command.epoch)
        else:
            self._engine.tell(command)


# -- pods --------------------------------------------------------------------------------------------------------------


class Pod:
    """What both have: an engine, a context, and tasks that end with it."""

    def __init__(self, role: Any, config: Any, engine: SimulatedEngine, incarnation: int) -> None:
        self.engine = engine
        self.incarnation = incarnation
        self.address = f"{role}-{incarnation}"  # also that of its connector
        scheduler = engine.scheduler
        spec = EngineSpec(
            fingerprint=bytes(32),
            layout=KVLayout(BLOCK_SIZE, engine.groups),
            num_blocks=scheduler.stats().num_blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            device="cpu",
            dtype="float32",
            bytes_per_block=64,
            is_direct=True,
            connector_addresses=(engine.of_all_ranks(self.address.encode()),),
        )
        stats, cache = StatsBoard(scheduler.stats()), CacheView()
        client: Any = _Client(engine)
        self.context = PodContext(
            role=role,
            config=config,
            incarnation=incarnation,
            spec=spec,
            engine=client,
            requests=EngineRequests(client, stats, cache),
            stats=stats,
            caches=(cache,),
            admission=Admission(config.max_open),
            adapters=PodAdapters(client, config.lora_grace_s, stats.touch),
            metrics=PodMetrics(stats, spec, config),
        )
        self.tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(self._hear())]

    async def _hear(self) -> None:
        with contextlib.suppress(EngineDeadError):
            await self.context.requests.run()

    def assert_sound(self) -> None:
        self.engine.assert_sound()

    def end(self) -> None:
        """Ends its tasks, as the end of the process does."""
        for task in self.tasks:
            task.cancel()


@dataclass(eq=False)
class Write:
    """One block on its way."""

    job_id: int
    address: bytes  # of the decode pod
    source: int
    target: int
    content: list[int]  # when it started
    started_at: float
    is_orphan: bool = False  # its sender died
    has_landed: bool = False


class PrefillPod(Pod):
    """With a connector whose writes the test lets land."""

    def __init__(
        self, network: Network, incarnation: int, *, chunk: int, groups: Sequence[KVGroupSpec], num_ranks: int
    ) -> None:
        config = PrefillConfig(
            pod_id="prefill", connector="direct", transfer_lease_s=LEASE_S, cache=CacheConfig(block_size=BLOCK_SIZE)
        )
        engine = SimulatedEngine(num_ranks, num_blocks=25, max_num_batched_tokens=chunk, groups=groups)
        engine.on_save = self._start_writes
        super().__init__("prefill", config, engine, incarnation)
        self.front = PrefillFront(self.context, config)
        self._network = network
        self.writes: list[Write] = []

    @property
    def pending(self) -> list[Write]:
        return [write for write in self.writes if not write.has_landed]

    def open_handoff(self) -> Wire:
        servicer: Any = self.front._handoff
        return self._serve(lambda commands, wire: servicer.Open(commands, _ServerContext(wire)))

    def prefill(self, request: pods_pb2.PrefillRequest) -> Wire:
        servicer: Any = self.front._prefill
        return self._serve(lambda _, wire: servicer.Prefill(request, _ServerContext(wire)))

    def _serve(self, serve: Callable[[AsyncIterator[Any], Wire], Coroutine[Any, Any, Any]]) -> Wire:
        wire = Wire(self._network, serve)
        self.tasks.append(wire._task)
        return wire

    def _start_writes(self, save: BlockTransfer) -> None:
        assert save.destination is not None
        now = asyncio.get_running_loop().time()
        for source, target in zip(save.block_ids, save.destination.block_ids, strict=True):
            address, content = save.destination.address, self.engine.block(source)
            self.writes.append(Write(save.job_id, address, source, target, content, now))

    def settle(self, job_id: int, *, only_landed: bool, land: Callable[[Write], None]) -> None:
        """The job ends: all its writes have landed, or the transport has called back what has not."""
        writes = [write for write in self.writes if write.job_id == job_id]
        if not only_landed:
            for write in writes:
                if not write.has_landed:
                    land(write)
        _, save = self.engine.jobs[job_id]
        num_ok = [*(write.has_landed for write in writes), False].index(False)
        contents = valid_contents(save, [write.content for write in writes])
        digests = tuple(self.engine.digest_of(content) for content in contents[:num_ok])
        error = "" if num_ok == len(writes) else "transfer_timeout"
        self.writes = [write for write in self.writes if write not in writes]
        self.engine.settle_as(TransferResult(job_id, num_ok, error, digests))


class DecodePod(Pod):
    """With one router's session."""

    def __init__(self, network: Network, incarnation: int, router: Router, **settings: Any) -> None:
        config = DecodeConfig(
            pod_id="decode",
            connector="direct",
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(),
        )
        super().__init__("decode", config, SimulatedEngine(**settings), incarnation)
        peers: Any = network
        max_blocks = max(1, self.context.spec.num_blocks // 2)
        self.services = PodServices(
            pod=self.context,
            config=config,
            peers=peers,
            handoffs=TaskSet(),
            quarantine=Quarantine(max_blocks),
            timeouts=HandoffTimeouts(queue_s=config.handoff_queue_timeout_s),
        )
        self.session = RouterSession(self.services)
        self.commands = Pipe(network)
        self.deltas = Pipe(network)
        self._write_failed = False
        self.tasks.append(asyncio.ensure_future(self._run_session()))
        self.tasks.append(asyncio.ensure_future(router.read(self)))

    async def _run_session(self) -> None:
        async def read() -> AsyncIterator[Any]:
            while True:
                yield await self.commands.receive()

        async def write(events: pods_pb2.DecodeEvents) -> None:
            self.deltas.send(events)

        await self.session.run(read(), write)

    @property
    def windowed(self) -> list[int]:
        return [block.block_id for block in self.engine.scheduler.port.writable_blocks]

    def end(self) -> None:
        super().end()
        self.services.quarantine.close()
        for task in self.services.handoffs._tasks:
            task.cancel()


# -- the router --------------------------------------------------------------------------------------------------------


class Answer:
    """One request, as its client and its router see it."""

    def __init__(self, message: common_pb2.EngineRequest, *, may_recompute: bool) -> None:
        self.message = message
        self.may_recompute = may_recompute
        self.epoch = 0
        self.tokens: list[int] = []
        self.finish_reason = 0
        self.error: common_pb2.Error | None = None
        self.report: pods_pb2.DecodeReport | None = None  # of the attempt that answered
        self.is_aborted = False
        self.leg: Wire | None = None  # the prefill leg of the present attempt

    def take(self, start_index: int, tokens: Sequence[int]) -> None:
        """Tokens come from two legs and may be said twice, but never differ."""
        assert start_index <= len(self.tokens), "tokens are missing"
        for index, token in enumerate(tokens, start_index):
            if index < len(self.tokens):
                assert self.tokens[index] == token, "the legs disagree"
            else:
                self.tokens.append(token)


class Router:
    """Sends each request on two legs, and again when its decode pod is lost."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.answers: dict[str, Answer] = {}
        self.decode: DecodePod
        self.failures: list[str] = []
        self.tasks = TaskSet()

    def submit(self, message: common_pb2.EngineRequest, *, may_recompute: bool = True, remote: bool = True) -> None:
        answer = self.answers[message.request_id] = Answer(message, may_recompute=may_recompute)
        self._dispatch(answer, remote=remote)

    def dispatch_again(self) -> None:
        """The decode pod is another one."""
        for answer in self.unfinished:
            if len(answer.tokens) == answer.message.sampling.max_tokens:
                answer.finish_reason = finish_reason_to_pb(FinishReason.LENGTH)
                continue
            self._dispatch(answer, remote=answer.leg is not None)

    @property
    def unfinished(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if not answer.finish_reason]

    def abort(self, answer: Answer, *, with_leg: bool) -> None:
        answer.is_aborted = True
        command = pods_pb2.AbortCommand(request_id=answer.message.request_id)
        self.decode.commands.send(pods_pb2.DecodeCommand(abort=command))
        if with_leg and answer.leg is not None:
            answer.leg.cancel()

    def _dispatch(self, answer: Answer, *, remote: bool) -> None:
        answer.epoch += 1
        request = common_pb2.EngineRequest()
        request.CopyFrom(answer.message)
        request.output_token_ids.extend(answer.tokens)
        submit = pods_pb2.Submit(request=request)
        if not answer.may_recompute:
            submit.kv_failure_policy = common_pb2.KV_FAILURE_POLICY_FAIL
        if remote:
            prefill = self._network.prefill
            transfer_id = f"t-{request.request_id}"
            submit.remote_prefill.CopyFrom(
                pods_pb2.RemotePrefill(
                    transfer_id=transfer_id, epoch=answer.epoch, prefill_address=self._network.prefill.address
                )
            )
            leg = pods_pb2.PrefillRequest(request=request, transfer_id=transfer_id, epoch=answer.epoch)
            self.start_leg(answer, prefill, leg)
        self.decode.commands.send(pods_pb2.DecodeCommand(submit=submit))

    def start_leg(self, answer: Answer, prefill: PrefillPod, request: pods_pb2.PrefillRequest) -> None:
        answer.leg = prefill.prefill(request)
        self.tasks.spawn(self._await_leg(answer, answer.leg, request), f"leg {request.transfer_id}")

    def repeat_leg(self, prefill: PrefillPod, request: pods_pb2.PrefillRequest) -> None:
        """Ask again, and take no interest in the answer."""
        self.tasks.spawn(_read_to_end(prefill.prefill(request)), f"another leg {request.transfer_id}")

    async def _await_leg(self, answer: Answer, leg: Wire, request: pods_pb2.PrefillRequest) -> None:
        try:
            response = await leg.read()
            await leg.read()
        except grpc.aio.AioRpcError as error:
            failed = pods_pb2.PrefillFailed(
                request_id=answer.message.request_id, epoch=request.epoch, reason=common_pb2.ERROR_CODE_UNAVAILABLE
            )
            if error.code() is not grpc.StatusCode.CANCELLED:
                self.decode.commands.send(pods_pb2.DecodeCommand(prefill_failed=failed))
        else:
            assert isinstance(response, pods_pb2.PrefillResponse)
            answer.take(len(request.request.output_token_ids), [response.first_token_id])

    async def read(self, decode: DecodePod) -> None:
        """What a decode pod says, as long as it is ours."""
        while True:
            events = await decode.deltas.receive()
            assert isinstance(events, pods_pb2.DecodeEvents)
            for delta in events.deltas:
                self._take(delta)

    def _take(self, delta: pods_pb2.TokenDelta) -> None:
        answer = self.answers[delta.request_id]
        assert not answer.finish_reason
        if delta.token_ids:
            answer.take(delta.start_index, delta.token_ids)
        if delta.HasField("report"):
            answer.report = delta.report
        answer.finish_reason = delta.finish_reason
        if delta.HasField("error"):
            answer.error = delta.error
        if delta.finish_reason and answer.leg is not None:
            answer.leg.cancel()


async def _read_to_end(wire: Wire) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await wire.read() is not grpc.aio.EOF:
            pass


def engine_request(name: str, prompt: list[int], max_tokens: int) -> common_pb2.EngineRequest:
    """What the router sends of a request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return common_pb2.EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling_to_pb(sampling))


# -- all of it ---------------------------------------------------------------------------------------------------------


class Simulation:
    """Both pods, the router, the network and the transport."""

    def __init__(self, *, chunk: int, decode_settings: dict[str, Any], num_ranks: int = 1) -> None:
        self.loop = VirtualLoop()
        self._chunk, self._num_ranks = chunk, num_ranks
        self._decode_settings = {"num_ranks": num_ranks, **decode_settings}
        self._groups = decode_settings.get("groups", ONE_GROUP)
        self.network = Network()
        self.router = Router(self.network)
        self.orphans: list[Write] = []
        self.log = _ErrorLog()
        ROOT.addHandler(self.log)
        self._incarnations = 0
        self.loop.do(self._start_prefill)
        self.loop.do(self._start_decode)

    @property
    def prefill(self) -> PrefillPod:
        return self.network.prefill

    @property
    def decode(self) -> DecodePod:
        return self.router.decode

    def _start_prefill(self) -> None:
        self._incarnations += 1
        self.network.prefill = PrefillPod(
            self.network, self._incarnations, chunk=self._chunk, groups=self._groups, num_ranks=self._num_ranks
        )

    def _start_decode(self) -> None:
        self._incarnations += 1
        self.router.decode = DecodePod(self.network, self._incarnations, self.router, **self._decode_settings)

    # -- what happens

    def step_prefill(self) -> None:
        self.loop.do(self.prefill.engine.step)

    def step_decode(self) -> None:
        self.loop.do(self.decode.engine.step)

    @property
    def pending(self) -> list[Write]:
        """Writes that may still land in the present decode pod."""
        writes = [*self.prefill.pending, *self.orphans]
        return [write for write in writes if write.address == self.decode.address.encode()]

    def land(self, write: Write, *, damaged: bool = False) -> None:
        if write.address == self.decode.address.encode():
            self.decode.engine.write_block(write.target, GARBAGE if damaged or write.is_orphan else write.content)
        write.has_landed = True
        if write.is_orphan:
            self.orphans.remove(write)

    def settle_saves(self, *, only_landed: bool = False, older_than: float = float("inf")) -> None:
        for job_id in list(self.prefill.engine.jobs):
            started_at = next(write.started_at for write in self.prefill.writes if write.job_id == job_id)
            if started_at <= older_than:
                settle = partial(self.prefill.settle, job_id, only_landed=only_landed, land=self.land)
                self.loop.do(settle)

    def settle_loads(self) -> None:
        self.loop.do(self.decode.engine.settle_all)

    def advance(self, seconds: float) -> None:
        """Time passes. The transport ends what has taken too long."""
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            self.loop.advance(min(5.0, end - self.loop.time()))
            overdue = self.loop.time() - TRANSFER_TIMEOUT_S + 5.0
            self.settle_saves(only_landed=True, older_than=overdue)
            self.orphans = [write for write in self.orphans if write.started_at > overdue]

    def intrude(self, transfer_id: str, epoch: int) -> None:
        """A decode pod of which nobody has told us asks for a transfer."""
        spec = self.decode.context.spec
        start = pods_pb2.HandoffStart(
            transfer_id=transfer_id,
            epoch=epoch,
            fingerprint=spec.fingerprint,
            connector="direct",
            decode_pod_id="intruder",
            connector_address=b"intruder",
            layout=layout_to_pb(spec.layout),
        )
        self.router.tasks.spawn(self._intrude(start), f"intruder {transfer_id}")

    async def _intrude(self, start: pods_pb2.HandoffStart) -> None:
        wire = self.prefill.open_handoff()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await wire.write(pods_pb2.HandoffCommand(start=start))
            if isinstance(await wire.read(), pods_pb2.HandoffEvent):
                reserved = pods_pb2.HandoffReserved(block_ids=[1, 2, 3])
                await wire.write(pods_pb2.HandoffCommand(reserved=reserved))
            await _read_to_end(wire)

    def crash_prefill(self, client_notices_s: float) -> None:
        """A new incarnation takes its place. Its writes under way may still land, as whatever they are by then."""
        old = self.prefill
        for write in old.pending:
            write.is_orphan = True
            self.orphans.append(write)

        def crash() -> None:
            for wire in self.network.open_wires:
                if wire._task in old.tasks:
                    wire.lose(client_notices_s, 0.0)
            old.end()
            self._start_prefill()

        self.loop.do(crash)

    def crash_decode(self, server_notices_s: float) -> None:
        """Its memory is gone, and so are its ends of the calls. The router sends everything to the new incarnation."""
        old = self.decode

        def crash() -> None:
            for wire in self.network.open_wires:
                if all(wire is not answer.leg for answer in self.router.answers.values()):
                    wire.lose(0.0, server_notices_s)
            old.deltas.is_cut = old.commands.is_cut = True
            old.end()
            self._start_decode()

        self.loop.do(crash)
        self.loop.do(self.router.dispatch_again)

    def finish(self) -> None:
        """Nothing goes wrong any more; returns when everything has ended."""
        self.network.latency_s = 0.0
        for seconds in (*[0.1] * 100, *[2.0] * 300):  # engines are fast, so that no lease ends before it must
            self.step_prefill()
            self.settle_saves()
            self.step_prefill()
            self.settle_loads()
            self.step_decode()
            if self.is_idle:
                return
            self.advance(seconds)
        raise AssertionError(f"it does not end: {self.what_is_open()}")

    @property
    def is_idle(self) -> bool:
        return not any(self.what_is_open().values())

    def what_is_open(self) -> dict[str, int]:
        """What has an end, and has not come to it."""
        return {
            "requests": len(self.router.unfinished),
            "transfers": len(self.prefill.front.transfers),
            "admitted by prefill": self.prefill.context.admission.num_open,
            "admitted by decode": self.decode.context.admission.num_open,
            "handoffs": len(self.decode.services.handoffs),
            "blocks in quarantine": self.decode.services.quarantine.num_blocks,
            "requests of the prefill engine": not self.prefill.engine.is_idle,
            "requests of the decode engine": not self.decode.engine.is_idle,
            "windows": len(self.decode.windowed),
            "calls": len(self.network.open_wires),
            "writes": len(self.pending),
        }

    def assert_sound(self) -> None:
        """What holds at any time."""
        for pod in (self.prefill, self.decode):
            pod.assert_sound()
        assert self.prefill.front.violations() == []
        lent = self.decode.windowed
        for write in self.pending:
            assert write.target in lent, f"block {write.target} may be written to and is nobody's"
        assert self.loop.errors == []
        assert self.log.records == []

    def close(self) -> None:
        def end() -> None:
            self.prefill.end()
            self.decode.end()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self.loop.do(end)
        ROOT.removeHandler(self.log)
        self.loop.close()


class _ErrorLog(logging.Handler):
    """Faults that were caught where they happened."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(logging.Formatter().format(record))
