"""A producer, a consumer that it writes to, and everything between them that may go wrong.

Messages are lost, doubled and overtake each other, and arrive between two steps or in the middle of one; writes land
late, damaged, or after their sender has died; either side gives up or ends at any time. Then: no block is free or
another's while a write to it may be under way, no byte that was not checked is ever read, every request ends with the
right tokens, and every block returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.engine.messages import AddRequest, KVReceived, KVSaved, RequestStarted, TransferTarget, TransferUpdate
from common.errors import InvalidRequestError
from common.types import FinishReason, RequestId
from tests.unit.common.engine.scheduler_factories import (
    ALL_DRAFTS,
    ALL_GROUPS,
    BLOCK_SIZE,
    ONE_GROUP,
    FakeEngine,
    create_proposer,
    create_request,
    create_scheduler,
    expected_output,
    first_token,
    valid_contents,
)

MAX_MODEL_LEN = 24
MAX_STEPS = 1000  # to the end of all
MAX_ATTEMPTS = 3  # at once; with more, most would wait for blocks and little would move
PROMPTS = st.integers(1, 14).flatmap(lambda size: st.lists(st.integers(10, 11), min_size=size, max_size=size))
T = TypeVar("T")
GARBAGE = [-9, -9, -9, -9]


@dataclass
class Attempt:
    """One handoff of one request: what the two pods know of it."""

    request: AddRequest
    epoch: int
    incarnation: int  # of the producer
    is_over: bool = False  # as far as the decode pod knows: its producer is told nothing more
    producer_ended: bool = False  # it has reported its end, or died: it starts no more writes
    owes_quiescence: bool = False  # the producer died: its consumer's pod waits until no write can arrive
    num_saved: int = 0
    failure: str = ""
    has_first_token: bool = False
    consumer_events: list[object] = field(default_factory=list)


@dataclass(eq=False)
class News:
    """What the consumer is told."""

    update: TransferUpdate
    is_quiescent: bool  # and before that, that its producer writes no more


@dataclass(eq=False)
class Write:
    """One block on its way."""

    attempt: Attempt
    job_id: int
    index: int  # in the job
    source: int
    target: int
    content: list[int]  # when it started
    is_orphan: bool = False  # its sender died
    has_landed: bool = False


class Producer(FakeEngine):
    """Whose saves are told of as they start."""

    def __init__(self, on_save: Callable[[BlockTransfer], None], num_ranks: int, **settings: Any) -> None:
        super().__init__(create_scheduler(max_model_len=MAX_MODEL_LEN, is_direct=True, **settings), num_ranks=num_ranks)
        self._on_save = on_save

    def start_save(self, transfer: BlockTransfer) -> None:
        super().start_save(transfer)
        self._on_save(transfer)


def drawn(data, candidates: list[T]) -> list[T]:
    """One of them, if there are any."""
    return [candidates[data.draw(st.integers(0, len(candidates) - 1))]] if candidates else []


class DirectHandoffMachine(RuleBasedStateMachine):
    """`FakeEngine` compares the KV that each step reads with the request's tokens, and refuses to compute into blocks
    that a producer may write to; the rest is checked here."""

    num_ranks = 1

    @initialize(
        num_blocks=st.integers(7, 16),
        budget=st.integers(2, 16),
        chunk=st.integers(2, 12),
        part_blocks=st.sampled_from([None, 1, 2]),
        prefix_caching=st.booleans(),
        runs_ahead=st.booleans(),
        depth=st.sampled_from([1, 1, 2, 3]),
        drafts=st.sampled_from(ALL_DRAFTS),
        groups=st.sampled_from(ALL_GROUPS),
    )
    def start(
        self,
        num_blocks,
        budget,
        chunk,
        part_blocks,
        prefix_caching,
        runs_ahead=False,
        depth=1,
        drafts="none",
        groups=ONE_GROUP,
    ):
        self.chunk, self.part_blocks, self.groups = chunk, part_blocks, groups
        self.decode = FakeEngine(
            create_scheduler(
                num_blocks=1 + (num_blocks - 1) * len(groups),
                groups=groups,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=budget,
                enable_prefix_caching=prefix_caching,
                is_direct=True,
                max_concurrent_batches=depth,
            ),
            runs_ahead=runs_ahead and depth == 1,
            depth=depth,
            proposer=create_proposer(drafts),
            num_ranks=self.num_ranks,
        )
        self.incarnation = 0
        self.prefill = self.start_prefill()
        self.attempts: dict[RequestId, Attempt] = {}  # the latest of each request
        self.plain: dict[RequestId, AddRequest] = {}
        self.to_decode: list[News] = []
        self.to_prefill: list[TransferTarget] = []
        self.writes: list[Write] = []
        self.num_seen: dict[tuple[str, RequestId], int] = {}  # events carried already, by side

    def start_prefill(self) -> Producer:
        self.incarnation += 1
        limits = {"max_num_batched_tokens": self.chunk, "part_blocks": self.part_blocks}
        num_blocks = 1 + 12 * len(self.groups)
        return Producer(self._start_writes, self.num_ranks, num_blocks=num_blocks, groups=self.groups, **limits)

    # -- requests ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.alive(producers=False)) < MAX_ATTEMPTS)
    @rule(
        prompt=PROMPTS,
        output=st.lists(st.integers(10, 11), max_size=2),
        max_tokens=st.integers(1, 6),
        is_alike=st.booleans(),
    )
    def add(self, prompt, output, max_tokens, is_alike):
        if is_alike:  # prefix caches know its head
            prompt = [10] * min(len(prompt), 4) + prompt[4:]
        name = f"r{len(self.attempts)}"
        self._attempt(create_request(name, prompt, output=output, max_tokens=max_tokens + len(output)), epoch=1)

    @precondition(lambda self: len(self.decode.scheduler._places.live) < MAX_ATTEMPTS)
    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 6))
    def add_plain(self, prompt, max_tokens):
        """One that decode serves alone."""
        request = create_request(f"p{len(self.plain)}", prompt, max_tokens=max_tokens)
        self.plain[request.request_id] = request
        self.decode.add(request)

    @precondition(lambda self: self.retryable())
    @rule(data=st.data())
    def retry(self, data):
        """With an id of its own, as pods give each attempt in their engines."""
        attempt = data.draw(st.sampled_from(self.retryable()))
        request_id = RequestId(f"{attempt.request.request_id}+")
        self._attempt(msgspec.structs.replace(attempt.request, request_id=request_id), attempt.epoch + 1)

    def retryable(self) -> list[Attempt]:
        return [
            attempt
            for request_id, attempt in self.attempts.items()
            if attempt.producer_ended and request_id in self.decode.finished and f"{request_id}+" not in self.attempts
        ]

    def _attempt(self, plain: AddRequest, epoch: int) -> None:
        self.attempts[plain.request_id] = Attempt(plain, epoch, self.incarnation)
        for engine, role in ((self.prefill, "producer"), (self.decode, "consumer")):
            engine.add(
                create_request(
                    plain.request_id,
                    plain.prompt_token_ids,
                    role=role,
                    epoch=epoch,
                    output=plain.output_token_ids,
                    max_tokens=plain.sampling.max_tokens,
                )
            )
            self.num_seen[role, plain.request_id] = 0

    def alive(self, *, producers: bool) -> list[Attempt]:
        return [
            attempt
            for request_id, attempt in self.attempts.items()
            if not (attempt.producer_ended if producers else request_id in self.decode.finished)
        ]

    # -- the engines ------------------------------------------------------------------------------------------------

    @rule()
    def step_prefill(self):
        self._end_step(self.prefill)
        self.prefill.step()
        self._hear_producers()

    @rule()
    def step_decode(self):
        self._end_step(self.decode)
        for load in self.decode.step().loads:
            assert len(load.digests) == len(load.block_ids), "blocks are used that nothing can be compared with"
        self._hear_consumers()

    @rule(data=st.data())
    def begin_step(self, data):
        """Whatever happens before its end happens while it runs."""
        idle = [engine for engine in (self.prefill, self.decode) if not engine.is_stepping]
        for engine in drawn(data, idle):
            engine.begin_step()
            self._hear_producers()
            self._hear_consumers()

    def _end_step(self, engine: FakeEngine) -> None:
        if engine.is_stepping:
            engine.end_step()
        self._hear_producers()
        self._hear_consumers()

    @rule(num_moves=st.integers(1, 30))
    def go_on(self, num_moves):
        """Nothing goes wrong for a while. Without this hardly any history would come to a write."""
        moves = itertools.cycle(
            [
                self.step_prefill,
                self._deliver_all_to_prefill,
                self.step_prefill,
                self._settle_saves,
                self.step_prefill,
                self._deliver_all_to_decode,
                self.step_decode,
                self.decode.settle_all,
                self.step_decode,
            ]
        )
        for move in itertools.islice(moves, num_moves):
            move()

    def _deliver_all_to_prefill(self) -> None:
        targets, self.to_prefill = self.to_prefill, []
        for target in targets:
            self._aim(target)

    def _deliver_all_to_decode(self) -> None:
        told, self.to_decode = self.to_decode, []
        for news in told:
            self._update_decode(news)

    def _settle_saves(self) -> None:
        for job_id in list(self.prefill.jobs):
            self._settle_save(job_id)

    def _hear_producers(self) -> None:
        for request_id, attempt in self.attempts.items():
            if attempt.incarnation != self.incarnation or attempt.producer_ended:
                continue
            tokens = len(self.prefill.outputs[request_id]) - len(attempt.request.output_token_ids)
            attempt.has_first_token = tokens == 1
            for event in self._news("producer", self.prefill, request_id):
                if isinstance(event, KVSaved):
                    self._hear_saved(attempt, event)
            self._conclude(attempt)

    def _hear_saved(self, attempt: Attempt, event: KVSaved) -> None:
        assert not attempt.failure
        assert event.num_tokens >= attempt.num_saved
        attempt.num_saved, attempt.failure = event.num_tokens, event.failure
        self._tell_consumer(attempt, digests=event.digests)

    def _conclude(self, attempt: Attempt) -> None:
        """A producer's last report also says that it writes no more."""
        request = attempt.request
        is_aborted = self.prefill.finished.get(request.request_id) is FinishReason.ABORT
        is_all = attempt.num_saved == len(request.prompt_token_ids)
        if attempt.failure or (is_all and (attempt.has_first_token or is_aborted)):
            assert not any(write.attempt is attempt for write in self.pending), (
                "a producer that writes says that it writes no more"
            )
            attempt.producer_ended = True
            failure = attempt.failure or ("" if attempt.has_first_token else "aborted")
            first = None if failure else first_token(request)
            self._tell_consumer(attempt, final=True, failure=failure, first_token=first, is_quiescent=True)

    def _hear_consumers(self) -> None:
        for request_id, attempt in self.attempts.items():
            for event in self._news("consumer", self.decode, request_id):
                attempt.consumer_events.append(event)
                if isinstance(event, RequestStarted) and not attempt.is_over:
                    target = TransferTarget(
                        request_id=request_id,
                        epoch=attempt.epoch,
                        address=b"decode",
                        num_held_tokens=event.num_cached_tokens,
                        block_ids=event.reserved_block_ids,
                    )
                    self.to_prefill.append(target)

    def _news(self, side: str, engine: FakeEngine, request_id: RequestId) -> list[object]:
        seen = self.num_seen[side, request_id]
        self.num_seen[side, request_id] = len(engine.events[request_id])
        return list(engine.events[request_id][seen:])

    def _tell_consumer(self, attempt: Attempt, *, is_quiescent: bool = False, **news) -> None:
        update = TransferUpdate(
            request_id=attempt.request.request_id,
            epoch=attempt.epoch,
            num_ready_tokens=attempt.num_saved,
            **news,
        )
        self.to_decode.append(News(update, is_quiescent))

    # -- the network ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.to_decode)
    @rule(index=st.integers(0, 9), stays=st.booleans())
    def deliver_to_decode(self, index, stays):
        """In any order, once or twice."""
        news = self.to_decode[index % len(self.to_decode)]
        if not stays:
            self.to_decode.remove(news)
        self._update_decode(news)

    def _update_decode(self, news: News) -> None:
        update = news.update
        self.attempts[update.request_id].is_over |= update.final
        self.decode.update_transfer(
            update.request_id,
            update.num_ready_tokens,
            epoch=update.epoch,
            final=update.final,
            failure=update.failure,
            first_token=update.first_token,
            digests=update.digests,
            is_quiescent=news.is_quiescent,
        )

    @precondition(lambda self: self.to_prefill)
    @rule(index=st.integers(0, 9), stays=st.booleans())
    def deliver_to_prefill(self, index, stays):
        target = self.to_prefill[index % len(self.to_prefill)]
        if not stays:
            self.to_prefill.remove(target)
        self._aim(target)

    def _aim(self, target: TransferTarget) -> None:
        self.prefill.set_target(
            target.request_id,
            target.block_ids,
            held=target.num_held_tokens,
            epoch=target.epoch,
            address=target.address,
        )
        self._hear_producers()

    # -- the transport ----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Write]:
        """Writes that may still land."""
        return [write for write in self.writes if not write.has_landed]

    def _start_writes(self, save: BlockTransfer) -> None:
        assert save.destination is not None
        attempt = self.attempts[save.request_id]
        for index, (source, target) in enumerate(zip(save.block_ids, save.destination.block_ids, strict=True)):
            content = self.prefill.block(source)
            self.writes.append(Write(attempt, save.job_id, index, source, target, content))

    @precondition(lambda self: self.pending)
    @rule(index=st.integers(0, 30), damaged=st.sampled_from([False, False, False, True]))
    def land(self, index, damaged):
        write = self.pending[index % len(self.pending)]
        if not write.is_orphan:
            assert self.prefill.block(write.source) == write.content, "a block changed while it was sent"
        self.decode.write_block(write.target, self.arriving(write, damaged))
        write.has_landed = True
        if write.is_orphan:
            self.writes.remove(write)

    def arriving(self, write: Write, damaged: bool) -> list[int]:
        """What arrives."""
        return GARBAGE if damaged or write.is_orphan else write.content

    @precondition(lambda self: any(write.is_orphan for write in self.writes))
    @rule(index=st.integers(0, 30))
    def an_orphan_dies(self, index):
        orphans = [write for write in self.writes if write.is_orphan]
        self.writes.remove(orphans[index % len(orphans)])

    @precondition(lambda self: self.prefill.jobs)
    @rule(data=st.data(), hurried=st.sampled_from([False, False, True]))
    def settle_save(self, data, hurried):
        self._settle_save(data.draw(st.sampled_from(sorted(self.prefill.jobs))), hurried=hurried)

    def _settle_save(self, job_id: int, *, hurried: bool = False) -> None:
        """A job ends: all its writes have landed, or the transport has called back what has not."""
        writes = [write for write in self.writes if write.job_id == job_id and not write.is_orphan]
        if not hurried:
            for write in writes:
                if not write.has_landed:
                    self.decode.write_block(write.target, write.content)
                    write.has_landed = True
        _, save = self.prefill.jobs[job_id]
        num_ok = [*(write.has_landed for write in writes), False].index(False)
        contents = valid_contents(save, [write.content for write in writes])
        digests = tuple(self.prefill.digest_of(content) for content in contents[:num_ok])
        error = "" if num_ok == len(writes) else "transfer_timeout"
        self.writes = [write for write in self.writes if write not in writes]
        self.prefill.settle_as(TransferResult(job_id, num_ok, error, digests))
        self._hear_producers()

    @precondition(lambda self: self.decode.jobs)
    @rule(data=st.data(), num_blocks_ok=st.sampled_from([0, 1, 99, 99, 99]))
    def settle_load(self, data, num_blocks_ok):
        job_id = data.draw(st.sampled_from(sorted(self.decode.jobs)))
        self.decode.settle(job_id, num_blocks_ok=num_blocks_ok, error="" if num_blocks_ok == 99 else "block_corrupt")

    # -- mishaps ----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def mishap(self, data):
        """One rule for all of them, so that they do not crowd out the rest."""
        mishap = data.draw(
            st.sampled_from(
                [
                    self.lose_on_the_way_to_decode,
                    self.lose_on_the_way_to_prefill,
                    self.hear_stale_news,
                    self.abort_producer,
                    self.abort_consumer,
                    self.expire_consumer,
                    self.crash_prefill,
                    self.reset_prefix_caches,
                    self.spoil,
                    self.retry_too_early,
                ]
            )
        )
        mishap(data)

    def lose_on_the_way_to_decode(self, data):
        """What is lost breaks the stream: a pod notices, and asks until it knows that the producer writes no more."""
        for news in drawn(data, self.to_decode):
            self.to_decode.remove(news)
            attempt = self.attempts[news.update.request_id]
            self._tell_consumer(attempt, final=True, failure="prefill_gone")
            attempt.owes_quiescence |= news.is_quiescent

    def lose_on_the_way_to_prefill(self, data):
        for target in drawn(data, self.to_prefill):
            self.to_prefill.remove(target)

    def hear_stale_news(self, data):
        """Of an attempt before the present one."""
        for attempt in drawn(data, [*self.attempts.values()]):
            request, epoch = attempt.request, attempt.epoch - 1
            news = {"final": True, "failure": "stale"} if data.draw(st.booleans()) else {"digests": [b"stale"]}
            self.decode.update_transfer(request.request_id, 0, epoch=epoch, is_quiescent=True, **news)
            num_blocks = -(-len(request.prompt_token_ids) // BLOCK_SIZE)
            self.prefill.set_target(request.request_id, range(1, 1 + num_blocks), epoch=epoch, address=b"stale")

    def abort_producer(self, data):
        """The client went away, the lease ran out, or the consumer cancelled."""
        for attempt in drawn(data, self.alive(producers=True)):
            self.prefill.abort(attempt.request.request_id)
            self._hear_producers()

    def abort_consumer(self, data):
        for attempt in drawn(data, self.alive(producers=False)):
            self.decode.abort(attempt.request.request_id)
            self._hear_consumers()

    def expire_consumer(self, data):
        """The decode pod waits no longer for the KV; who knows what the producer does."""
        for attempt in drawn(data, self.alive(producers=False)):
            attempt.is_over = True
            self.decode.update_transfer(
                attempt.request.request_id, 0, epoch=attempt.epoch, final=True, failure="transfer_timeout"
            )

    def crash_prefill(self, data):
        """Its writes under way may still arrive, as whatever they are by then."""
        for attempt in self.alive(producers=True):
            attempt.producer_ended = attempt.owes_quiescence = True
            self._tell_consumer(attempt, final=True, failure="prefill_gone")
        for write in self.writes:
            write.is_orphan = True
        self.writes = self.pending
        self.prefill = self.start_prefill()

    def reset_prefix_caches(self, data):
        for engine in (self.prefill, self.decode):
            self._end_step(engine)
            engine.scheduler.reset_prefix_cache()

    def spoil(self, data):
        """Something damages a block that was written and not read yet."""
        written = [write.target for write in self.writes if write.has_landed]
        loading = [block_id for _, load in self.decode.jobs.values() for block_id in load.block_ids]
        for block_id in drawn(data, written + loading):
            self.decode.write_block(block_id, GARBAGE)

    def retry_too_early(self, data):
        """While blocks of an attempt may still be written to, its id is taken."""
        names = [name for name in self.decode.finished if self.decode.scheduler.port.knows(name)]
        for name in drawn(data, names):
            with pytest.raises(InvalidRequestError):
                self.decode.scheduler.add_request(self.attempts[name].request, self.decode.now)

    @precondition(lambda self: self.owing())
    @rule(data=st.data())
    def learn_of_quiescence(self, data):
        attempt = data.draw(st.sampled_from(self.owing()))
        attempt.owes_quiescence = False
        self._tell_consumer(attempt, is_quiescent=True)

    def owing(self) -> list[Attempt]:
        writing = [write.attempt for write in self.writes]
        return [attempt for attempt in self.attempts.values() if attempt.owes_quiescence and attempt not in writing]

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def sound(self):
        self.decode.assert_sound()
        self.prefill.assert_sound()

    @invariant()
    def blocks_are_kept_while_they_may_be_written_to(self):
        pinned = self.decode.scheduler.port._open
        for write in self.pending:
            assert write.target in [block.block_id for block in pinned[write.attempt.request.request_id]]

    @invariant()
    def nobody_waits_for_nothing(self):
        decode, prefill = self.decode.scheduler, self.prefill.scheduler
        is_stepping = self.decode.is_stepping or self.decode._queue
        if not (is_stepping or decode.has_work or self.decode.jobs) and decode.has_unfinished:
            assert decode.stats().num_waiting_for_remote_kv or list(decode.port.writable_blocks)
        if not (self.prefill.is_stepping or prefill.has_work or self.prefill.jobs) and prefill.has_unfinished:
            outgoing = prefill.actor.mover._outgoing.values()
            waiting = {request.request_id for request in prefill._places.waiting}  # for the blocks of the others
            assert any(each.wants_target for each in outgoing)
            assert all(each.wants_target or each.request_id in waiting for each in outgoing)

    def teardown(self):
        if not hasattr(self, "decode"):
            return
        for engine in (self.prefill, self.decode):
            self._end_step(engine)
        for attempt in self.alive(producers=True):
            self.prefill.abort(attempt.request.request_id)
        self._hear_producers()
        for _ in range(MAX_STEPS):
            if not (self.prefill.scheduler.has_unfinished or self.prefill.scheduler.has_work):
                break
            for job_id in list(self.prefill.jobs):
                self.prefill.settle_as(TransferResult(job_id, 0, "transfer_cancelled"))
            self.writes = [write for write in self.writes if write.is_orphan]
            self.step_prefill()
        self.prefill.assert_idle()
        self.writes.clear()
        for attempt in self.alive(producers=True):
            raise AssertionError(f"{attempt} has not ended")
        for attempt in self.attempts.values():
            self._tell_consumer(attempt, final=True, failure="prefill_gone", is_quiescent=True)
        for news in self.to_decode:
            self._update_decode(news)
        self.decode.settle_at_once = True
        self.decode.settle_all()
        self.decode.run()
        self.decode.step()
        self._hear_consumers()
        self.decode.assert_idle()
        for request in (*self.plain.values(), *(attempt.request for attempt in self.attempts.values())):
            self._check_answer(request)
        for attempt in self.attempts.values():
            self._check_events(attempt)

    def _check_answer(self, request: AddRequest) -> None:
        outputs, reason = expected_output(request, max_model_len=MAX_MODEL_LEN, eos=())
        answer, finish_reason = self.decode.outputs[request.request_id], self.decode.finished[request.request_id]
        if finish_reason is FinishReason.ABORT:
            assert answer == outputs[: len(answer)]
        else:
            assert (answer, finish_reason) == (outputs, reason)

    def _check_events(self, attempt: Attempt) -> None:
        is_aborted = self.decode.finished[attempt.request.request_id] is FinishReason.ABORT
        for kind in (RequestStarted, KVReceived):
            num_events = sum(isinstance(event, kind) for event in attempt.consumer_events)
            assert num_events == 1 or (is_aborted and num_events == 0)
        reasons = [event.recompute_reason for event in attempt.consumer_events if isinstance(event, KVReceived)]
        assert "stale" not in reasons, "news of another attempt count"


TestDirectHandoffMachine = DirectHandoffMachine.TestCase
TestDirectHandoffMachine.settings = settings(max_examples=62, stateful_step_count=50, deadline=None)


class TwoRanksMachine(DirectHandoffMachine):
    """The same, between engines of two ranks. Damage is to what one of them holds."""

    num_ranks = 2

    def arriving(self, write: Write, damaged: bool) -> list[int]:
        if damaged and not write.is_orphan:
            return [write.content[0] + 1, *write.content[1:]]
        return super().arriving(write, damaged)


TestTwoRanksMachine = TwoRanksMachine.TestCase
TestTwoRanksMachine.settings = settings(max_examples=62, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestDirectHandoffMachineForLong(DirectHandoffMachine.TestCase):
    """The same, with many more and longer histories."""

    settings = settings(max_examples=3000, stateful_step_count=100, deadline=None)
