"""Schedulers, requests, and an engine without a model to drive them.

`FakeEngine` keeps a KV cache of fingerprints: the slot of token i holds a number that depends on all tokens up to i.
A token is sampled from the fingerprints found in the request's blocks, after comparing them with its tokens. So a block
that is shared wrongly, reused under a transfer, freed too early or not loaded shows at once, as in a real engine it
would show as noise; and what a request must answer is known beforehand (`expected_output`).

`connect_directly` lets FakeEngines write into each other's KV caches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from common.engine.config import SchedulerConfig
from common.engine.contract.kv_groups import KVGroupSpec, max_spans_in
from common.engine.contract.parts import encode_address
from common.engine.contract.step import (
    NOTHING_ASKED,
    Asked,
    Drafting,
    ModelRunnerOutput,
    NewRequest,
    NoToken,
    Outcome,
    SchedulerOutput,
)
from common.engine.executor.fake import ONE_GROUP
from common.engine.kv_cache import KVCacheManager, KVGroups, create_kv_cache_manager
from common.engine.kv_connector import BlockTransfer, ConnectorFacts, TransferResult
from common.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    IntegrityReport,
    KVTransferParams,
    RequestEvent,
    RequestOutput,
    RequestStarted,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.engine.phases import PhaseClock
from common.engine.scheduler.grammars import Grammars
from common.engine.scheduler.scheduler import Scheduler
from common.engine.speculation.base import Context, Proposer
from common.engine.speculation.fake import Accuracy, FakeProposer
from common.engine.transfers.messages import Announce, End, Message, TransferEvent
from common.engine.transfers.mover import Mover
from common.engine.transfers.port import TransferPort
from common.errors import BatonError
from common.step_budget import MIN_PREFILL_TOKENS
from common.step_times import Line
from common.types import (
    BlockHash,
    FinishReason,
    RequestId,
    SampledToken,
    SamplingParams,
    TransferId,
    group_key,
    hash_partial_block,
    hash_prompt,
    root_hash,
)
from tests.unit.common.engine.fake_ranks import DIGEST_BYTES, FakeRanks, Medium, RankedKV, RankMedium, sent

BLOCK_SIZE = 4
EOS = 2
ONE_WINDOW = (dataclasses.replace(ONE_GROUP[0], kind="window", window=6),)
TWO_GROUPS = (*ONE_GROUP, *ONE_WINDOW)
WITH_CHUNKS = (*ONE_GROUP, dataclasses.replace(ONE_GROUP[0], kind="chunked", window=6))
ALL_DRAFTS = ("none", "none", "right", "wrong", "half")
STATE = dataclasses.replace(ONE_GROUP[0], kind="state", state_bytes=4)
WITH_STATES = (*ONE_GROUP, STATE, STATE)
ALL_GROUPS = (ONE_GROUP, TWO_GROUPS, ONE_WINDOW, WITH_CHUNKS, WITH_STATES, (STATE,))
VOCAB_SIZE = 32


class SyncActor:
    """Runs a Mover on the thread of whoever puts a message. See TransferActor."""

    def __init__(self) -> None:
        self.mover: Mover | None = None  # set by the FakeEngine
        self.on_outputs: Callable[[list[RequestOutput]], None] = lambda _: None
        self._events: list[TransferEvent] = []

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def put(self, message: Message) -> None:
        assert self.mover is not None
        self.mover.handle(message)
        self.flush()

    def settle(self, result: TransferResult) -> None:
        assert self.mover is not None
        self.mover.settle([result])
        self.flush()

    def flush(self) -> None:
        assert self.mover is not None
        self._events += self.mover.take_events()
        if outputs := self.mover.take_outputs():
            self.on_outputs(outputs)

    def take_events(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events


class SchedulerWithTransfers(Scheduler):
    """A Scheduler that states what an EngineCore adds to it."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, facts: ConnectorFacts, **settings: Any) -> None:
        self.facts = facts
        self.kv = kv
        self.actor = SyncActor()
        self.port = TransferPort(kv, facts, self.actor, PhaseClock())
        super().__init__(config, kv, transfers=self.port, **settings)

    @property
    def has_unfinished(self) -> bool:
        return super().has_unfinished or len(self.port) > 0

    def stats(self) -> EngineStats:
        return self.port.figures(super().stats())

    def check_integrity(self) -> IntegrityReport:
        return msgspec.structs.replace(super().check_integrity(), num_transfers=len(self.port))


def create_scheduler(
    *,
    num_blocks: int = 65,
    block_size: int = BLOCK_SIZE,
    max_model_len: int | None = None,
    enable_prefix_caching: bool = True,
    is_direct: bool = False,
    max_concurrent_batches: int = 1,
    most_asked: Asked = NOTHING_ASKED,
    keeps_blocks: bool = False,
    wants_offloads: bool = False,
    groups: Sequence[KVGroupSpec] = ONE_GROUP,
    part_blocks: int | None = None,
    measured_steps: Sequence[tuple[int, float]] = (),
    watermark: float = 0.0,
    min_prefill_tokens: int = MIN_PREFILL_TOKENS,
    grammars: Grammars | None = None,
    **settings: Any,
) -> SchedulerWithTransfers:
    """A scheduler of `num_blocks - 1` usable blocks; `settings` are those of SchedulerConfig. `max_model_len` is 64, or
    less if that does not fit."""
    kv_groups = KVGroups(groups, block_size)
    fitting = max_spans_in(groups, num_blocks - 1, 64 // block_size) * block_size
    return SchedulerWithTransfers(
        SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 16, "target_itl_ms": None} | settings),
        create_kv_cache_manager(num_blocks, kv_groups, enable_prefix_caching=enable_prefix_caching),
        ConnectorFacts(
            is_direct=is_direct, keeps_blocks=keeps_blocks, wants_offloads=wants_offloads, part_blocks=part_blocks
        ),
        max_model_len=min(64, fitting) if max_model_len is None else max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        measured_steps=measured_steps,
        watermark=watermark,
        min_prefill_tokens=min_prefill_tokens,
        max_concurrent_batches=max_concurrent_batches,
        most_asked=most_asked,
        grammars=grammars,
    )


def create_request(
    request_id: str = "a",
    prompt: int | Sequence[int] = 6,
    *,
    role: str | None = None,
    epoch: int = 1,
    output: Sequence[int] = (),
    cache_salt: str = "",
    priority: int = 0,
    **sampling: Any,
) -> AddRequest:
    """A request. `prompt` is its tokens, or how many different ones; `sampling` are those of SamplingParams."""
    if isinstance(prompt, int):
        start = sum(request_id.encode())
        prompt = [3 + (start * 7 + index * 5) % (VOCAB_SIZE - 3) for index in range(prompt)]
    return AddRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        sampling=SamplingParams(**{"max_tokens": 4, "ignore_eos": True} | sampling),
        cache_salt=cache_salt,
        priority=priority,
        transfer=KVTransferParams(
            transfer_id=TransferId(request_id),
            epoch=epoch,
            role=role,  # type: ignore[arg-type]
        )
        if role
        else None,
    )


def create_requests(count: int, prompt: int = 6, **settings: Any) -> list[AddRequest]:
    """`count` requests, r0, r1, ..., with different prompts."""
    return [create_request(f"r{index}", prompt, **settings) for index in range(count)]


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    """What the KV slot of each token holds: a number that depends on the token and all before it."""
    values, value = [], 1
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 1) % (1 << 61)
        values.append(value)
    return values


def next_token(fingerprint: int) -> int:
    """The token that follows the one with this fingerprint."""
    return (fingerprint >> 7) % VOCAB_SIZE


def create_proposer(accuracy: Accuracy | Literal["none"], num_drafts: int = 3) -> Proposer | None:
    """Proposes what a FakeEngine samples, or something else."""
    if accuracy == "none":
        return None
    return FakeProposer(lambda tokens, _: next_token(fingerprints(tokens)[-1]), accuracy, num_drafts, VOCAB_SIZE)


def expected_output(
    request: AddRequest, *, max_model_len: int = 64, eos: Iterable[int] = (EOS,)
) -> tuple[list[int], FinishReason]:
    """All output tokens of `request`, those it came with included, and why it ends."""
    sampling = request.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    output = list(request.output_token_ids)
    while True:
        tokens = request.prompt_token_ids + output
        output.append(next_token(fingerprints(tokens)[-1]))
        if output[-1] in stops and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= sampling.max_tokens or len(tokens) + 1 >= max_model_len:
            return output, FinishReason.LENGTH


def first_token(request: AddRequest) -> SampledToken:
    """What the prefill pod samples for `request`."""
    tokens = request.prompt_token_ids + request.output_token_ids
    return SampledToken(next_token(fingerprints(tokens)[-1]))


def digest_of(values: Sequence[int]) -> bytes:
    """What a direct connector says of a block that holds these fingerprints."""
    return hashlib.blake2b(repr(list(values)).encode(), digest_size=DIGEST_BYTES).digest()


def prompt_digests(request: AddRequest, num_held_tokens: int = 0) -> list[bytes]:
    """What a direct connector says of the prompt's blocks after the held ones."""
    values = fingerprints(request.prompt_token_ids)
    return [digest_of(values[i : i + BLOCK_SIZE]) for i in range(num_held_tokens, len(values), BLOCK_SIZE)]


def valid_contents(transfer: BlockTransfer, contents: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """What blocks hold, without the free slots of the last ones."""
    num_full = len(contents) - transfer.num_last
    return [*contents[:num_full], *(content[: transfer.num_tokens_in_last] for content in contents[num_full:])]


def stored_prompt(
    request: AddRequest, block_size: int = BLOCK_SIZE, *, groups: Sequence[KVGroupSpec] = ONE_GROUP
) -> dict[BlockHash, list[int]]:
    """Content of the medium after the KV of the whole prompt was saved, in the order of the tokens."""
    tokens, root = request.prompt_token_ids, root_hash(request.cache_salt)
    hashes = hash_prompt(tokens, block_size, root)
    if len(tokens) % block_size:
        hashes.append(hash_partial_block(tokens, block_size, hashes.copy(), root))
    values = fingerprints(tokens)
    contents = [values[start : start + block_size] for start in range(0, len(values), block_size)]
    return {
        group_key(block_hash, number): content[-1:] * len(content) if group.kind == "state" else content
        for block_hash, content in zip(hashes, contents, strict=True)
        for number, group in enumerate(groups)
    }


class _RunningRequest:
    def __init__(self, new: NewRequest) -> None:
        self.token_ids = new.token_ids
        self.block_tables = [list(table) for table in new.block_ids]
        self.num_computed_tokens = new.num_computed_tokens
        self.num_leaving_tokens = new.num_prompt_tokens if new.is_producer else 0
        self.state_lengths: dict[int, set[int]] = {}  # of each group of states: tokens before those at hand
        self.states_read: dict[int, int] = {}  # from the group's blocks, by the step


@dataclass
class Step:
    """A step of a FakeEngine: what was computed, and what the connector was asked since the step before."""

    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[RequestId, list[list[int]]] = field(default_factory=dict)
    num_scheduled_tokens: dict[RequestId, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    work: float = 0.0
    num_context_tokens: int = 0
    dropped_request_ids: list[RequestId] = field(default_factory=list)
    loads: list[BlockTransfer] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)
    lookups: list[BlockTransfer] = field(default_factory=list)
    cancelled_job_ids: list[int] = field(default_factory=list)


class FakeEngine:
    """A scheduler, a model runner, transfers, and a connector whose jobs settle when the test says so.

    A load or a save touches its blocks when it settles, as late as a real transport may. Transfers hear of news at
    once, also in the middle of a step, between `begin_step` and `end_step`; what the scheduler is told then waits for
    its end.

    One of several ranks has jobs that each rank settles on its own: the test settles each as often as there are ranks.

    One that runs ahead schedules a step before the one that runs is over, as an engine on a GPU does. What that step
    writes is written as late as may be: when it ends.
    """

    def __init__(
        self,
        scheduler: SchedulerWithTransfers | None = None,
        *,
        block_size: int = BLOCK_SIZE,
        settle_at_once: bool = False,
        runs_ahead: bool = False,
        depth: int = 1,
        proposer: Proposer | None = None,
        num_ranks: int = 1,
        passes: Line | None = None,
    ) -> None:
        self.passes = passes  # of a draft model that the proposer is taken for: times of each
        self.num_short_of_room = 0  # drafts that were asked for, and for whose KV there was no block
        self.scheduler = scheduler or create_scheduler(block_size=block_size)
        self._groups = self.scheduler.kv.groups
        self.block_size = block_size
        self.settle_at_once = settle_at_once
        self.runs_ahead = runs_ahead
        self.depth = depth  # steps in flight, as in a pipeline: each is scheduled before the one before it is over
        self._queue: deque[SchedulerOutput] = deque()  # in flight, but for the first
        self.proposer = proposer
        self.num_right_drafts = 0
        self.num_ahead = 0  # steps that were scheduled ahead
        self._ahead: SchedulerOutput | None = None
        self.now = 0.0
        self.machine: Line | None = None  # steps take so long; else a second, and the scheduler is told 10 ms
        self.medium: dict[BlockHash, list[int]] = {}
        self.jobs: dict[int, tuple[str, BlockTransfer]] = {}  # not settled: "load", "save" or "lookup"
        self.outputs: dict[RequestId, list[int]] = {}  # token by index
        self.finished: dict[RequestId, FinishReason] = {}
        self.events: dict[RequestId, list[RequestEvent]] = {}
        self.cancelled: set[int] = set()
        self.broken: set[str] = set()  # requests whose logits are not finite
        self.late: set[str] = set()  # requests whose next sample is put off once, as the grammar's mask is late
        self.errors: dict[RequestId, tuple[int, str]] = {}  # code and message of those that failed
        self.address = b""
        self.peers: dict[bytes, FakeEngine] = {}  # whom a direct connector can write to
        self.windows: dict[RequestId, list[int]] = {}  # blocks reserved for a producer that is not quiescent
        self._put_off: list[RequestId] = []  # whose masks come before the next step is scheduled
        self._epochs: dict[RequestId, int] = {}
        self._ranks = FakeRanks(num_ranks, self) if num_ranks > 1 else None
        self._kv: dict[int, int] | RankedKV = {} if self._ranks is None else self._ranks.kv  # slot -> fingerprint
        self._running: dict[RequestId, _RunningRequest] = {}
        self._asked = Step()  # of the connector, since the last step
        self._scheduled: SchedulerOutput | None = None  # the step that runs
        self._deferred: list[Callable[[], None]] = []  # what the scheduler is told at its end
        self._actor = self.scheduler.actor
        connector = self if self._ranks is None else self._ranks.connector
        self._actor.mover = Mover(connector, self.scheduler.facts, self._groups, lambda: self.now)
        self._actor.on_outputs = self._collect

    # -- commands ---------------------------------------------------------------------------------------------------

    def add(self, *requests: AddRequest) -> None:
        for request in requests:
            request_id, transfer = request.request_id, request.transfer
            self.outputs[request_id] = list(request.output_token_ids)
            self.finished.pop(request_id, None)
            self.events[request_id] = []
            if transfer is not None:
                is_producer, num_prompt_tokens = transfer.role == "producer", len(request.prompt_token_ids)
                self._epochs[request_id] = transfer.epoch
                self.tell(Announce(request_id, transfer.epoch, is_producer, num_prompt_tokens))
            self._between_steps(partial(self._add, request))
            self._settle_if_at_once()

    def _add(self, request: AddRequest) -> None:
        try:
            self.scheduler.add_request(request, self.now)
        except BatonError:
            if request.transfer is not None and not self.scheduler.port.knows(request.request_id):
                self.tell(End(request.request_id, is_aborted=True))
            raise

    def abort(self, *request_ids: str) -> list[RequestOutput]:
        """What the scheduler answered; nothing yet if a step runs."""
        ids = [RequestId(request_id) for request_id in request_ids]
        self.tell(AbortRequests(ids))
        answers: list[RequestOutput] = []

        def abort() -> None:
            answers.extend(self.scheduler.abort_requests(ids))
            self._collect(answers)

        self._between_steps(abort)
        return answers

    def _between_steps(self, call: Callable[[], None]) -> None:
        if self._scheduled is None:
            call()
        else:
            self._deferred.append(call)

    def update_transfer(
        self, request_id: str, num_ready_tokens: int, *, epoch: int = 1, is_quiescent: bool = False, **settings: Any
    ) -> None:
        if is_quiescent:
            self.quiesce(request_id, epoch=epoch)
        self.tell(
            TransferUpdate(request_id=RequestId(request_id), epoch=epoch, num_ready_tokens=num_ready_tokens, **settings)
        )

    def quiesce(self, request_id: str, *, epoch: int = 1) -> None:
        if self._epochs.get(RequestId(request_id)) == epoch:
            self.windows.pop(RequestId(request_id), None)
        self.tell(TransferQuiesced(request_id=RequestId(request_id), epoch=epoch))

    def set_target(
        self, request_id: str, block_ids: Sequence[int], *, held: int = 0, epoch: int = 1, address: bytes = b"peer"
    ) -> None:
        self.tell(
            TransferTarget(
                request_id=RequestId(request_id),
                epoch=epoch,
                address=address,
                num_held_tokens=held,
                block_ids=list(block_ids),
            )
        )

    def tell(self, message: Message) -> None:
        """Transfers hear it at once."""
        self._actor.put(message)
        self._settle_if_at_once()

    # -- the connector, see WorkerConnector -------------------------------------------------------------------------

    def start_load(self, transfer: BlockTransfer) -> None:
        self.jobs[transfer.job_id] = ("load", transfer)
        self._asked.loads.append(transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        self.jobs[transfer.job_id] = ("save", transfer)
        self._asked.saves.append(transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        assert not transfer.block_ids
        assert transfer.is_for_tier
        self.jobs[transfer.job_id] = ("lookup", transfer)
        self._asked.lookups.append(transfer)

    def cancel(self, job_id: int) -> None:
        self.cancelled.add(job_id)
        self._asked.cancelled_job_ids.append(job_id)

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """One step of the engine; `self.now` advances by a second."""
        self.begin_step()
        return self.end_step()

    @property
    def is_stepping(self) -> bool:
        """A step runs."""
        return self._scheduled is not None

    def begin_step(self) -> None:
        """What is scheduled now is computed by `end_step`."""
        assert self._scheduled is None
        self._scheduled, self._ahead = self._ahead, None
        if self._scheduled is None:
            self._scheduled = self._queue.popleft() if self._queue else self._schedule()
        while len(self._queue) < self.depth - 1 and self._scheduled.num_scheduled_tokens:
            self._queue.append(self._schedule())
        if self.runs_ahead and self._scheduled.num_scheduled_tokens:
            self._ahead = self.scheduler.schedule_ahead()
            self.num_ahead += self._ahead is not None

    def _schedule(self) -> SchedulerOutput:
        self.scheduler.masks_arrived(self._put_off)
        self._put_off.clear()
        step = self.scheduler.schedule(self.now)
        for request_id in step.num_scheduled_tokens:
            request, num_drafts = self.scheduler._places.live[request_id], len(step.drafts.get(request_id, []))
            assert request.num_scheduled_tokens - num_drafts <= request.num_tokens, "it computes unknown tokens"
        self._collect(self.scheduler.take_urgent_outputs())
        return step

    def end_step(self) -> Step:
        """What was computed, and what the connector was asked since the last step."""
        scheduled, self._scheduled = self._scheduled, None
        assert scheduled is not None
        step_s = 0.01 if self.machine is None else self.machine.at(scheduled.work, scheduled.num_context_tokens)
        result = self._execute(scheduled)
        step_s += 0.0 if result.drafting is None else result.drafting.seconds
        self.now += 1.0 if self.machine is None else step_s
        self._collect(self.scheduler.update(scheduled, result, step_s))
        self._settle_if_at_once()
        deferred, self._deferred = self._deferred, []
        for call in deferred:
            call()
        step, self._asked = self._asked, Step()
        step.new_requests = scheduled.new_requests
        step.new_block_ids = scheduled.new_block_ids
        step.num_scheduled_tokens = scheduled.num_scheduled_tokens
        step.total_num_scheduled_tokens = scheduled.total_num_scheduled_tokens
        step.work = scheduled.work
        step.num_context_tokens = scheduled.num_context_tokens
        step.dropped_request_ids = scheduled.dropped_request_ids
        return step

    def run(self, max_steps: int = 1000) -> int:
        """Step until there is nothing to do; how many steps that took."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work and self._ahead is None and not self._queue:
                return num_steps
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.stats()}")

    def settle(self, job_id: int | None = None, num_blocks_ok: float = math.inf, error: str = "") -> None:
        """Let one job (the oldest) end after `num_blocks_ok` blocks; of several ranks, on one of them."""
        job_id = next(iter(self.jobs)) if job_id is None else job_id
        kind, transfer = self.jobs[job_id]
        if self._ranks is None:
            del self.jobs[job_id]
            self._actor.settle(self._move(kind, transfer, num_blocks_ok, error, self._kv, self.medium))
            return
        rank, part = self._ranks.next_of(job_id)
        medium = self._ranks.medium_of(self.medium, rank)
        self._ranks.settle(rank, self._move(kind, part, num_blocks_ok, error, self._ranks.kv.parts[rank], medium))
        self._poll_ranks(self._ranks)

    def _poll_ranks(self, ranks: FakeRanks) -> None:
        for result in ranks.connector.poll():
            del self.jobs[result.job_id]
            self._actor.settle(result)

    def _move(
        self,
        kind: str,
        transfer: BlockTransfer,
        num_blocks_ok: float,
        error: str,
        kv: dict[int, int] | RankedKV,
        medium: Medium | RankMedium,
    ) -> TransferResult:
        """A job is done as far as may be, between this KV cache and this medium."""
        job_id = transfer.job_id
        if transfer.destination is not None or transfer.digests:
            return self._move_directly(transfer, num_blocks_ok, error, kv)
        if kind == "lookup":
            kept = [block_hash in medium for block_hash in transfer.block_hashes]
            kept = kept[: int(min(len(kept), num_blocks_ok))]
            num_kept = [*kept, False].index(False)
            found = (*kept, *[False] * (len(transfer.block_hashes) - len(kept)))
            return TransferResult(job_id=job_id, num_blocks_ok=num_kept, error=error, found=found)
        num_ok = 0
        for index, (block_id, block_hash) in enumerate(zip(transfer.block_ids, transfer.block_hashes, strict=True)):
            is_last = index >= len(transfer.block_ids) - transfer.num_last
            num_tokens = transfer.num_tokens_in_last if is_last else self.block_size
            slots = range(block_id * self.block_size, block_id * self.block_size + num_tokens)
            if index >= num_blocks_ok:
                self._scribble(kind, block_id, kv)
                break
            if kind == "save":
                medium[block_hash] = [kv[slot] for slot in slots]
            elif block_hash not in medium:
                error = error or "block_missing"
                self._scribble(kind, block_id, kv)
                break
            else:
                assert len(medium[block_hash]) == num_tokens
                kv.update(zip(slots, medium[block_hash], strict=True))
            num_ok += 1
        return TransferResult(job_id=job_id, num_blocks_ok=num_ok, error=error)

    def settle_as(self, result: TransferResult) -> None:
        """Let a job end as `result` says; what it moved is the test's affair."""
        if self._ranks is not None:
            self._ranks.settle_all(result)
            self._poll_ranks(self._ranks)
            return
        del self.jobs[result.job_id]
        self._actor.settle(result)

    def _move_directly(
        self, transfer: BlockTransfer, num_blocks_ok: float, error: str, kv: dict[int, int] | RankedKV
    ) -> TransferResult:
        contents = valid_contents(transfer, [self._content(block_id, kv) for block_id in transfer.block_ids])
        digests = tuple(digest_of(content) for content in contents)
        if transfer.destination is None:
            matches = [digest == told for digest, told in zip(digests, transfer.digests, strict=True)]
            num_ok = min([*matches, False].index(False), num_blocks_ok)
            return TransferResult(transfer.job_id, int(num_ok), error or "" if all(matches) else "block_corrupt")
        num_ok = int(min(len(contents), num_blocks_ok))
        peer = self.peers.get(transfer.destination.address)
        if peer is not None:
            for block_id, content in zip(transfer.destination.block_ids[:num_ok], contents, strict=False):
                peer.write_block(block_id, content)
        return TransferResult(transfer.job_id, num_ok, error, digests[:num_ok])

    def block(self, block_id: int) -> list[int]:
        """What a block holds."""
        return self._content(block_id, self._kv)

    def _content(self, block_id: int, kv: dict[int, int] | RankedKV) -> list[int]:
        return [kv.get(block_id * self.block_size + offset, -1) for offset in range(self.block_size)]

    def digest_of(self, content: Sequence[int]) -> bytes:
        """What its connector says of a block that holds these fingerprints."""
        if self._ranks is None:
            return digest_of(content)
        return b"".join(digest_of(self._ranks.kv.shares(content, rank)) for rank in range(len(self._ranks)))

    def of_all_ranks(self, address: bytes) -> bytes:
        """The address of a connector each of whose ranks has this one."""
        return address if self._ranks is None else encode_address(address) * len(self._ranks)

    def write_block(self, block_id: int, content: Sequence[int]) -> None:
        """What a peer does, at any time."""
        self._kv.update({block_id * self.block_size + offset: value for offset, value in enumerate(content)})

    def settle_all(self) -> None:
        while self.jobs:
            self.settle()

    def _settle_if_at_once(self) -> None:
        if self.settle_at_once:
            self.settle_all()

    def assert_sound(self) -> None:
        assert self.scheduler.check_integrity().violations == []

    def assert_idle(self) -> None:
        """Nothing is left over, once what has arrived is taken note of."""
        self.run()
        report, stats = self.scheduler.check_integrity(), self.scheduler.stats()
        assert report.violations == []
        assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_queued_tokens == 0
        assert not self.scheduler.has_unfinished
        assert not self.scheduler.has_work
        assert not self._running

    def _scribble(self, kind: str, block_id: int, kv: dict[int, int] | RankedKV) -> None:
        if kind == "load":  # a failed load leaves garbage
            kv.update({block_id * self.block_size + offset: -1 for offset in range(self.block_size)})

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._compute(step) if self._ranks is None else sent(self._compute(sent(step)))

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.dropped_request_ids:
            del self._running[request_id]
        self._take_membership(step)
        assert {new.request_id for new in step.new_requests} <= step.num_scheduled_tokens.keys()
        assert step.new_block_ids.keys() <= step.num_scheduled_tokens.keys()
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        for request_id, count in step.num_scheduled_tokens.items():
            assert count > 0
            request = self._running[request_id]
            drafts = step.drafts.get(request_id, [])
            self._write(request, request.num_computed_tokens, request.num_computed_tokens + count, drafts)
            request.num_computed_tokens += count
        outcomes: dict[RequestId, Outcome] = {}
        awaited = {request.request_id for request in self.scheduler._lifecycle.in_flight}  # others have left
        for request_id in step.num_scheduled_tokens:
            request = self._running[request_id]
            stop = request.num_computed_tokens
            if request_id in awaited:
                known = request.token_ids + step.drafts.get(request_id, [])
                self._check_reads(request, known[:stop], stop - step.num_scheduled_tokens[request_id])
            if request_id in step.drafts:
                request.num_computed_tokens -= len(step.drafts[request_id])
                stop = request.num_computed_tokens
                assert stop == len(request.token_ids)
            if stop == len(request.token_ids) and request_id in self.broken:
                outcomes[request_id] = NoToken.NON_FINITE
                request.token_ids.append(0)  # a step that runs ahead goes on with anything
            elif stop == len(request.token_ids) and request_id in self.late:
                self.late.discard(request_id)
                outcomes[request_id] = NoToken.NOT_YET
                self._put_off.append(request_id)
                request.num_computed_tokens -= 1
            elif stop == len(request.token_ids):
                outcomes[request_id] = self._sample(request, step.drafts.get(request_id, []))
                request.num_computed_tokens = len(request.token_ids) - 1
        drafts = self._propose(outcomes)
        if self.passes is None:
            return ModelRunnerOutput(outcomes, drafts=drafts)
        drafts = {each: self._that_have_room(each, found[: step.asked.num_drafts]) for each, found in drafts.items()}
        num_passes = max(map(len, drafts.values()), default=0)
        drafting = Drafting(num_passes, len(drafts), num_passes * self.passes.at(len(drafts), 0))
        return ModelRunnerOutput(outcomes, drafts=drafts, drafting=drafting)

    def _that_have_room(self, request_id: RequestId, drafts: list[int]) -> list[int]:
        """A draft model writes the KV of all but the last of its drafts to the request's blocks."""
        request = self._running[request_id]
        live = self.scheduler._places.live.get(request_id)
        drafts = [] if live is None else drafts[: max(live.max_num_tokens - len(request.token_ids) - 1, 0)]
        room = len(request.block_tables[0]) * self.block_size - len(request.token_ids) + 1
        self.num_short_of_room += len(drafts[max(room, 0) :])
        return drafts[: max(room, 0)]

    def _sample(self, request: _RunningRequest, drafts: list[int]) -> list[SampledToken]:
        tokens: list[SampledToken] = []
        for draft in (*drafts, None):
            tokens.append(SampledToken(next_token(fingerprints(request.token_ids)[-1])))
            request.token_ids.append(tokens[-1].token_id)
            if tokens[-1].token_id != draft:
                break
        self.num_right_drafts += len(tokens) - 1
        return tokens

    def _propose(self, outcomes: dict[RequestId, Outcome]) -> dict[RequestId, list[int]]:
        if self.proposer is None:
            return {}
        sampled = [request_id for request_id, outcome in outcomes.items() if isinstance(outcome, list)]
        contexts = [Context(each, np.array(self._running[each].token_ids)) for each in sampled]
        return {each: found for each, found in zip(sampled, self.proposer.propose(contexts), strict=True) if found}

    def _take_membership(self, step: SchedulerOutput) -> None:
        for new in step.new_requests:
            assert new.request_id not in self._running
            self._running[new.request_id] = _RunningRequest(new)
        for request_id, block_ids in step.new_block_ids.items():
            for table, added in zip(self._running[request_id].block_tables, block_ids, strict=True):
                table += added

    def _slot(self, table: list[int], position: int) -> int:
        block_id = table[position // self.block_size]
        assert block_id != 0, "the null block was allocated"
        return block_id * self.block_size + position % self.block_size

    def _write(self, request: _RunningRequest, start: int, stop: int, drafts: list[int]) -> None:
        values = fingerprints(request.token_ids + drafts)
        moving = {block_id for _, transfer in self.jobs.values() for block_id in transfer.block_ids}
        moving.update(*self.windows.values())
        request.states_read.clear()
        for group, table in enumerate(request.block_tables):
            if self._groups.kinds[group].is_state:
                self._write_states(request, group, range(start, stop), values, moving)
                continue
            for position in range(start, stop):
                slot = self._slot(table, position)
                assert slot // self.block_size not in moving, "a block under transfer changes"
                self._kv[slot] = values[position]

    def _write_states(
        self, request: _RunningRequest, group: int, positions: range, values: list[int], moving: set[int]
    ) -> None:
        """All slots of a block hold the state after its last token, or the prompt's."""
        table, start = request.block_tables[group], positions.start
        if start and start not in request.state_lengths.get(group, ()):
            request.states_read[group] = self._kv.get(self._slot(table, start - 1), -1)
        request.state_lengths[group] = {*positions, positions.stop}
        for position in positions:
            span, length = position // self.block_size, position + 1
            block_id, leaving = table[span], request.num_leaving_tokens
            is_handed_over = leaving > 0 and (leaving - 1) // self.block_size == span
            if block_id and (length == leaving if is_handed_over else length % self.block_size == 0):
                assert block_id not in moving, "a block under transfer changes"
                self.write_block(block_id, [values[position]] * self.block_size)

    def _check_reads(self, request: _RunningRequest, token_ids: list[int], start: int) -> None:
        """The tokens from `start` on read, in each group, what those before them and they themselves have written."""
        for group, (table, kind) in enumerate(zip(request.block_tables, self._groups.kinds, strict=True)):
            if kind.is_state:
                expected = fingerprints(token_ids)[start - 1]
                assert request.states_read.get(group, expected) == expected, "it goes on from another state"
                continue
            first = kind.num_skipped_tokens(start)
            read = [self._kv.get(self._slot(table, position), -1) for position in range(first, len(token_ids))]
            assert read == fingerprints(token_ids)[first:], "it reads other KV"

    def _collect(self, outputs: list[RequestOutput]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            tokens = self.outputs[output.request_id]
            if output.tokens:
                assert output.request_id not in self.finished
                assert output.start_index == len(tokens)
            tokens += [token.token_id for token in output.tokens]
            self.events[output.request_id] += output.events
            for event in output.events:
                if isinstance(event, RequestStarted) and self._has_window(output.request_id):
                    self.windows[output.request_id] = event.reserved_block_ids
            if output.finish_reason is not None:
                assert output.request_id not in self.finished
                self.finished[output.request_id] = output.finish_reason
            if output.finish_reason is FinishReason.ERROR:
                self.errors[output.request_id] = output.error_code, output.error

    def _has_window(self, request_id: RequestId) -> bool:
        incoming = self._actor.mover._incoming.get(request_id)
        return incoming is not None and incoming.is_window_open


def connect_directly(*engines: FakeEngine) -> None:
    """Give each engine an address under which the others write into its KV cache."""
    for index, engine in enumerate(engines):
        engine.address = b"engine-%d" % index
    for engine in engines:
        engine.peers = {peer.address: peer for peer in engines}
