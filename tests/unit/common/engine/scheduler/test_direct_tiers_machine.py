"""Direct handoffs between two engines that share a tier: late writes, crashes and all, see test_direct_handoff_machine.

What the tier keeps is read without the digests that travel with a handoff, so nothing unchecked may ever get there.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from common.types import BlockHash
from tests.unit.common.engine.scheduler.test_direct_handoff_machine import (
    GARBAGE,
    MAX_ATTEMPTS,
    DirectHandoffMachine,
    Producer,
    drawn,
)
from tests.unit.common.engine.scheduler_factories import (
    ALL_DRAFTS,
    ALL_GROUPS,
    BLOCK_SIZE,
    ONE_GROUP,
    create_proposer,
    create_request,
    stored_prompt,
)

Medium = dict[BlockHash, list[int]]


class DirectTiersMachine(DirectHandoffMachine):
    """The parent's rules over engines with tiers, and failures of the tier."""

    @initialize(
        num_blocks=st.integers(7, 16),
        budget=st.integers(2, 16),
        chunk=st.integers(2, 12),
        part_blocks=st.sampled_from([None, 1, 2]),
        offloads=st.booleans(),
        drafts=st.sampled_from(ALL_DRAFTS),
        groups=st.sampled_from(ALL_GROUPS),
    )
    def start(self, num_blocks, budget, chunk, part_blocks, offloads, drafts="none", groups=ONE_GROUP):
        self.medium: Medium = {}
        self.offloads = offloads
        super().start(num_blocks, budget, chunk, part_blocks, prefix_caching=True, groups=groups)
        self.decode = self.create_engine(lambda _: None, num_blocks, budget)
        self.decode.proposer = create_proposer(drafts)

    def start_prefill(self):
        super().start_prefill()  # counts the incarnation
        return self.create_engine(self._start_writes, 13, self.chunk)

    def create_engine(self, on_save, num_blocks: int, budget: int) -> Producer:
        engine = Producer(
            on_save,
            self.num_ranks,
            num_blocks=1 + (num_blocks - 1) * len(self.groups),
            groups=self.groups,
            max_num_batched_tokens=budget,
            part_blocks=self.part_blocks,
            keeps_blocks=True,
            wants_offloads=self.offloads,
        )
        engine.medium = self.medium
        return engine

    @rule()
    def step_decode(self):
        self._end_step(self.decode)
        for load in self.decode.step().loads:
            assert load.is_for_tier or len(load.digests) == len(load.block_ids)
        self._hear_consumers()

    def _start_writes(self, save):
        if not save.is_for_tier:
            super()._start_writes(save)

    def _settle_save(self, job_id, *, hurried=False):
        _, transfer = self.prefill.jobs[job_id]
        if transfer.is_for_tier:
            self.prefill.settle(job_id, num_blocks_ok=1 if hurried else 99, error="store_failed" if hurried else "")
        else:
            super()._settle_save(job_id, hurried=hurried)

    def spoil(self, data):
        """Only what nobody has checked yet."""
        written = [write.target for write in self.writes if write.has_landed]
        loading = [block_id for _, load in self.decode.jobs.values() if load.digests for block_id in load.block_ids]
        for block_id in drawn(data, written + loading):
            self.decode.write_block(block_id, GARBAGE)

    @rule(data=st.data())
    def lose_what_was_kept(self, data):
        for block_hash in drawn(data, list(self.medium)):
            del self.medium[block_hash]

    @precondition(lambda self: len(self.alive(producers=False)) < MAX_ATTEMPTS)
    @rule(num_tokens=st.integers(BLOCK_SIZE + 1, 14), num_kept=st.integers(1, 3), is_plain=st.booleans())
    def add_what_another_pod_computed(self, num_tokens, num_kept, is_plain):
        prompt = [10 + index % 2 for index in range(num_tokens)]
        num_groups = len(self.groups)
        content = list(stored_prompt(create_request("", prompt), groups=self.groups).items())
        self.medium.update(content[: min(num_kept, num_tokens // BLOCK_SIZE) * num_groups])
        if is_plain:
            self.add_plain(prompt, 6)
        else:
            self.add(prompt, [], 6, False)

    @invariant()
    def nothing_unchecked_was_kept(self):
        assert GARBAGE not in self.medium.values()
        assert not any(-1 in content for content in self.medium.values())


TestDirectTiersMachine = DirectTiersMachine.TestCase
TestDirectTiersMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


class TwoRanksMachine(DirectTiersMachine):
    """The same, between engines of two ranks."""

    num_ranks = 2


TestTwoRanksMachine = TwoRanksMachine.TestCase
TestTwoRanksMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestDirectTiersMachineForLong(DirectTiersMachine.TestCase):
    """The same, with many more and longer histories."""

    settings = settings(max_examples=3000, stateful_step_count=100, deadline=None)
