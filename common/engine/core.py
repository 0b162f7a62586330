"""The engine core: one scheduler, one executor, and the step that joins them.

1. `EngineCore(...)` loads the model, sizes the KV cache, resolves what was "auto", builds the scheduler and, if there
   is a connector, starts the thread that moves KV.
2. `receive` takes each command as it arrives, on any thread; those that concern KV transfers go to that thread at once.
3. `add_request` and `abort_requests` change what the next step does.
4. `step()` schedules, executes and updates, while `has_work`. Where the executor can, the step after the one that runs
   begins before that one's outcome is known; in a pipeline, steps of other requests do.
5. `close()` ends the thread and releases the executor.

All but `receive` runs on one thread, that of the client or loop that owns the core. An exception out of `step` is
fatal: the scheduler and the workers no longer agree, so the owner must not step again.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from common.engine.adapter_loads import AdapterLoads, failed_call
from common.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from common.engine.contract.adapters import AdapterFacts
from common.engine.contract.kv_groups import max_blocks_of, max_spans_in
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import NOTHING_ASKED, Asked, FinishedStep, RunningStep, SchedulerOutput
from common.engine.executor.base import Executor
from common.engine.grammar.compiler import GrammarCompiler, TokenizerSource
from common.engine.grammar.masks import GrammarMasks
from common.engine.kv_cache import KVCacheManager, KVGroups, create_kv_cache_manager
from common.engine.kv_connector import ConnectorFacts
from common.engine.lockstep import Lockstep
from common.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineCommand,
    EngineCoreOutputs,
    EngineSpec,
    EngineStats,
    IntegrityReport,
    LoadAdapter,
    RequestOutput,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
    UnloadAdapter,
)
from common.engine.phases import Phase, PhaseClock
from common.engine.scheduler.adapters import AdapterPlaces
from common.engine.scheduler.scheduler import Scheduler
from common.engine.speculative import ByWorker
from common.engine.transfers.actor import TransferActor
from common.engine.transfers.messages import Announce, End
from common.engine.transfers.port import TransferPort
from common.errors import BatonError, ConfigError
from common.step_budget import prefill_work, tokens_within
from common.step_times import StepTimes
from common.types import FinishReason, RequestId

logger = logging.getLogger(__name__)

_SHARE_OF_STEP_TIMEOUT = 1 / 4  # that the longest step is expected to take: context and load make steps longer


class _Flight(NamedTuple):
    """A step under way."""

    step: SchedulerOutput
    running: RunningStep
    began: float


class EngineCore:
    """Owns one executor, one scheduler and the thread that moves KV.

    Raises ConfigError, ModelLoadError included, from its constructor if the settings do not fit the model; the
    executor is closed then.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        on_wakeup: Callable[[], None],
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_failure: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The callbacks are called from any thread: `on_wakeup` when an idle core may have work, `on_outputs` with
        outputs that should not wait for the end of a step, `on_failure` if the transfer thread has died, after which
        the core is unusable."""
        self._executor = executor
        self._clock = clock
        self.phases = PhaseClock(clock)
        executor.share_phases(self.phases)
        self._on_failure = on_failure
        self._lockstep: Lockstep | None = None
        executor.watch(self._note_failure)
        self._on_outputs = on_outputs
        self._unsent: list[RequestOutput] = []  # made between steps; sent with the next one
        self._last_end = -math.inf  # of a step
        self._flights: deque[_Flight] = deque()  # steps under way, in order
        self._has_computed = True  # the last step has computed something
        self._has_only_attended = False
        self._port: TransferPort | None = None
        self._actor = TransferActor(
            on_events=on_wakeup,
            on_outputs=lambda outputs: on_outputs(EngineCoreOutputs(outputs=outputs)),
            on_failure=on_failure,
        )
        self._grammars: GrammarCompiler | None = None
        places = AdapterPlaces(config.adapters.max_loras)
        self._adapters = AdapterLoads(executor, places, config.adapters.max_cpu_loras, on_wakeup)
        try:
            self._lockstep = _open_lockstep(config, on_wakeup, on_failure)
            facts = executor.load_model()
            looks_back = bool(config.model.logits_processors)  # which may look at the tokens so far
            # Engines that step together decide on one step at a time.
            self._may_run_ahead = executor.runs_ahead and not looks_back and self._lockstep is None
            self.spec = _resolve_spec(config, facts)
            executor.initialize_kv_cache(self.spec.num_blocks)
            kv = create_kv_cache_manager(
                self.spec.num_blocks,
                KVGroups(facts.layout.groups, self.spec.block_size),
                enable_prefix_caching=config.cache.enable_prefix_caching,
            )
            self._open_connector(kv)
            measured_steps = executor.measure_steps()
            scheduler_config = _fit_step_timeout(config, measured_steps)
            self._scheduler = Scheduler(
                scheduler_config,
                kv,
                max_model_len=self.spec.max_model_len,
                vocab_size=self.spec.vocab_size,
                eos_token_ids=facts.eos_token_ids,
                transfers=self._port,
                grammars=self._open_grammars(config, facts, on_wakeup, on_failure),
                measured_steps=measured_steps,
                max_concurrent_batches=executor.max_concurrent_batches,
                most_asked=_most_asked(config),
                adapters=places,
                pooling=facts.pooling,
            )
            self.spec = msgspec.structs.replace(
                self.spec,
                max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
                target_itl_s=self._scheduler.target_itl_s,
            )
            self._masks = GrammarMasks(facts.vocab_size, facts.eos_token_ids, config.grammar_step_s)
        except BaseException:
            self.close()
            raise

    def _note_failure(self, error: Exception) -> None:
        """The executor has failed, perhaps while other engines are waited for."""
        if self._lockstep is not None:
            self._lockstep.fail(error)
        self._on_failure(error)

    def _open_grammars(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        on_wakeup: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> GrammarCompiler | None:
        """Nothing is loaded before the first request that needs it."""
        if facts.tokenizer_directory is None:
            return None
        source = TokenizerSource(facts.tokenizer_directory, facts.vocab_size, facts.eos_token_ids)
        self._grammars = GrammarCompiler(config.grammar, source, on_wakeup, on_failure)
        return self._grammars

    def _open_connector(self, kv: KVCacheManager) -> None:
        opened = self._executor.open_connector(self._actor.note_settled)
        if opened is None:
            return
        facts: ConnectorFacts = opened.facts
        self.spec = msgspec.structs.replace(
            self.spec, is_direct=facts.is_direct, connector_addresses=(facts.address,), max_write_s=facts.max_write_s
        )
        self._port = TransferPort(kv, facts, self._actor, self.phases)
        self._actor.start(opened.connector, facts, kv.groups)

    # -- commands ---------------------------------------------------------------------------------------------------

    def receive(self, command: EngineCommand) -> None:
        """Inspects a command as it arrives, before its turn in the step loop. May be called from any thread, in the
        order of the client's commands."""
        match command:
            case AddRequest(transfer=transfer) if transfer is not None and self._port is not None:
                is_producer = transfer.role == "producer"
                num_prompt_tokens = len(command.prompt_token_ids)
                self._actor.put(Announce(command.request_id, transfer.epoch, is_producer, num_prompt_tokens))
            case AbortRequests() | TransferUpdate() | TransferTarget() | TransferQuiesced() if self._port is not None:
                self._actor.put(command)

    def add_request(self, request: AddRequest) -> None:
        """Starts a generation. One that cannot be admitted ends with FinishReason.ERROR in the next step's outputs."""
        try:
            self._scheduler.add_request(request, self._clock())
        except BatonError as error:
            self._forget_transfer(request)
            self._unsent.append(
                RequestOutput(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=error.message,
                    error_code=error.code.value.number,
                    error_param=error.param or "",
                )
            )

    def _forget_transfer(self, request: AddRequest) -> None:
        """Ends the transfer of a rejected request, which `receive` has announced."""
        if request.transfer is not None and self._port is not None and not self._port.knows(request.request_id):
            self._actor.put(End(request.request_id, is_aborted=True))

    def abort_requests(self, request_ids: Sequence[RequestId]) -> None:
        """Ends generations; live ones answer with FinishReason.ABORT in the next step's outputs."""
        self._unsent += self._scheduler.abort_requests(list(request_ids))

    # -- adapters ----------------------------------------------------------------------------------------------------

    def begin_load_adapter(self, command: LoadAdapter) -> None:
        """Begins to read an adapter; `settle_adapters` answers."""
        self._adapters.begin(command.call_id, command.directory)

    def load_adapter(self, directory: str) -> AdapterFacts:
        """Reads and installs an adapter at once. Raises InvalidRequestError if it cannot be used, OverloadedError if
        there are too many."""
        return self._adapters.load(directory)

    def unload_adapter(self, digest: bytes) -> None:
        """Forgets an adapter as soon as no request is left that uses it. Raises UnknownModelError."""
        self._adapters.unload(digest)

    def answer_unload(self, command: UnloadAdapter) -> CallResult:
        """Forgets an adapter for a client."""
        try:
            self.unload_adapter(command.digest)
        except BatonError as error:
            return failed_call(command.call_id, error)
        return CallResult(call_id=command.call_id)

    def settle_adapters(self) -> list[CallResult]:
        """Makes adapters that were read known. Called between steps, after a wake-up."""
        return self._adapters.settle()

    # -- the step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if a step would do something now."""
        return (
            bool(self._unsent)
            or bool(self._flights)
            or self._scheduler.has_work
            or self._scheduler.has_cache_change  # was reset while idle, which routers must learn
            or self.is_awaited
        )

    @property
    def is_awaited(self) -> bool:
        """True if other engines wait for this one to step with them."""
        return self._lockstep is not None and self._lockstep.is_awaited

    @property
    def has_only_attended(self) -> bool:
        """True if the last step computed for other engines, and nothing has changed here."""
        return self._has_only_attended

    @property
    def has_unfinished(self) -> bool:
        """True while any request lives, any KV is in transfer, or an output is unsent."""
        return self.has_work or self._scheduler.has_unfinished or self._num_transfers > 0

    def step(self) -> EngineCoreOutputs:
        """Schedules, executes and updates. Any exception is fatal for this core."""
        self._adapters.remove_unused()
        self._begin_steps()
        flight = self._flights.popleft()
        self.phases.enter(Phase.DEVICE)
        result = flight.running.result()
        self.phases.enter(Phase.UPDATE)
        finished = self._clock()
        if self._port is not None:
            self._port.fence = max(self._port.fence, result.fence)  # a step without tokens has none
        step_s = finished - max(flight.began, self._last_end)
        self._last_end = finished
        step = flight.step
        self._has_computed = bool(step.num_scheduled_tokens)
        self._masks.step_ended(self._scheduler.awaited(result.outcomes))
        outputs = self._take_unsent() + self._scheduler.update(step, result, step_s)
        cache = self._scheduler.take_cache_change()
        is_changed = bool(outputs or cache.stored or cache.removed)
        self._has_only_attended = bool(step.tokens_by_engine) and not self._has_computed and not is_changed
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.stats(),
            kv_stored=cache.stored,
            kv_removed=cache.removed,
            phases=self.phases.seconds(),
        )

    def _begin_steps(self) -> None:
        """Begins a step if none is under way, and others beside it where the executor can and there is work for
        them."""
        flights = self._flights
        if not flights:
            flights.append(self._begin_next())
        if self._may_run_ahead and (ahead := self._begin_ahead(flights[-1])) is not None:
            flights.append(ahead)
        while (
            len(flights) < self._executor.max_concurrent_batches
            and flights[-1].step.num_scheduled_tokens
            and self._scheduler.has_unscheduled
        ):
            flights.append(self._begin_next())

    def _begin_next(self) -> _Flight:
        self.phases.enter(Phase.SCHEDULE)
        may_wait = not self._has_computed and not self._flights
        self._scheduler.masks_arrived(self._masks.arrived(may_wait=may_wait))
        began = self._clock()
        step = self._scheduler.schedule(began)
        self._send_urgent_outputs()
        return self._submit(step, began)

    def _begin_ahead(self, flight: _Flight) -> _Flight | None:
        """Begins the step after the one that runs, if that needs nothing of its outcome."""
        if not self._may_run_ahead or not flight.step.num_scheduled_tokens:
            return None
        self.phases.enter(Phase.SCHEDULE)
        step = self._scheduler.schedule_ahead()
        return None if step is None else self._submit(step, self._clock())

    def _submit(self, step: SchedulerOutput, began: float) -> _Flight:
        if self._lockstep is not None and (step.num_scheduled_tokens or self._lockstep.is_awaited):
            self.phases.enter(Phase.DEVICE)
            step = replace(step, tokens_by_engine=self._lockstep.join(step.total_num_scheduled_tokens))
        observer = self.phases.observer
        if observer is not None:
            observer.begin_step(step)
        self.phases.enter(Phase.PREPARE)
        self._masks.step_scheduled(step, self._scheduler.grammar_of)
        running = self._executor.submit(step, self._masks.masks)
        if observer is not None:
            observer.end_step()
        return _Flight(step, running, began)

    def _send_urgent_outputs(self) -> None:
        if outputs := self._scheduler.take_urgent_outputs():
            self._on_outputs(EngineCoreOutputs(outputs=self._take_unsent() + outputs))

    def _take_unsent(self) -> list[RequestOutput]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def begin_commands(self) -> None:
        """Called when the owner begins to take commands."""
        self.phases.enter(Phase.SCHEDULE)

    def begin_wait(self) -> None:
        """Called when the owner begins to wait for commands because there is nothing to compute."""
        awaits_kv = self._scheduler.has_unfinished and self._num_transfers > 0
        self.phases.enter(Phase.TRANSFER if awaits_kv else Phase.WAIT)

    # -- questions --------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Returns the current statistics."""
        stats = msgspec.structs.replace(
            self._scheduler.stats(),
            num_failed_recordings=self._executor.num_failed_recordings,
            ranks=self._executor.rank_figures,
        )
        return stats if self._port is None else self._actor.figures(self._port.figures(stats))

    def check_integrity(self) -> IntegrityReport:
        """Checks the engine's invariants, on all ranks. Waits for the steps that run, which may still ask for masks."""
        for number, flight in enumerate(self._flights):
            self._flights[number] = flight._replace(running=FinishedStep(flight.running.result()))
        report = self._scheduler.check_integrity()
        violations = report.violations + self._executor.check(self._scheduler.known_requests)
        return msgspec.structs.replace(report, violations=violations, num_transfers=self._num_transfers)

    @property
    def _num_transfers(self) -> int:
        return 0 if self._port is None else len(self._port)

    def reset_prefix_cache(self) -> None:
        """Removes all cached blocks that no request owns."""
        self._scheduler.reset_prefix_cache()

    def call(self, call: Call) -> CallResult:
        """Answers a client's call."""
        result: EngineSpec | EngineStats | IntegrityReport | None = None
        match call.method:
            case "engine_spec":
                result = self.spec
            case "stats":
                result = self.stats()
            case "check_integrity":
                result = self.check_integrity()
            case "reset_prefix_cache":
                self.reset_prefix_cache()
        return CallResult(call_id=call.call_id, result=result)

    def close(self) -> None:
        """Ends the threads and releases the executor. Idempotent."""
        self._actor.stop()
        self._adapters.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._lockstep is not None:
            self._lockstep.close()
        self._executor.close()


def _most_asked(config: EngineConfig) -> Asked:
    """Returns the most that a step may ask of the draft model, if there is one."""
    method = config.speculation.method
    if method is None or not isinstance(method.options, ByWorker):
        return NOTHING_ASKED
    return Asked(method.options.depth, config.step_share_s)


def _open_lockstep(
    config: EngineConfig, on_awaited: Callable[[], None], on_failure: Callable[[Exception], None]
) -> Lockstep | None:
    member = config.data_parallel
    if member is None or not member.sockets:
        return None
    sockets = {rank: socket.socket(fileno=descriptor) for rank, descriptor in member.sockets.items()}
    return Lockstep(member.rank, sockets, config.parallel.step_timeout_s, on_awaited, on_failure)


def _fit_step_timeout(config: EngineConfig, measured_steps: Sequence[tuple[int, float]]) -> SchedulerConfig:
    """Returns the scheduler's settings, with a smaller token budget where ranks are so slow that a full step would be
    taken for one that hangs."""
    scheduler, parallel = config.scheduler, config.parallel
    if parallel.executor_name == "inproc" or not measured_steps:
        return scheduler
    work = [(prefill_work(tokens, 0), seconds) for tokens, seconds in measured_steps]
    line = StepTimes.measured(scheduler.max_num_batched_tokens, work).line
    longest_s = parallel.step_timeout_s * _SHARE_OF_STEP_TIMEOUT
    most = max(scheduler.max_num_seqs, tokens_within((longest_s - line.base_s) / line.token_s, 0))
    if most >= scheduler.max_num_batched_tokens:
        return scheduler
    logger.warning(
        "steps take at most %d tokens instead of %d (max_num_batched_tokens), so that they stay well below %g s "
        "(step_timeout_s)",
        most,
        scheduler.max_num_batched_tokens,
        parallel.step_timeout_s,
    )
    return msgspec.structs.replace(scheduler, max_num_batched_tokens=most)


def _resolve_spec(config: EngineConfig, facts: ModelFacts) -> EngineSpec:
    """Resolves everything that was "auto". Raises ConfigError that names settings that do not fit."""
    num_blocks = _resolve_num_blocks(config.cache, facts)
    return EngineSpec(
        fingerprint=facts.fingerprint,
        layout=facts.layout,
        num_blocks=num_blocks,
        max_model_len=_resolve_max_model_len(config, facts, num_blocks),
        vocab_size=facts.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        device=facts.device,
        kernels=facts.kernels,
        kernels_failed=facts.kernels_failed,
        num_threads=facts.num_threads,
        position_dims=facts.position_dims,
        dtype=facts.dtype,
        bytes_per_block=facts.bytes_per_block,
        draft_bytes_per_block=facts.draft_bytes_per_block,
        eos_token_ids=tuple(sorted(facts.eos_token_ids)),
        logits_processors=tuple(config.model.logits_processors),
        pooling=facts.pooling,
    )


def _resolve_num_blocks(cache: CacheConfig, facts: ModelFacts) -> int:
    """Blocks of the KV tensor, the null block included."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    memory = facts.available_kv_bytes if cache.kv_cache_memory is None else cache.kv_cache_memory
    num_blocks = memory // facts.bytes_of_block
    if num_blocks < 2:
        raise ConfigError.of(
            "kv_cache_memory",
            f"{memory} bytes hold {num_blocks} KV blocks of {facts.bytes_of_block} bytes, but at least 2 are needed; "
            "raise --kv-cache-memory (or --memory-fraction) or lower --block-size",
        )
    return num_blocks


def _resolve_max_model_len(config: EngineConfig, facts: ModelFacts, num_blocks: int) -> int:
    """Tokens of the longest request, which alone must fit the KV cache."""
    wanted = config.model.max_model_len
    block_size = facts.layout.block_size
    most = -(-facts.max_model_len // block_size)
    fitting = max_spans_in(facts.layout.groups, num_blocks - 1, most) * block_size  # the null block holds no tokens
    if fitting <= 0:
        least = max_blocks_of(facts.layout.groups, 1) + 1
        reason = f"{num_blocks} KV blocks hold no request; raise --kv-cache-memory (or --num-blocks {least})"
        raise ConfigError.of("num_blocks" if config.cache.num_blocks else "kv_cache_memory", reason)
    if wanted is None:
        if fitting < facts.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, so no request may be longer, although the model's limit is %d; raise "
                "kv_cache_memory for more, or set max_model_len",
                fitting,
                facts.max_model_len,
            )
        return min(facts.max_model_len, fitting)
    if wanted > facts.max_model_len:
        raise ConfigError.of("max_model_len", f"{wanted} exceeds the model's own limit of {facts.max_model_len}")
    if wanted > fitting:
        blocks = max_blocks_of(facts.layout.groups, -(-wanted // block_size)) + 1
        raise ConfigError.of(
            "max_model_len",
            f"{wanted} tokens do not fit a KV cache of {fitting} tokens; lower --max-model-len, or raise "
            f"--kv-cache-memory to at least {blocks * facts.bytes_of_block} bytes (--num-blocks {blocks})",
        )
    return wanted
