"""Two pods, a router, and everything between them that may go wrong, by a clock of the test's own.

Messages take their time, calls break and one end knows it long before the other, prompts are asked for twice, either
side gives up, expires, or dies and comes back as another incarnation; writes land late, damaged, or after their sender
has died. Then: no block that may be written to is anybody else's, no byte that was not checked is read, every request
ends with the right tokens, every transfer is forgotten and every block returns.
"""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.pb import pods_pb2
from common.rpc.convert import finish_reason_to_pb
from common.types import FinishReason
from tests.unit.common.engine.scheduler_factories import (
    ALL_DRAFTS,
    ALL_GROUPS,
    ONE_GROUP,
    create_proposer,
    create_request,
    expected_output,
)
from tests.unit.decode_service.simulation import (
    LEASE_S,
    MAX_MODEL_LEN,
    NOTICE_S,
    QUARANTINE_S,
    Simulation,
    engine_request,
)

MAX_REQUESTS = 4  # at once
PROMPTS = st.integers(1, 14).flatmap(lambda size: st.lists(st.integers(10, 11), min_size=size, max_size=size))
LATENCIES = st.sampled_from([0.0, 0.0, 0.2, 3.0])
NOTICES = st.sampled_from([0.0, 1.0, NOTICE_S])


class HandoffMachine(RuleBasedStateMachine):
    num_ranks = 1

    @initialize(
        num_blocks=st.integers(7, 16),
        budget=st.integers(4, 16),
        chunk=st.integers(2, 12),
        prefix_caching=st.booleans(),
        drafts=st.sampled_from(ALL_DRAFTS),
        groups=st.sampled_from(ALL_GROUPS),
    )
    def start(self, num_blocks, budget, chunk, prefix_caching, drafts="none", groups=ONE_GROUP):
        decode = {
            "num_blocks": num_blocks,
            "groups": groups,
            "proposer": create_proposer(drafts),
            "max_num_batched_tokens": budget,
            "enable_prefix_caching": prefix_caching,
        }
        logging.disable(logging.WARNING)
        self.is_harmed = False  # something happened that may cost a request its KV
        self.sim = Simulation(chunk=chunk, decode_settings=decode, num_ranks=self.num_ranks)

    # -- requests ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sim.router.unfinished) < MAX_REQUESTS)
    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 6),
        remote=st.sampled_from([True, True, True, False]),
        may_recompute=st.sampled_from([True, True, True, False]),
    )
    def submit(self, prompt, max_tokens, remote, may_recompute):
        router = self.sim.router
        request = engine_request(f"r{len(router.answers)}", prompt, max_tokens)
        self.sim.loop.do(lambda: router.submit(request, may_recompute=may_recompute, remote=remote))

    @rule(num_moves=st.integers(1, 24))
    def go_on(self, num_moves):
        """Nothing goes wrong for a while."""
        sim = self.sim
        moves = [
            sim.step_prefill,
            sim.step_decode,
            sim.step_prefill,
            sim.settle_saves,
            sim.step_prefill,
            sim.settle_loads,
            sim.step_decode,
            lambda: sim.advance(sim.network.latency_s),
        ]
        for index in range(num_moves):
            moves[index % len(moves)]()

    @rule()
    def step_prefill(self):
        self.sim.step_prefill()

    @rule()
    def step_decode(self):
        self.sim.step_decode()

    @rule(latency_s=LATENCIES)
    def network_changes(self, latency_s):
        self.is_harmed |= latency_s > 0
        self.sim.network.latency_s = latency_s

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 10.0, LEASE_S, QUARANTINE_S]))
    def wait(self, seconds):
        self.is_harmed = True  # leases end
        self.sim.advance(seconds)

    @rule(num_steps=st.integers(1, 8))
    def work_slowly(self, num_steps):
        """As slowly as may be without being taken for dead."""
        self.is_harmed = True  # a prompt of many chunks may wait longer for its saves than their lease
        for _ in range(num_steps):
            self.sim.advance(LEASE_S / 3)
            self.sim.step_prefill()
            self.sim.step_decode()

    # -- the transport ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sim.pending)
    @rule(data=st.data(), damaged=st.sampled_from([False, False, True]))
    def land(self, data, damaged):
        self.is_harmed |= damaged
        pending = self.sim.pending
        self.sim.land(pending[data.draw(st.integers(0, len(pending) - 1))], damaged=damaged)

    @precondition(lambda self: self.sim.prefill.engine.jobs)
    @rule(only_landed=st.booleans())
    def settle_saves(self, only_landed):
        self.is_harmed |= only_landed
        self.sim.settle_saves(only_landed=only_landed)

    @precondition(lambda self: self.sim.decode.engine.jobs)
    @rule(is_ok=st.booleans())
    def settle_load(self, is_ok):
        self.is_harmed |= not is_ok
        num_blocks_ok, error = (99, "") if is_ok else (0, "block_corrupt")
        self.sim.loop.do(lambda: self.sim.decode.engine.settle(num_blocks_ok=num_blocks_ok, error=error))

    # -- mishaps ----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def mishap(self, data):
        """One rule for all of them, so that they do not crowd out the rest."""
        mishaps = [
            self.break_a_call,
            self.break_a_call,
            self.abort,
            self.repeat_a_prefill,
            self.somebody_else_takes_the_handoff,
            self.reset_prefix_caches,
            self.crash_prefill,
            self.crash_decode,
        ]
        self.is_harmed = True
        data.draw(st.sampled_from(mishaps))(data)

    def break_a_call(self, data):
        if wires := self.sim.network.open_wires:
            wire = data.draw(st.sampled_from(wires))
            client, server = data.draw(NOTICES), data.draw(NOTICES)
            self.sim.loop.do(lambda: wire.lose(client, server))

    def abort(self, data):
        if answers := self.sim.router.unfinished:
            answer, with_leg = data.draw(st.sampled_from(answers)), data.draw(st.booleans())
            self.sim.loop.do(lambda: self.sim.router.abort(answer, with_leg=with_leg))

    def repeat_a_prefill(self, data):
        """A router that does not know whether its call arrived."""
        if answers := list(self.sim.router.answers.values()):
            answer = data.draw(st.sampled_from(answers))
            epoch = data.draw(st.integers(1, answer.epoch))
            request = pods_pb2.PrefillRequest(
                request=answer.message, transfer_id=f"t-{answer.message.request_id}", epoch=epoch
            )
            self.sim.loop.do(lambda: self.sim.router.repeat_leg(self.sim.prefill, request))

    def somebody_else_takes_the_handoff(self, data):
        """Another pod, or a forgotten attempt of the decode pod, claims a transfer and names blocks of its own."""
        if answers := list(self.sim.router.answers.values()):
            answer = data.draw(st.sampled_from(answers))
            epoch = data.draw(st.integers(1, answer.epoch))
            self.sim.loop.do(lambda: self.sim.intrude(f"t-{answer.message.request_id}", epoch))

    def reset_prefix_caches(self, data):
        for pod in (self.sim.prefill, self.sim.decode):
            pod.engine.scheduler.reset_prefix_cache()

    def crash_prefill(self, data):
        self.sim.crash_prefill(data.draw(NOTICES))

    def crash_decode(self, data):
        self.sim.crash_decode(data.draw(NOTICES))

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def sound(self):
        self.sim.assert_sound()

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        try:
            self.sim.finish()
            self.sim.assert_sound()
            for pod in (self.sim.prefill, self.sim.decode):
                pod.engine.assert_idle()
            for answer in self.sim.router.answers.values():
                self._check(answer)
        finally:
            logging.disable(logging.NOTSET)
            self.sim.close()

    def _check(self, answer):
        message = answer.message
        request = create_request(
            message.request_id, list(message.prompt_token_ids), max_tokens=message.sampling.max_tokens
        )
        tokens, reason = expected_output(request, max_model_len=MAX_MODEL_LEN, eos=())
        if not self.is_harmed:
            assert not answer.report.recompute_reason
        if answer.finish_reason == finish_reason_to_pb(reason):
            assert answer.tokens == tokens
        elif answer.finish_reason == finish_reason_to_pb(FinishReason.ABORT):
            assert answer.is_aborted
            assert answer.tokens == tokens[: len(answer.tokens)]
        else:
            assert answer.error.param == "kv_failure_policy", answer.error
            assert not answer.may_recompute


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TwoRanksMachine(HandoffMachine):
    """The same, between engines of two ranks."""

    num_ranks = 2


TestTwoRanksMachine = TwoRanksMachine.TestCase
TestTwoRanksMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestHandoffMachineForLong(HandoffMachine.TestCase):
    """The same, with many more and longer histories."""

    settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)
