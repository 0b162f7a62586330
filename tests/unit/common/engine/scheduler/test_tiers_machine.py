"""Tiers in a tiny pool: the rules of test_scheduler_properties, with more to restore, to preempt and to offload."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from common.engine.kv_connector import TransferResult
from tests.unit.common.engine.scheduler.test_scheduler_properties import SchedulerMachine
from tests.unit.common.engine.scheduler_factories import (
    ALL_DRAFTS,
    ALL_GROUPS,
    BLOCK_SIZE,
    create_request,
    stored_prompt,
)

MAX_LIVE = 5  # with more, most would wait and little would move


class TiersMachine(SchedulerMachine):
    """The parent's rules, and rules that go on: without these hardly any history would come to a restore."""

    @initialize(
        num_blocks=st.integers(7, 14),
        budget=st.integers(3, 16),
        seats=st.integers(2, 4),
        offloads=st.booleans(),
        drafts=st.sampled_from(ALL_DRAFTS),
        groups=st.sampled_from(ALL_GROUPS),
    )
    def start(self, num_blocks, budget, seats, offloads, **settings):
        self._start(num_blocks, budget, seats, tiers="offloaded" if offloads else "kept", **settings)

    @precondition(lambda self: len(self.engine.scheduler._places.live) < MAX_LIVE)
    @rule(
        role=st.sampled_from([None, None, None, "producer"]),
        num_tokens=st.integers(BLOCK_SIZE + 1, 14),
        num_kept=st.integers(0, 3),
        max_tokens=st.sampled_from([1, 4, 16, 16]),
        is_alike=st.booleans(),
    )
    def add_what_another_pod_computed(self, role, num_tokens, num_kept, max_tokens, is_alike):
        first = 10 if is_alike else 12 + len(self.requests)
        prompt = [first, *(10 + index % 2 for index in range(1, num_tokens))]
        num_groups = len(self.groups)
        content = list(stored_prompt(create_request("", prompt), groups=self.groups).items())
        self.engine.medium.update(content[: min(num_kept, num_tokens // BLOCK_SIZE) * num_groups])
        self.add(role, prompt, [], max_tokens, ignore_eos=True, priority=0, salt="")

    @rule(num_moves=st.integers(1, 30))
    def go_on(self, num_moves):
        for move in itertools.islice(itertools.cycle([self.step, self.engine.settle_all, self.step]), num_moves):
            move()

    @rule(num_steps=st.integers(1, 20))
    def offloads_lag(self, num_steps):
        """Everything else settles at once."""
        for _ in range(num_steps):
            for job_id, (kind, transfer) in list(self.engine.jobs.items()):
                if kind != "save" or not transfer.is_for_tier:
                    self.engine.settle(job_id)
            self.step()

    @precondition(lambda self: len(self.engine.scheduler._places.live) < MAX_LIVE)
    @rule(num_tokens=st.integers(5, 8), num_steps=st.integers(4, 30))
    def crowd(self, num_tokens, num_steps):
        """Requests that outgrow the pool together."""
        for first in range(12, 15):
            prompt = [first, *range(10, 9 + num_tokens)]
            self.add(None, prompt, [], 16, ignore_eos=True, priority=0, salt="")
        self.offloads_lag(num_steps)

    @rule()
    def a_tier_fails(self):
        for job_id, (_, transfer) in list(self.engine.jobs.items()):
            if transfer.is_for_tier:
                self.engine.settle_as(TransferResult(job_id, 0, "store_failed"))


def test_a_consumer_gets_its_turn_when_the_prompt_before_it_asks_the_tier_again():
    """It was refused because of the blocks that this prompt needed; nothing else would have looked at it again."""
    machine = TiersMachine()
    short = {"output": [], "ignore_eos": False, "priority": 0, "salt": ""}
    machine.start(num_blocks=9, offloads=False, budget=12, seats=2)
    for move in (
        lambda: machine.add(role=None, prompt=[10, 10], max_tokens=5, **short),
        machine.step,
        lambda: machine.crowd(num_steps=21, num_tokens=8),
        lambda: machine.add_what_another_pod_computed(
            is_alike=False, max_tokens=1, num_kept=3, num_tokens=11, role=None
        ),
        lambda: machine.add(role="consumer", prompt=[10] * 5, max_tokens=1, **short),
        lambda: machine.crowd(num_steps=17, num_tokens=6),
        lambda: machine.add(role=None, prompt=[10], max_tokens=1, **short),
        lambda: machine.add(role="consumer", prompt=[10] * 5, max_tokens=1, **short),
        lambda: machine.go_on(num_moves=6),
    ):
        move()
        machine.nobody_waits_for_nothing()
    machine.teardown()


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(max_examples=62, stateful_step_count=50, deadline=None)


class TwoRanksMachine(TiersMachine):
    """The same, on two ranks."""

    num_ranks = 2


TestTwoRanksMachine = TwoRanksMachine.TestCase
TestTwoRanksMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestTiersMachineForLong(TiersMachine.TestCase):
    """The same, with many more and longer histories."""

    settings = settings(max_examples=3000, stateful_step_count=100, deadline=None)
