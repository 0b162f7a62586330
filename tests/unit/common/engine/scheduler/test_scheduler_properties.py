"""Whatever comes in whatever order, in a tiny pool: nothing is lost, owned twice, wrong or waiting for ever."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.kv_connector import TransferResult
from common.engine.messages import AddRequest, KVReceived, KVSaved, RequestStarted
from common.types import FinishReason
from tests.unit.common.engine.scheduler_factories import (
    ALL_DRAFTS,
    ALL_GROUPS,
    BLOCK_SIZE,
    EOS,
    ONE_GROUP,
    FakeEngine,
    create_proposer,
    create_request,
    create_scheduler,
    expected_output,
    first_token,
    stored_prompt,
)

MAX_MODEL_LEN = 24


class SchedulerMachine(RuleBasedStateMachine):
    """`FakeEngine` compares the KV that each step reads with the request's tokens; the rest is checked here."""

    num_ranks = 1
    requests: dict[str, AddRequest]

    @initialize(
        num_blocks=st.integers(7, 14),
        budget=st.integers(1, 16),
        seats=st.integers(1, 4),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.3]),
        prefix_caching=st.booleans(),
        tiers=st.sampled_from(["none", "kept", "offloaded", "offloaded"]),
        runs_ahead=st.booleans(),
        depth=st.sampled_from([1, 1, 2, 3]),
        drafts=st.sampled_from(ALL_DRAFTS),
        groups=st.sampled_from(ALL_GROUPS),
    )
    def start(self, num_blocks, budget, seats, **settings):
        self._start(num_blocks, budget, seats, **settings)

    def _start(
        self,
        num_blocks,
        budget,
        seats,
        policy="fcfs",
        watermark=0.0,
        prefix_caching=True,
        tiers="none",
        runs_ahead=False,
        depth=1,
        drafts="none",
        groups=ONE_GROUP,
    ):
        self.groups = groups
        scheduler = create_scheduler(
            num_blocks=1 + (num_blocks - 1) * len(groups),
            groups=groups,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            policy=policy,
            watermark=watermark,
            enable_prefix_caching=prefix_caching,
            max_concurrent_batches=depth,
            keeps_blocks=tiers != "none",
            wants_offloads=tiers == "offloaded",
        )
        self.engine = FakeEngine(
            scheduler,
            runs_ahead=runs_ahead and depth == 1,
            depth=depth,
            proposer=create_proposer(drafts),
            num_ranks=self.num_ranks,
        )
        self.requests = {}
        self.open: dict[str, int] = {}  # consumers whose handoff is not final: tokens ready
        self.budget, self.seats = budget, seats

    @rule(
        role=st.sampled_from([None, None, "producer", "consumer", "consumer"]),
        prompt=st.lists(st.integers(10, 11), min_size=1, max_size=14),
        output=st.lists(st.integers(10, 11), max_size=2),
        max_tokens=st.integers(1, 7),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        has_grammar=st.booleans(),
    )
    def add(self, role, prompt, output, max_tokens, ignore_eos, priority, salt, has_grammar=False):
        request = create_request(
            f"r{len(self.requests)}",
            prompt,
            role=role,
            output=output,
            max_tokens=max_tokens + len(output),
            stop_token_ids=(EOS + 1, EOS + 2),
            ignore_eos=ignore_eos,
            priority=priority,
            cache_salt=salt,
            logit_bias={3: 1.0} if has_grammar else None,  # as with a grammar, no step is scheduled ahead
        )
        self.engine.add(request)
        self.requests[request.request_id] = request
        if role == "consumer":
            self.open[request.request_id] = 0

    @precondition(lambda self: not self.engine.is_stepping)
    @rule()
    def begin_step(self):
        """Whatever happens before its end happens while it runs."""
        self.engine.begin_step()

    @precondition(lambda self: self.engine.is_stepping)
    @rule()
    def end_step(self):
        self._check(self.engine.end_step())

    @rule()
    def step(self):
        if self.engine.is_stepping:
            self._check(self.engine.end_step())
        self._check(self.engine.step())

    def _check(self, step):
        assert step.total_num_scheduled_tokens <= self.budget
        assert len(step.num_scheduled_tokens) <= self.seats

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        was_live = request_id in self.engine.scheduler._places.live and not self.engine.is_stepping
        outputs = self.engine.abort(request_id)
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT] * was_live
        self.open.pop(request_id, None)

    @precondition(lambda self: any(request.sampling.logit_bias for request in self.requests.values()))
    @rule(data=st.data())
    def delay_a_mask(self, data):
        constrained = [request_id for request_id, each in self.requests.items() if each.sampling.logit_bias]
        self.engine.late.add(data.draw(st.sampled_from(constrained)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_more=st.integers(0, 14))
    def progress(self, data, num_more):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self._publish(request_id, num_more)
        self.engine.update_transfer(request_id, self.open[request_id])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), delivered=st.booleans(), knows_first=st.booleans(), num_more=st.integers(0, 14))
    def end_handoff(self, data, delivered, knows_first, num_more):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        request = self.requests[request_id]
        self._publish(request_id, 99 if delivered else num_more)
        self.engine.update_transfer(
            request_id,
            self.open.pop(request_id),
            final=True,
            first_token=first_token(request) if delivered or knows_first else None,
            failure="" if delivered else "prefill_gone",
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def stale_news(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.update_transfer(request_id, 99, epoch=0, final=True, failure="stale")

    @precondition(lambda self: self.engine.jobs)
    @rule(data=st.data(), num_blocks_ok=st.sampled_from([0, 1, 99, 99]))
    def settle(self, data, num_blocks_ok):
        job_id = data.draw(st.sampled_from(sorted(self.engine.jobs)))
        self.engine.settle(job_id, num_blocks_ok=num_blocks_ok, error="" if num_blocks_ok == 99 else "store_failed")

    @precondition(lambda self: any(kind == "lookup" for kind, _ in self.engine.jobs.values()))
    @rule(data=st.data(), num_blocks_ok=st.integers(-1, 9), error=st.sampled_from(["", "store_failed"]))
    def answer_wrongly(self, data, num_blocks_ok, error):
        lookups = [job_id for job_id, (kind, _) in self.engine.jobs.items() if kind == "lookup"]
        self.engine.settle_as(TransferResult(data.draw(st.sampled_from(lookups)), num_blocks_ok, error))

    @precondition(lambda self: self.engine.medium)
    @rule(data=st.data())
    def lose_what_was_kept(self, data):
        del self.engine.medium[data.draw(st.sampled_from(list(self.engine.medium)))]

    @precondition(lambda self: not self.engine.is_stepping)
    @rule()
    def reset_prefix_cache(self):
        self.engine.scheduler.reset_prefix_cache()

    def _publish(self, request_id: str, num_more: int) -> None:
        """The prefill pod saved the KV of `num_more` further tokens."""
        request = self.requests[request_id]
        num_ready = min(self.open[request_id] + num_more, len(request.prompt_token_ids))
        num_groups = len(self.groups)
        stored = stored_prompt(request, groups=self.groups)
        is_all = num_ready == len(request.prompt_token_ids)
        for block_hash in list(stored)[: None if is_all else num_ready // BLOCK_SIZE * num_groups]:
            self.engine.medium[block_hash] = stored[block_hash]
        self.open[request_id] = num_ready

    @invariant()
    def sound(self):
        self.engine.assert_sound()

    @invariant()
    def nobody_waits_for_nothing(self):
        """An engine that says that it has no work has none, and what is unfinished waits for a job or a handoff."""
        engine = self.engine
        if engine.is_stepping or engine._queue or engine.scheduler.has_work:
            return
        step = engine.step()
        assert (step.num_scheduled_tokens, step.dropped_request_ids) == ({}, [])
        self.sound()
        if engine.scheduler.has_unfinished and not engine.jobs:
            assert engine.scheduler.stats().num_waiting_for_remote_kv
            assert any(request_id not in engine.finished for request_id in self.open)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        if engine.is_stepping:
            engine.end_step()
        while self.open:
            request_id, num_ready = self.open.popitem()
            engine.update_transfer(request_id, num_ready, final=True, failure="prefill_gone")
        engine.settle_at_once = True
        engine.settle_all()
        engine.run()
        engine.step()
        engine.assert_idle()
        for request_id, request in self.requests.items():
            self._check_answer(request_id, request)
            self._check_events(request_id, request)

    def _check_answer(self, request_id: str, request: AddRequest) -> None:
        outputs, reason = expected_output(request, max_model_len=MAX_MODEL_LEN)
        finish_reason = self.engine.finished[request_id]
        if finish_reason is FinishReason.ABORT:
            assert self.engine.outputs[request_id] == outputs[: len(self.engine.outputs[request_id])]
        elif request.transfer and request.transfer.role == "producer":
            num_before = len(request.output_token_ids)
            assert self.engine.outputs[request_id] == outputs[: num_before + 1]
            assert finish_reason is (reason if len(outputs) == num_before + 1 else FinishReason.HANDOFF)
        else:
            assert (self.engine.outputs[request_id], finish_reason) == (outputs, reason)

    def _check_events(self, request_id: str, request: AddRequest) -> None:
        events = self.engine.events[request_id]
        is_aborted = self.engine.finished[request_id] is FinishReason.ABORT
        assert sum(isinstance(event, RequestStarted) for event in events) == 1 or is_aborted
        role = request.transfer.role if request.transfer else None
        num_received = sum(isinstance(event, KVReceived) for event in events)
        assert num_received == 0 if role != "consumer" else num_received == 1 or is_aborted
        saves = [event for event in events if isinstance(event, KVSaved)]
        if role == "producer":
            progress = [save.num_tokens for save in saves]
            assert progress == sorted(progress)
            assert not any(save.failure for save in saves[:-1])
            assert saves[-1].failure or saves[-1].num_tokens == len(request.prompt_token_ids)
        else:
            assert saves == []


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TwoRanksMachine(SchedulerMachine):
    """The same, on two ranks."""

    num_ranks = 2


TestTwoRanksMachine = TwoRanksMachine.TestCase
TestTwoRanksMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestSchedulerMachineForLong(SchedulerMachine.TestCase):
    """The same, with many more and longer histories."""

    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)
