"""The executor of several ranks, each a process of its own.

1. `load_model` has the model's configuration checked, and starts a process for each rank, here or on other machines
   (`nodes.py`). Each call of the start goes to all of them at once, and their answers are joined: they must be the
   same, but for what is a rank's own.
2. `submit` writes the step to a ring, which all ranks read; the first of the last stage answers. Each rank of that
   samples all tokens, so that none of them has to be told any, and the next step may be submitted before. Stages
   before it are told with the next step. Answers come in the order of the steps.
3. Transfers and their results travel on another socket of each rank, on which a thread listens. So it sees at once,
   also between steps, that a rank has ended. Then, or when a rank fails or takes too long, the engine ends.
4. `close` ends the processes. They also end when this process is gone, however it ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from common.engine.config import EngineConfig
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import MaskSource, no_masks
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import (
    FinishedStep,
    ModelRunnerOutput,
    NewRequest,
    NoToken,
    Outcome,
    RunningStep,
    SchedulerOutput,
)
from common.engine.executor.multiproc.adapters import RankAdapters
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.digests import RankDigests, create_digests
from common.engine.executor.multiproc.joined_facts import check_models, join_facts
from common.engine.executor.multiproc.model_check import check_model
from common.engine.executor.multiproc.nodes import Nodes
from common.engine.executor.multiproc.protocol import (
    WORKER,
    Check,
    Close,
    Decoder,
    Done,
    EndStart,
    Identified,
    IdentifyModel,
    InitializeKVCache,
    Loaded,
    LoadModel,
    Masks,
    OpenConnectors,
    Opened,
    RankLaunch,
    StartAnswer,
    Step,
    StepAnswer,
    StepDone,
    ToRanks,
    WantMasks,
    encode,
)
from common.engine.executor.multiproc.rank import CAUSE_TIMEOUT_S, EXIT_TIMEOUT_S, Rank, RankProcess
from common.engine.executor.multiproc.rank_process import LocalProcess, start_rank
from common.engine.executor.multiproc.ring import RingWriter
from common.engine.executor.ranked_connector import join_ranks
from common.engine.executor.staged_connector import Staging, stage_connector
from common.engine.kv_connector import OpenConnector
from common.engine.messages import RankFigures
from common.engine.phases import PhaseClock
from common.engine.worker.step_measurement import measure_steps
from common.errors import EngineDeadError
from common.types import RequestId, SamplingParams

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 3.0  # for ranks to close their connectors; the engine itself has few seconds more
_DRAWN = SamplingParams(temperature=1.0, seed=0, speculative=False)
_Answer = TypeVar("_Answer", Identified, Loaded, Done, Opened)


class MultiprocExecutor:
    """See Executor."""

    num_failed_recordings = 0  # ranks log theirs, and do not tell the driver

    def __init__(self, config: EngineConfig, factory: str = WORKER, placement: Placement | None = None) -> None:
        """`factory`: "module:name" of a RankWorkerFactory. `placement` has all ranks; else the first machine's are
        processes of this one, and others join."""
        self._config = config
        self._placement = placement
        self._factory = factory
        self._num_ranks = config.parallel.num_ranks
        self.max_concurrent_batches = config.parallel.pipeline_parallel_size
        self.runs_ahead = self.max_concurrent_batches == 1  # ranks know the tokens of a step when they come to the next
        self._timeout_s = config.parallel.step_timeout_s
        self._ranks: list[Rank] = []
        self._ring: RingWriter | None = None
        self._cleanup = contextlib.ExitStack()
        self._staging = Staging(None, config)
        self._num_groups = 1
        self._max_tokens = 0  # of a request
        self._num_steps = 0  # that have computed something
        self.adapters = RankAdapters(self._broadcast, self._cause)
        self._left: deque[set[RequestId]] = deque()  # of steps that run: requests that were dropped meanwhile
        self._sampled: dict[RequestId, list[int]] = {}  # that stages before the last do not know of yet
        self._has_started = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._has_failed = threading.Event()
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._start_answer: Decoder[StartAnswer] = Decoder(StartAnswer)
        self._step_answer: Decoder[StepAnswer] = Decoder(StepAnswer)

    @property
    def rank_figures(self) -> tuple[RankFigures, ...]:
        """See Executor."""
        return tuple(rank.figures for rank in self._ranks if rank.figures is not None)

    def share_phases(self, phases: PhaseClock) -> None:
        """See Executor. The caller's thread computes nothing."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """See Executor."""
        self._on_failure = on_failure

    def load_model(self) -> ModelFacts:
        """See Executor."""
        self._staging = stage_connector(self._config)  # first, as its errors come at once
        if self._staging.store is not None:
            self._cleanup.callback(self._staging.store.close)
        if self._factory == WORKER and self._placement is None:  # else the model need not be on this machine
            check_model(self._config)
        rendezvous = self._start_processes()
        identified = self._call(IdentifyModel(), Identified)
        check_models([answer.digest for answer in identified], self._config.parallel.ranks_per_node)
        load = LoadModel(identified[0].rendezvous or rendezvous)
        facts = self._facts = join_facts([answer.facts for answer in self._call(load, Loaded)])
        self._num_groups = len(facts.layout.groups)
        self._max_tokens = min(facts.max_model_len, self._config.model.max_model_len or facts.max_model_len)
        return facts

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See Executor."""
        self._call(InitializeKVCache(num_blocks), Done)
        self._max_tokens = min(self._max_tokens, (num_blocks - 1) // self._num_groups * self._facts.layout.block_size)

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector | None:
        """See Executor."""
        store, facts = self._staging.store, self._facts
        if store is not None:
            store.allocate(facts.layout)
        for rank in self._ranks:
            rank.connector.on_settled = on_settled
        opened = [
            OpenConnector(rank.connector, answer.facts)
            for rank, answer in zip(self._ranks, self._call(OpenConnectors(), Opened), strict=True)
            if answer.facts is not None
        ]
        if not opened:
            return None
        ranks = join_ranks(opened)
        if store is None:
            return ranks
        staged = store.open(ranks, facts.fingerprint, facts.layout, on_settled)
        for number, rank in enumerate(self._ranks):
            if rank.is_elsewhere:
                rank.connector.heads = store.heads_of(number, facts.layout)
        return staged

    def measure_steps(self) -> list[tuple[int, float]]:
        """See Executor. Measured here, as ranks that went by clocks of their own would run different steps; so would
        engines that step together, which learn instead."""
        most = min(self._config.scheduler.max_num_batched_tokens, self._max_tokens)
        measured = [] if self._config.parallel.is_lockstep else measure_steps(self._run_prompt, most)
        self._broadcast(EndStart())
        for rank in self._ranks:
            rank.calls.limit_sends(self._timeout_s)
        self._has_started = True
        return measured

    def _run_prompt(self, num_tokens: int) -> None:
        """Runs a step of one prompt, which writes to the first blocks."""
        request_id = RequestId("measured")
        block_ids = list(range(1, -(-num_tokens // self._facts.layout.block_size) + 1))
        groups = self._facts.layout.groups
        tables = [[0] * len(block_ids) if group.kind == "state" else block_ids for group in groups]
        work = self._facts.pooling.own_work
        new = NewRequest(request_id, [0] * num_tokens, num_tokens, _DRAWN, tables, 0, pooling=work)
        self.submit(SchedulerOutput([new], {}, {request_id: num_tokens}, num_tokens), no_masks).result()
        self.submit(SchedulerOutput(dropped_request_ids=[request_id]), no_masks)

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        """See Executor."""
        if self.max_concurrent_batches > 1:
            for left in self._left:
                left.update(step.dropped_request_ids)
            if step.num_scheduled_tokens:
                self._left.append(set())
        sampled, self._sampled = self._sampled, {}
        self._broadcast(Step(step, sampled))
        return _Running(self, masks) if step.num_scheduled_tokens else FinishedStep(ModelRunnerOutput())

    def finish(self, masks: MaskSource) -> ModelRunnerOutput:
        """Waits for the results of the first step that has none yet. Called once for each that computes something."""
        while True:
            match self._step_answer(self._receive(self._answering)):
                case StepDone(output):
                    self._num_steps += 1
                    if self.max_concurrent_batches > 1:
                        self._note(output.outcomes)
                    return output
                case WantMasks(request_ids, lengths):
                    self._broadcast(Masks.of(masks(request_ids, np.array(lengths, dtype=np.int64))))

    def check(self, known: KnownRequests) -> list[str]:
        """See Executor."""
        self._broadcast(Check(known))
        violations = [f"{rank.name}: {line}" for rank in self._ranks for line in self._checked(rank)]
        store = self._staging.store
        return violations if store is None else violations + store.violations()

    def _checked(self, rank: Rank) -> list[str]:
        """The rank's answer."""
        try:
            violations = rank.checked.get(timeout=self._timeout_s)
        except queue.Empty as error:
            raise EngineDeadError(self._late("been checked")) from error
        if violations is None:
            raise self._cause()
        return violations

    @property
    def _answering(self) -> Rank:
        """The first rank of the last stage."""
        return self._ranks[-self._config.parallel.tensor_parallel_size]

    def _note(self, outcomes: Mapping[RequestId, Outcome]) -> None:
        """Notes the outcomes of the step that has ended, for the stages that have not sampled. Those of a request that
        was dropped since it began are not for one of the same id that came after it."""
        left = self._left.popleft()
        for request_id, outcome in outcomes.items():
            if request_id not in left:
                tokens = [] if isinstance(outcome, NoToken) else outcome
                self._sampled[request_id] = [token.token_id for token in tokens]

    def close(self) -> None:
        """See Executor."""
        with self._lock:
            self._is_closed = True
        due = time.monotonic()
        if self._has_started and self._ranks and self._failure is None:
            with contextlib.suppress(EngineDeadError):
                self._broadcast(Close())
                due += _CLOSE_TIMEOUT_S
        for rank in self._ranks:
            rank.end(max(0.0, due - time.monotonic()))
        self._ranks = []
        self._cleanup.close()

    # -- processes --------------------------------------------------------------------------------------------------

    def _start_processes(self) -> str:
        """Returns the rendezvous of ranks of one machine."""
        parallel = self._config.parallel
        num_here = parallel.ranks_per_node if self._placement is None else 0
        nodes = self._open_nodes()
        directory = tempfile.mkdtemp(prefix="baton-ranks-")
        self._cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        digests = create_digests(self._num_ranks)
        self._cleanup.callback(os.close, digests)
        launches = [
            RankLaunch(
                config=self._staging.config if number < num_here else self._staging.config_elsewhere,
                rank=number,
                factory=self._factory,
                directory=directory if number < num_here else "",
                store_host=nodes.address[0] if nodes is not None and number == 0 else "",
                digests=digests,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            for number in range(self._num_ranks)
        ]
        others = [] if nodes is None else nodes.start(launches[num_here:])
        for rank in others:
            rank.calls.limit_sends(self._timeout_s)
        pairs = [(_socketpair(), _socketpair()) for _ in range(num_here)]
        elsewhere = [rank.calls for rank in others]
        ring = self._ring = RingWriter([calls.own for calls, _ in pairs], self._timeout_s, elsewhere)
        self._cleanup.callback(ring.close)
        for number, (calls, events) in enumerate(pairs):
            inherited = ring.descriptors(number)
            launch = msgspec.structs.replace(launches[number], ring=tuple(inherited), events=events.others.fileno())
            with calls.others, events.others:
                process = start_rank(number, num_here, calls.others, (*inherited, digests, launch.events))
            calls.own.send(encode(launch))
            self._add_rank(LocalProcess(process), calls.own, events.own, None)
        for number, rank in enumerate(others, num_here):
            self._add_rank(
                rank.process,
                rank.calls,
                rank.events,
                RankDigests(digests, number, self._num_ranks, self._config.parallel.tensor_parallel_size),
            )
        return f"{directory}/rendezvous"

    def _open_nodes(self) -> Nodes | None:
        """The other machines, when all are there."""
        parallel, placement = self._config.parallel, self._placement
        if parallel.nnodes == 1 and placement is None:
            return None
        if placement is not None:
            self._cleanup.callback(placement.close)
            parallel = msgspec.structs.replace(parallel, master_addr=placement.host(), master_port=0)
        config = msgspec.structs.replace(self._staging.config, parallel=parallel)
        nodes = Nodes(config, range(0 if placement is not None else 1, parallel.nnodes), self._fail)
        self._cleanup.callback(nodes.close)
        if placement is not None:
            parallel = msgspec.structs.replace(parallel, master_port=nodes.address[1])
            placement.place(msgspec.structs.replace(config, parallel=parallel))
        nodes.wait()
        return nodes

    def _add_rank(self, process: RankProcess, calls: Channel, events: Channel, digests: RankDigests | None) -> None:
        events.limit_sends(self._timeout_s)
        calls.limit_receives(self._timeout_s)
        name = f"rank {len(self._ranks)} of {self._num_ranks}"
        steps = lambda: self._num_steps  # noqa: E731
        self._ranks.append(Rank(name, process, calls, events, self._fail, self._has_failed, steps, digests))
        self.adapters.ranks.append(self._ranks[-1].adapters)

    def _call(self, call: ToRanks, kind: type[_Answer]) -> list[_Answer]:
        """The answers of all ranks to a call of the start."""
        self._broadcast(call)
        answers: list[_Answer] = []
        for rank in self._ranks:
            answer = self._start_answer(self._receive(rank))
            assert isinstance(answer, kind)
            answers.append(answer)
        return answers

    def _broadcast(self, message: ToRanks) -> None:
        assert self._ring is not None
        try:
            self._ring.write(encode(message))
        except TimeoutError as error:
            raise self._failure or EngineDeadError(self._late("taken a step")) from error
        except OSError as error:
            raise self._cause() from error

    def _receive(self, rank: Rank) -> bytearray:
        """A rank's next answer. The start may take minutes, as loading does, but not while a rank is stopped."""
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                return rank.calls.receive()
            except TimeoutError as error:
                if self._has_started or self._stopped:
                    raise EngineDeadError(self._late("finished a step")) from error
            except EOFError as error:
                raise self._cause() from error

    def _late(self, what: str) -> str:
        ranks = "rank has" if self._num_ranks == 1 else f"{self._num_ranks} ranks have"
        stopped = "".join(f"; {name} is stopped" for name in self._stopped)
        return f"the {ranks} not {what} for {self._timeout_s:g} s (step_timeout_s){stopped}"

    @property
    def _stopped(self) -> list[str]:
        return [rank.name for rank in self._ranks if rank.process.is_stopped]

    # -- failures ---------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """A rank's thread says that it has ended, or will. Ends all waits."""
        with self._lock:
            if self._is_closed or self._failure is not None:
                return
            self._failure = error
        self._has_failed.set()
        for rank in self._ranks:
            rank.calls.shut_down()
            rank.checked.put(None)
            rank.adapters.put(None)
        self._on_failure(error)

    def _cause(self) -> Exception:
        """Why a socket is closed, of which the rank's thread hears at the same time."""
        self._has_failed.wait(CAUSE_TIMEOUT_S + EXIT_TIMEOUT_S)
        return self._failure or EngineDeadError("a rank has closed its socket")


class _Running(NamedTuple):
    """See RunningStep."""

    executor: MultiprocExecutor
    masks: MaskSource

    def result(self) -> ModelRunnerOutput:
        """See RunningStep."""
        return self.executor.finish(self.masks)


class _Pair(NamedTuple):
    own: Channel
    others: socket.socket


def _socketpair() -> _Pair:
    own, others = socket.socketpair()
    return _Pair(Channel(own), others)


class Placement(Protocol):
    """Finds machines for ranks, and runs `run_node` on them."""

    def host(self) -> str:
        """Address of this machine, at which it listens for them."""

    def place(self, config: EngineConfig) -> None:
        """Starts machines from number 0 with these settings, and their number."""

    def close(self) -> None:
        """Ends them. Idempotent; safe after a partial start."""
