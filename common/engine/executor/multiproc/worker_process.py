"""The process of one rank. Run as `python -m common.engine.executor.multiproc.worker_process` by MultiprocExecutor;
`common.engine.executor.multiproc.protocol` has their messages.

    ring ─▶ main thread: the worker's calls and steps ─▶ calls socket
    events socket ◀─▶ transfer thread: the connector

The transfer thread waits for no step but those that the driver has seen end, on the first rank. It sees as well that
the driver is gone, and ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import pkgutil
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from common.engine.config import EngineConfig
from common.engine.contract import adapters as contract_adapters
from common.engine.contract.adapters import NO_ADAPTERS, Adapters
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import BatchMasks, MaskSource, no_masks
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import ModelRunnerOutput, RunningStep, SchedulerOutput
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.digests import RankDigests
from common.engine.executor.multiproc.node import connect
from common.engine.executor.multiproc.protocol import (
    WORKER,
    AdapterRead,
    Cancel,
    Check,
    Checked,
    Close,
    Decoder,
    Done,
    EndStart,
    Identified,
    IdentifyModel,
    InitializeKVCache,
    InstallAdapter,
    JoinRank,
    Loaded,
    LoadModel,
    LogLine,
    Masks,
    OpenConnectors,
    Opened,
    OwnFigures,
    RankLaunch,
    ReadAdapter,
    RemoveAdapter,
    Settled,
    StartLoad,
    StartLookup,
    StartSave,
    Step,
    StepDigest,
    StepDone,
    ToRanks,
    Transfer,
    WantMasks,
    encode,
)
from common.engine.executor.multiproc.ring import RingDescriptors, RingReader
from common.engine.executor.multiproc.step_clock import StepClock
from common.engine.kv_connector import Connector, OpenConnector
from common.engine.launch import EXIT_FAILED, EXIT_ORPHANED, EngineFailed
from common.engine.meta_kernels import import_torch
from common.errors import BatonError, ConfigError, InvalidRequestError
from common.imports import kept_imports
from common.types import RequestId

_MAX_READ = 64  # adapters that are read and not installed
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>

logger = logging.getLogger("common.engine.executor.multiproc.worker_process")


class RankWorker(Protocol):
    """The worker of one rank: see Executor, whose calls it gets in the same order on one thread. It computes together
    with those of the other ranks."""

    def load_model(self) -> ModelFacts:
        """The facts must be the same on all ranks, but for those of memory and threads."""

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """The rank's part of each block."""

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector | None:
        """The rank's own connector."""

    @property
    def adapters(self) -> Adapters | None:
        """See Executor."""

    def note_sampled(self, sampled: Mapping[RequestId, Sequence[int]]) -> None:
        """See RequestTable. Called before each step, but not in the last stage."""

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        """Gives the same results on all ranks of the last stage, and none on others."""

    def check(self, known: KnownRequests) -> list[str]:
        """Returns the problems on this rank. Called between steps."""

    def close(self) -> None:
        """Idempotent."""


RankWorkerFactory = Callable[[EngineConfig, int, str], RankWorker]
"""(config, rank, rendezvous) -> worker; see LoadModel. Raises ConfigError for settings that do not fit."""


class _Message(NamedTuple):
    encoded: bytes | bytearray
    decoded: ToRanks


class RankProcess:
    """Serves the driver on the main thread."""

    def __init__(self, launch: RankLaunch, calls: Channel, transfers: TransferThread) -> None:
        self._launch = launch
        self._calls = calls
        self._transfers = transfers
        parallel = launch.config.parallel
        size = parallel.tensor_parallel_size
        self._is_last = launch.rank >= parallel.num_ranks - size  # of the last stage
        self._answers = launch.rank == parallel.answering_rank
        self._receive = calls.receive if launch.ring is None else RingReader(RingDescriptors(*launch.ring), calls).read
        self._digests = RankDigests(launch.digests, launch.rank, parallel.num_ranks, size)
        self._tells_digests = launch.ring is None and launch.rank % parallel.ranks_per_node == 0
        self._decode: Decoder[ToRanks] = Decoder(ToRanks)
        self._clock = StepClock(launch.rank)
        self._constrained: set[RequestId] = set()  # live requests with a grammar
        self._ahead: deque[_Message] = deque()  # came before the masks of the step that runs

    def run(self) -> None:
        """Serves until the driver closes this rank."""
        with self._without_compiler():
            with kept_imports():  # torch and transformers
                import_torch()
                factory = cast("RankWorkerFactory", pkgutil.resolve_name(self._launch.factory))
            worker = self._load(factory)
            self._serve(worker)
        gc.collect()
        gc.freeze()  # the model lives as long as the process: no collection in a step need look at it
        self._clock.begin()
        self._serve(worker)
        self._transfers.close()
        worker.close()

    def _load(self, factory: RankWorkerFactory) -> RankWorker:
        """The first calls."""
        launch, config = self._launch, self._launch.config
        assert isinstance(self._read().decoded, IdentifyModel)
        digest = b""
        if launch.factory == WORKER:
            from common.engine.model.loader import identify_model

            digest = identify_model(config.model, config.parallel.device_of(launch.rank, config.data_parallel_rank))
        rendezvous = ""
        if launch.store_host:
            from common.engine.executor.multiproc.rendezvous import host_store

            rendezvous = host_store(launch.store_host, config.parallel.num_ranks)
        self._calls.send(encode(Identified(digest, rendezvous)))
        call = self._read().decoded
        assert isinstance(call, LoadModel)
        worker = factory(config, launch.rank, call.rendezvous)
        facts = worker.load_model()
        self._clock.device = facts.device
        self._transfers.adapters = worker.adapters
        self._calls.send(encode(Loaded(facts)))
        return worker

    def _serve(self, worker: RankWorker) -> None:
        """Serves to the end of the start, or to the end."""
        while True:
            message = self._ahead.popleft() if self._ahead else self._read()
            match message.decoded:
                case Step(step, sampled):
                    began = time.perf_counter()
                    if not self._is_last:
                        worker.note_sampled(sampled)
                    output = self._run_step(worker, step)
                    result = encode(StepDone(output))
                    own = output.drafts or output.proposer_failure or output.drafting  # of the rank that answers
                    alike = encode(StepDone(output.without_drafts())) if own else result
                    self._digests.end_step(message.encoded, alike)
                    if self._tells_digests:
                        self._transfers.tell(StepDigest(*self._digests.last))
                    if step.num_scheduled_tokens:
                        self._transfers.end_step()
                        if self._answers:
                            self._calls.send(result)
                        if (figures := self._clock.step_ended(began, time.perf_counter())) is not None:
                            self._transfers.tell(OwnFigures(figures))
                case InitializeKVCache(num_blocks):
                    worker.initialize_kv_cache(num_blocks)
                    self._calls.send(encode(Done()))
                case OpenConnectors():
                    opened = worker.open_connector(self._transfers.wake)
                    self._transfers.connector = None if opened is None else opened.connector
                    self._calls.send(encode(Opened(None if opened is None else opened.facts)))
                case Check(known):
                    self._transfers.tell(Checked(worker.check(known)))
                case InstallAdapter(digest):
                    assert worker.adapters is not None
                    worker.adapters.install(self._transfers.take_adapter(digest))
                case RemoveAdapter(digest):
                    assert worker.adapters is not None
                    worker.adapters.remove(digest)
                case EndStart() | Close():
                    return
                case Masks():
                    assert not self._is_last  # they are for the stage that samples

    def _run_step(self, worker: RankWorker, step: SchedulerOutput) -> ModelRunnerOutput:
        self._constrained.difference_update(step.dropped_request_ids)
        self._constrained.update(each.request_id for each in step.new_requests if each.sampling.structured_outputs)
        return worker.submit(step, self._masks if self._constrained else no_masks).result()

    def _masks(self, request_ids: Sequence[RequestId], lengths: npt.NDArray[np.int64]) -> BatchMasks | None:
        """See MaskSource."""
        if self._answers:
            self._calls.send(encode(WantMasks(list(request_ids), lengths.tolist())))
        while not isinstance((message := self._read()).decoded, Masks | Close):
            self._ahead.append(message)
        if not isinstance(message.decoded, Masks):
            raise EOFError("the driver ends in a step")
        return message.decoded.to_batch()

    def _read(self) -> _Message:
        message = self._receive()
        return _Message(message, self._decode(message))

    def _without_compiler(self) -> contextlib.AbstractContextManager[None]:
        if self._launch.factory != WORKER:
            return contextlib.nullcontext()
        from common.engine.model.without_compiler import without_compiler

        return without_compiler()


class TransferThread:
    """Owns the events socket's receiving end, and calls the connector."""

    def __init__(self, events: Channel, on_failure: Callable[[Exception], None], directory: str) -> None:
        self.connector: Connector | None = None  # set once, before there are transfers
        self.adapters: Adapters | None = None  # likewise
        self._read: dict[bytes, contract_adapters.ReadAdapter] = {}  # adapters that are not installed yet
        self._events = events
        self._on_failure = on_failure
        self._directory = directory
        self._decode: Decoder[Transfer] = Decoder(Transfer)
        self._settled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # held while the connector is called
        self._num_steps = 0
        self._step_ended = threading.Condition()
        threading.Thread(target=self._run, name="rank-transfers", daemon=True).start()

    def wake(self) -> None:
        """The connector has settled jobs. May be called from any thread."""
        os.eventfd_write(self._settled, 1)

    def end_step(self) -> None:
        """The main thread has run another step that computes something."""
        with self._step_ended:
            self._num_steps += 1
            self._step_ended.notify()

    def take_adapter(self, digest: bytes) -> contract_adapters.ReadAdapter:
        """Gives an adapter that was read."""
        return self._read.pop(digest)

    def _read_adapter(self, number: int, directory: str) -> None:
        try:
            if self.adapters is None:
                raise InvalidRequestError(NO_ADAPTERS)
            adapter = self.adapters.read(directory)
        except Exception as error:  # noqa: BLE001  third-party code over user files: the driver hears what it is
            reason = error.message if isinstance(error, BatonError) else f"the adapter cannot be read: {error}"
            self.tell(AdapterRead(number=number, error=reason))
        else:
            while len(self._read) >= _MAX_READ:  # that the driver has had no use for
                self._read.pop(next(iter(self._read)))
            self._read[adapter.facts.digest] = adapter
            self.tell(AdapterRead(number=number, facts=adapter.facts, absent=sorted(adapter.absent)))

    def tell(self, message: AdapterRead | Checked | OwnFigures | Settled | StepDigest) -> None:
        """Sends the driver a message. May be called from any thread."""
        self._events.send(encode(message))

    def close(self) -> None:
        """The connector is not called any more."""
        with self._lock:
            self.connector = None

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._settled, select.POLLIN)
        try:
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == self._settled:
                        os.eventfd_read(self._settled)
                        self._tell_settled()
                        continue
                    self._take(self._decode(self._events.receive()))
                    while self._events.has_buffered:
                        self._take(self._decode(self._events.receive()))
        except (EOFError, ConnectionError):  # the driver is gone: no process uses this one any more
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(EXIT_ORPHANED)
        except Exception as error:  # noqa: BLE001  whatever it is ends the rank
            self._on_failure(error)

    def _take(self, message: Transfer) -> None:
        if isinstance(message, ReadAdapter):  # which takes a while: the driver asks for one after the other
            threading.Thread(target=self._read_adapter, args=[message.number, message.directory], daemon=True).start()
            return
        if isinstance(message, StartLoad | StartSave):
            with self._step_ended:
                self._step_ended.wait_for(lambda: self._num_steps >= message.num_steps)
        with self._lock:
            connector = self.connector
            if connector is None:
                return
            match message:
                case StartLoad(transfer):
                    connector.start_load(transfer)
                case StartSave(transfer):
                    connector.start_save(transfer)
                case StartLookup(transfer):
                    connector.start_lookup(transfer)
                case Cancel(job_id):
                    connector.cancel(job_id)

    def _tell_settled(self) -> None:
        with self._lock:
            results = [] if self.connector is None else self.connector.poll()
        if results:
            self.tell(Settled(results))


class _DriversLog(logging.Handler):
    """Sends records to the driver, whose log they are in."""

    def __init__(self, events: Channel) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the driver is gone
            self._events.send(encode(LogLine(record.levelno, record.name, self.format(record))))


def _channels(launch: RankLaunch, parent: Channel) -> tuple[Channel, Channel]:
    """Calls and events. Raises OSError."""
    if launch.ring is not None:
        return parent, Channel(socket.socket(fileno=launch.events))
    calls, events = connect(launch.config), connect(launch.config)
    for channel, is_events in ((calls, False), (events, True)):
        channel.send(encode(JoinRank(launch.token, launch.rank, is_events)))
        channel.limit_sends(launch.config.parallel.step_timeout_s)
    return calls, events


def _go_on_when_orphaned() -> None:
    """Has the kernel continue this process when its parent has ended, where it can: one that is stopped does not notice
    that its sockets are closed, and would keep its memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def main() -> None:
    """Entry point of the process. Ends it."""
    _go_on_when_orphaned()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when to stop
    parent = Channel(socket.socket(fileno=os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that no process that this one starts has it
    launch = Decoder[RankLaunch](RankLaunch)(parent.receive())
    try:
        calls, events = _channels(launch, parent)
    except OSError:  # the driver is gone: no process uses this one any more
        os._exit(EXIT_ORPHANED)
    logging.basicConfig(level=launch.log_level, format="%(message)s", handlers=[_DriversLog(events)])

    def fail(error: Exception) -> None:
        if not isinstance(error, ConfigError):  # which the driver reports
            logger.critical("it failed", exc_info=error)
        with contextlib.suppress(OSError):  # the driver is gone
            events.send(encode(EngineFailed.of(error)))
        if launch.directory:  # the driver may be gone, and no other rank see that
            shutil.rmtree(launch.directory, ignore_errors=True)
        os._exit(EXIT_FAILED)

    transfers = TransferThread(events, fail, launch.directory)
    try:
        RankProcess(launch, calls, transfers).run()
    except Exception as error:  # noqa: BLE001  whatever it is ends the rank, and the driver must hear of it
        fail(error)
    # Everything is closed. Taking an interpreter down that has loaded torch costs seconds of collecting garbage.
    os._exit(0)


if __name__ == "__main__":
    main()
