"""Requests without transfers: batching, chunks, prefix hits, preemption, stop conditions, admission."""

import pytest

from common.engine.config import SchedulerConfig
from common.engine.contract.step import ModelRunnerOutput
from common.engine.executor.fake import ONE_GROUP
from common.engine.kv_cache import KVCacheManager, KVGroups
from common.engine.messages import IntegrityReport, KVSaved, RequestStarted
from common.engine.scheduler.scheduler import Scheduler
from common.errors import ConfigError, ErrorCode, InvalidRequestError, OverloadedError, PromptTooLongError
from common.step_budget import prefill_work
from common.types import FinishReason, RequestId, SampledToken, hash_prompt, root_hash
from tests.unit.common.engine.scheduler_factories import (
    BLOCK_SIZE,
    EOS,
    VOCAB_SIZE,
    FakeEngine,
    create_request,
    create_requests,
    create_scheduler,
    expected_output,
    first_token,
)


def assert_answered(engine: FakeEngine, *requests) -> None:
    for request in requests:
        outputs, reason = expected_output(request)
        assert engine.outputs[request.request_id] == outputs
        assert engine.finished[request.request_id] is reason


class TestSteps:
    def test_a_request_from_prompt_to_end(self):
        engine, request = FakeEngine(), create_request("a", 6, max_tokens=3)
        engine.add(request)
        first = engine.step()
        (new,) = first.new_requests
        assert (new.token_ids[:6], new.num_prompt_tokens) == (request.prompt_token_ids, 6)
        assert (new.num_computed_tokens, len(new.block_ids[0])) == (0, 2)
        assert first.num_scheduled_tokens == {"a": 6}
        second = engine.step()
        assert second.new_requests == []
        assert (second.num_scheduled_tokens, second.new_block_ids) == ({"a": 1}, {})
        engine.step()
        assert_answered(engine, request)
        last = engine.step()  # tells the runner to forget it
        assert (last.dropped_request_ids, last.num_scheduled_tokens) == (["a"], {})
        stats = engine.scheduler.stats()
        assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (6, 3)
        engine.assert_idle()

    def test_a_step_names_its_work_and_the_context_that_it_reads(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=12))
        engine.add(create_request("a", 6, max_tokens=9))
        engine.step()
        engine.add(create_request("b", 5, max_tokens=9), create_request("c", 21))
        step = engine.step()
        assert step.num_scheduled_tokens == {"a": 1, "b": 5, "c": 6}
        assert step.num_context_tokens == 6, "a prompt's own context counts as work"
        assert step.work == pytest.approx(1 + prefill_work(5, 0) + prefill_work(6, 0))
        step = engine.step()
        assert step.num_scheduled_tokens == {"a": 1, "b": 1, "c": 10}
        assert (step.num_context_tokens, step.work) == (7 + 5, pytest.approx(2 + prefill_work(10, 6)))

    def test_a_long_prompt_is_computed_in_chunks_and_samples_once(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=8))
        request = create_request("a", 20)
        engine.add(request)
        assert [engine.step().num_scheduled_tokens["a"] for _ in range(4)] == [8, 8, 4, 1]
        assert len(engine.outputs["a"]) == 2

    def test_decoding_is_never_delayed_by_a_prefill_chunk(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=8))
        a, b = create_request("a", 20, max_tokens=9), create_request("b", 3, max_tokens=9)
        engine.add(b)
        engine.step()
        engine.add(a)
        assert [dict(engine.step().num_scheduled_tokens) for _ in range(4)] == [
            {"b": 1, "a": 7},
            {"b": 1, "a": 7},
            {"b": 1, "a": 6},
            {"b": 1, "a": 1},
        ]
        stats = engine.scheduler.stats()
        kinds = (stats.prefill_steps, stats.mixed_steps, stats.decode_steps)
        assert [(kind.num_steps, kind.num_tokens) for kind in kinds] == [(1, 3), (3, 23), (1, 2)]
        engine.run()
        assert_answered(engine, a, b)

    def test_one_step_serves_many_under_the_budget_and_the_seats(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=16, max_num_seqs=3))
        requests = create_requests(5, prompt=6)
        engine.add(*requests)
        assert engine.step().num_scheduled_tokens == {"r0": 6, "r1": 6, "r2": 4}
        engine.assert_sound()
        assert engine.step().num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 2}
        engine.run()
        assert_answered(engine, *requests)
        engine.assert_idle()

    def test_a_batch_is_never_larger_than_the_budget(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=2, max_num_seqs=16))
        requests = create_requests(5, prompt=3)
        engine.add(*requests)
        steps = engine.run()
        assert_answered(engine, *requests)
        assert steps <= 5 * (3 + 4)

    def test_generation_continues_after_the_tokens_given(self):
        engine, whole = FakeEngine(create_scheduler(max_num_batched_tokens=4)), create_request("a", 6, max_tokens=6)
        tokens, _ = expected_output(whole)
        request = create_request("a", 6, max_tokens=6, output=tokens[:4])
        engine.add(request)
        assert [engine.step().num_scheduled_tokens["a"] for _ in range(3)] == [4, 4, 2]
        engine.run()
        assert_answered(engine, whole)
        assert engine.scheduler.stats().num_prompt_tokens == 6
        engine.assert_idle()

    def test_a_block_may_hold_a_single_token(self):
        engine, request = FakeEngine(block_size=1), create_request("a", 3)
        engine.add(request)
        engine.step()
        assert len(engine.step().new_block_ids["a"][0]) == 1
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_started_is_said_once_with_queue_time_and_hit(self):
        engine = FakeEngine(create_scheduler(max_num_seqs=1))
        a, b = create_request("a", 9), create_request("b", create_request("a", 9).prompt_token_ids)
        engine.add(a, b)
        engine.run()
        assert engine.events["a"] == [RequestStarted(queue_s=0.0, num_cached_tokens=0)]
        assert engine.events["b"] == [RequestStarted(queue_s=4.0, num_cached_tokens=8)]


class TestPrefixCache:
    def test_a_hit_skips_the_computed_blocks(self):
        engine = FakeEngine()
        a = create_request("a", 14)
        b, c = create_request("b", a.prompt_token_ids[:13]), create_request("c", a.prompt_token_ids[:9])
        engine.add(a)
        engine.run()
        engine.add(b)
        assert engine.step().num_scheduled_tokens == {"b": 1}
        engine.run()
        engine.add(c)
        engine.run()
        assert_answered(engine, a, b, c)
        stats = engine.scheduler.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (14 + 13 + 9, 12 + 8)
        assert stats.num_prompt_tokens == 14 + 1 + 1

    def test_a_block_is_found_as_soon_as_it_is_filled(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=7))
        a = create_request("a", 9)
        engine.add(a)
        assert [engine.step().num_scheduled_tokens["a"] for _ in range(2)] == [7, 2]
        engine.add(create_request("b", a.prompt_token_ids))
        assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1}

    def test_reset_forgets_it(self):
        engine = FakeEngine()
        engine.add(create_request("a", 14))
        engine.run()
        engine.scheduler.reset_prefix_cache()
        engine.add(create_request("a", 14))
        assert engine.step().num_scheduled_tokens == {"a": 14}

    def test_equal_prompts_are_computed_once(self):
        """As of several answers to one prompt: the others come when its blocks can be shared."""
        engine = FakeEngine()
        a = create_request("a", 14)
        others = [create_request(name, a.prompt_token_ids) for name in "bcd"]
        engine.add(a, *others)
        assert engine.step().num_scheduled_tokens == {"a": 14}
        before = engine.scheduler.stats().num_free_blocks
        assert engine.step().num_scheduled_tokens == {"a": 1, "b": 2, "c": 2, "d": 2}
        assert before - engine.scheduler.stats().num_free_blocks == 3  # the last, partial block of each
        engine.run()
        assert_answered(engine, a, *others)
        engine.assert_idle()

    def test_equal_prompts_wait_through_chunks_that_end_within_blocks(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=7))
        a = create_request("a", 26)
        b = create_request("b", a.prompt_token_ids)
        engine.add(a, b)
        engine.run()
        assert_answered(engine, a, b)
        assert engine.scheduler.stats().num_prompt_tokens == 26 + 2

    def test_a_prompt_does_not_wait_for_a_few_shared_blocks(self):
        engine = FakeEngine()
        a = create_request("a", 14)
        b = create_request("b", [*a.prompt_token_ids[:4], *range(50, 66)])
        engine.add(a, b)
        assert engine.step().num_scheduled_tokens == {"a": 14, "b": 20}
        engine.run()
        assert_answered(engine, a, b)
        engine.assert_idle()

    def test_it_can_be_switched_off(self):
        engine = FakeEngine(create_scheduler(enable_prefix_caching=False))
        for _ in range(2):
            engine.add(create_request("a", 14))
            assert engine.step().num_scheduled_tokens == {"a": 14}
            engine.run()
        assert engine.scheduler.stats().prefix_cache_queries == 0


class TestPreemption:
    def test_the_last_in_order_loses_its_blocks_and_is_recomputed(self):
        engine = FakeEngine(create_scheduler(num_blocks=7, max_model_len=24, enable_prefix_caching=False))
        first, second = requests = create_requests(2, prompt=8, max_tokens=12)
        engine.add(*requests)
        step = engine.step()
        while not step.dropped_request_ids:
            engine.assert_sound()
            step = engine.step()
        assert step.dropped_request_ids == ["r1"]
        engine.run()
        assert_answered(engine, first, second)
        assert engine.scheduler.stats().num_preemptions == 1
        engine.assert_idle()

    def test_it_returns_ahead_of_those_that_came_later(self):
        engine = FakeEngine(create_scheduler(num_blocks=7, max_model_len=24, max_num_seqs=2))
        engine.add(*create_requests(4, prompt=8, max_tokens=12))
        dropped = []
        while engine.scheduler.has_work:
            dropped += engine.step().dropped_request_ids
        assert list(engine.finished) == ["r0", "r1", "r2", "r3"]
        assert dropped == ["r1", "r0", "r1", "r3", "r2", "r3"]
        assert engine.scheduler.stats().num_preemptions == 2
        engine.assert_idle()

    def test_preemption_in_mid_step_takes_back_what_was_scheduled(self):
        """The last in order may have been given its token before the first one runs out of blocks."""
        engine = FakeEngine(create_scheduler(num_blocks=7, max_model_len=24, policy="priority"))
        low = create_request("low", 7, priority=1, max_tokens=12)
        high = create_request("high", 8, priority=0, max_tokens=12)
        engine.add(low)
        engine.step()
        engine.add(high)
        while not engine.scheduler.stats().num_preemptions:
            step = engine.step()
        assert step.num_scheduled_tokens.keys() == {"high"}
        assert (step.total_num_scheduled_tokens, step.work) == (1, 1)
        assert step.num_context_tokens == 8 + len(engine.outputs["high"]) - 2, "what low would read is not counted"
        engine.run()
        assert_answered(engine, low, high)

    def test_admission_leaves_blocks_to_grow(self):
        engine = FakeEngine(create_scheduler(num_blocks=11, watermark=0.5))  # 5 of 10 held back
        engine.add(*create_requests(3, prompt=12))
        assert engine.step().num_scheduled_tokens.keys() == {"r0"}
        engine.run()
        assert len(engine.finished) == 3

    def test_the_watermark_never_keeps_a_lone_request_out(self):
        engine = FakeEngine(create_scheduler(num_blocks=11, max_model_len=40, watermark=0.9))
        request = create_request("a", 37, max_tokens=3)  # all blocks
        engine.add(request)
        engine.run()
        assert engine.finished["a"] is FinishReason.LENGTH
        engine.assert_idle()


class TestPolicies:
    @pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a", "b", "c", "d"]), ("priority", ["c", "a", "d", "b"])])
    def test_order_of_the_queue(self, policy, order):
        engine = FakeEngine(create_scheduler(max_num_seqs=1, policy=policy))
        for request_id, priority in [("a", 1), ("b", 2), ("c", 0), ("d", 1)]:
            engine.add(create_request(request_id, priority=priority, max_tokens=1))
        engine.run()
        assert list(engine.finished) == order

    def test_an_urgent_prompt_comes_before_one_that_has_begun(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=8, policy="priority"))
        engine.add(create_request("low", 20, priority=1))
        engine.step()
        engine.add(create_request("high", 20, priority=0))
        assert [engine.step().num_scheduled_tokens for _ in range(4)] == [
            {"high": 8},
            {"high": 8},
            {"high": 4, "low": 4},
            {"high": 1, "low": 7},
        ]

    def test_a_large_request_is_not_overtaken(self):
        engine = FakeEngine(create_scheduler(num_blocks=11, max_model_len=40))
        engine.add(create_request("running", 20, max_tokens=8))
        engine.step()
        engine.add(create_request("large", 30, max_tokens=1))
        engine.now += 1
        engine.add(create_request("small", 2, max_tokens=1))
        engine.run()
        assert list(engine.finished) == ["running", "large", "small"]


class TestStop:
    def stop_after(self, num_tokens: int, **sampling) -> tuple[int, FinishReason]:
        """Run a request whose `num_tokens`-th output token is a stop token."""
        plain = create_request("a", 6, max_tokens=num_tokens)
        stop_token = expected_output(plain)[0][num_tokens - 1]
        request = create_request("a", 6, **{"max_tokens": 9, "stop_token_ids": (stop_token,)} | sampling)
        engine = FakeEngine()
        engine.add(request)
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()
        return len(engine.outputs["a"]), engine.finished["a"]

    def test_stop_token(self):
        assert self.stop_after(3) == (3, FinishReason.STOP)

    def test_not_before_min_tokens(self):
        num_tokens, _ = self.stop_after(1, min_tokens=1)
        assert num_tokens > 1

    def test_it_wins_over_the_length(self):
        assert self.stop_after(3, max_tokens=3) == (3, FinishReason.STOP)

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_end_of_sequence(self, ignore_eos):
        request = next(
            request
            for index in range(999)
            if 2 in expected_output(request := create_request(f"a{index}", 6, max_tokens=6))[0][:5]
        )
        request = create_request(request.request_id, 6, max_tokens=6, ignore_eos=ignore_eos)
        engine = FakeEngine()
        engine.add(request)
        engine.run()
        assert_answered(engine, request)
        assert engine.finished[request.request_id] is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)

    def test_the_context_ends_a_generation(self):
        engine = FakeEngine(create_scheduler(max_model_len=16))
        engine.add(create_request("a", 10, max_tokens=100))
        engine.run()
        assert len(engine.outputs["a"]) == 6
        assert engine.finished["a"] is FinishReason.LENGTH


class TestAdmission:
    @pytest.mark.parametrize(
        ("settings", "error", "param"),
        [
            ({"prompt": []}, InvalidRequestError, "prompt_token_ids"),
            ({"prompt": 64}, PromptTooLongError, "prompt_token_ids"),
            ({"prompt": 60, "output": [5, 6, 7, 8], "max_tokens": 9}, PromptTooLongError, "prompt_token_ids"),
            ({"prompt": 6, "output": [5, 6], "max_tokens": 2}, InvalidRequestError, "max_tokens"),
        ],
    )
    def test_what_cannot_be_served_is_refused(self, settings, error, param):
        engine = FakeEngine()
        with pytest.raises(error) as raised:
            engine.add(create_request("a", **settings))
        assert raised.value.param == param
        engine.assert_idle()

    def test_an_id_is_used_once_at_a_time(self):
        engine = FakeEngine()
        engine.add(create_request("a"))
        with pytest.raises(InvalidRequestError, match="exists already"):
            engine.add(create_request("a"))
        engine.run()
        engine.add(create_request("a"))
        engine.run()
        engine.assert_idle()

    def test_a_full_queue_sheds(self):
        engine = FakeEngine(create_scheduler(max_num_waiting=2))
        engine.add(create_request("a"), create_request("b", role="consumer"))
        with pytest.raises(OverloadedError, match="2 requests"):
            engine.add(create_request("c"))
        engine.step()
        engine.add(create_request("c"))

    def test_a_context_beyond_the_cache_is_a_wrong_setting(self):
        with pytest.raises(ConfigError, match="max_model_len 41 does not fit 10 KV blocks of 4 tokens"):
            create_scheduler(num_blocks=11, max_model_len=41)


class TestAbort:
    def test_waiting_running_and_unknown(self):
        engine = FakeEngine(create_scheduler(max_num_seqs=1))
        engine.add(create_request("a"), create_request("b"), create_request("c"))
        engine.step()
        outputs = engine.abort("a", "b", "nobody")
        assert [(output.request_id, output.finish_reason) for output in outputs] == [
            ("a", FinishReason.ABORT),
            ("b", FinishReason.ABORT),
        ]
        assert engine.step().dropped_request_ids == ["a"]
        engine.run()
        assert engine.outputs["a"] == [first_token(create_request("a")).token_id]
        assert engine.finished["c"] is FinishReason.LENGTH
        assert engine.abort("a", "c") == []
        engine.assert_idle()

    def test_a_preempted_request(self):
        engine = FakeEngine(create_scheduler(num_blocks=7, max_model_len=24))
        engine.add(*create_requests(2, prompt=8, max_tokens=12))
        while not engine.scheduler.stats().num_preemptions:
            engine.step()
        engine.abort("r1")
        engine.run()
        assert engine.finished == {"r1": FinishReason.ABORT, "r0": FinishReason.LENGTH}
        engine.assert_idle()

    def test_while_the_step_runs(self):
        engine, other = FakeEngine(), create_request("b")
        engine.add(create_request("a"), other)
        step = engine.scheduler.schedule(0.0)
        engine.abort("a")
        outputs = engine.scheduler.update(step, engine._execute(step), 0.01)
        assert [(output.request_id, output.tokens) for output in outputs] == [("b", [first_token(other)])]
        engine._collect(outputs)
        engine.run()
        assert_answered(engine, other)
        engine.assert_idle()


def test_an_engine_without_a_connector_computes_all_that_it_is_asked():
    kv = KVCacheManager(65, KVGroups(ONE_GROUP, BLOCK_SIZE), enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(), kv, max_model_len=64, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    prompt = create_request("a", 9).prompt_token_ids
    scheduler.add_request(create_request("a", prompt, max_tokens=1), now=0.0)
    step = scheduler.schedule(now=0.0)
    assert step.num_scheduled_tokens == {"a": 9}
    assert scheduler.has_unfinished
    assert not scheduler.has_cache_change
    (output,) = scheduler.update(step, ModelRunnerOutput({RequestId("a"): [SampledToken(5)]}), 0.01)
    assert (output.tokens, output.finish_reason) == ([SampledToken(5)], FinishReason.LENGTH)
    assert scheduler.has_cache_change
    assert scheduler.take_cache_change().stored == b"".join(hash_prompt(prompt, BLOCK_SIZE, root_hash()))
    assert not scheduler.has_cache_change
    assert not scheduler.has_unfinished
    assert scheduler.check_integrity() == IntegrityReport(
        violations=[], num_requests=0, num_blocks_in_use=0, num_transfers=0
    )


def test_only_outputs_that_others_go_on_with_are_sent_before_the_step_runs():
    engine = FakeEngine()
    for name, role, is_sent in [("a", None, False), ("b", "producer", True), ("c", None, False)]:
        engine.add(create_request(name, role=role))
        engine.begin_step()
        assert bool(engine.events[name]) == is_sent
        engine.end_step()
        assert engine.events[name][0] == RequestStarted(queue_s=0.0, num_cached_tokens=0)


def test_stats():
    engine = FakeEngine(create_scheduler(max_num_batched_tokens=8, max_num_seqs=2))
    assert engine.scheduler.stats().last_step_tokens == 0
    engine.add(*create_requests(3, prompt=6))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_remote_kv) == (2, 1, 0)
    assert (stats.num_blocks, stats.num_free_blocks) == (64, 60)
    assert stats.num_queued_tokens == 1 + 4 + 6
    assert (stats.num_prompt_tokens, stats.num_generation_tokens, stats.last_step_tokens) == (8, 1, 8)


def test_integrity_notices_a_request_in_no_place():
    engine = FakeEngine()
    engine.add(create_request("a"))
    engine.step()
    engine.scheduler._running.clear()
    engine.scheduler._kv.pin(engine.scheduler._kv.blocks(engine.scheduler._places.live["a"]))
    violations = engine.scheduler.check_integrity().violations
    assert any("has ref_cnt 2 but 1 owners" in violation for violation in violations)
    assert any("are in places" in violation for violation in violations)
    assert any("blocks are held by" in violation for violation in violations)


class TestNumbersThatAreNotFinite:
    @pytest.mark.parametrize("num_steps_before", [0, 4])
    def test_the_request_fails_alone_and_its_kv_is_not_found_again(self, num_steps_before):
        engine = FakeEngine()
        broken, sound = create_request("a", 10, max_tokens=9), create_request("b", 10, max_tokens=9)
        engine.add(broken, sound)
        for _ in range(num_steps_before):
            engine.step()
        engine.broken.add("a")
        engine.run()
        assert engine.finished["a"] is FinishReason.ERROR
        assert engine.errors["a"] == (
            ErrorCode.NON_FINITE.value.number,
            "the model computed no finite logit for the next token",
        )
        assert_answered(engine, sound)
        again = create_request("c", broken.prompt_token_ids, max_tokens=2)
        engine.add(again)
        engine.run()
        assert_answered(engine, again)
        started = next(event for event in engine.events["c"] if isinstance(event, RequestStarted))
        assert started.num_cached_tokens == 0
        engine.run()
        engine.assert_idle()

    @pytest.mark.parametrize("is_direct", [False, True])
    def test_a_producer_says_that_no_more_is_saved(self, is_direct):
        engine = FakeEngine(create_scheduler(is_direct=is_direct, max_num_batched_tokens=8))
        request = create_request("a", 20, role="producer")
        engine.add(request)
        engine.broken.add("a")
        engine.step()
        engine.set_target("a", range(1, 6))
        engine.run()
        assert engine.finished["a"] is FinishReason.ERROR
        engine.settle_all()
        engine.run()
        last = [event for event in engine.events["a"] if isinstance(event, KVSaved)][-1]
        assert last.failure == "aborted" or last.num_tokens == 20
        engine.assert_idle()

    def test_a_request_all_of_whose_tokens_are_stops_is_refused(self):
        engine = FakeEngine()
        everything = tuple(range(VOCAB_SIZE))
        with pytest.raises(InvalidRequestError, match="min_tokens") as caught:
            engine.add(create_request("a", 6, min_tokens=1, stop_token_ids=everything))
        assert caught.value.param == "min_tokens"
        engine.add(create_request("b", 6, stop_token_ids=everything))
        engine.add(create_request("c", 6, min_tokens=1, stop_token_ids=everything[:-1]))
        all_but_eos = everything[:EOS] + everything[EOS + 1 :]
        engine.add(create_request("d", 6, min_tokens=1, stop_token_ids=all_but_eos, ignore_eos=True))
        with pytest.raises(InvalidRequestError):
            engine.add(create_request("e", 6, min_tokens=1, stop_token_ids=all_but_eos, ignore_eos=False))


def test_blocks_that_a_step_in_flight_writes_are_given_to_no_other():
    engine = FakeEngine(create_scheduler(max_num_batched_tokens=6), depth=2)
    engine.add(create_request("a", 18))
    engine.step()  # 6 tokens are computed, 6 more are in flight, in blocks 1 and 2
    engine.abort("a")
    stats = engine.scheduler.stats()
    assert (stats.num_free_blocks, stats.num_blocks) == (62, 64)
    engine.assert_sound()
    engine.assert_idle()


def test_a_request_gets_blocks_to_which_steps_in_flight_wrote_once_they_are_over():
    engine = FakeEngine(create_scheduler(num_blocks=5, max_num_batched_tokens=5), depth=3)
    engine.add(create_request("a", 15))
    engine.begin_step()
    engine.add(create_request("b", 9))
    engine.abort("a")
    engine.end_step()
    engine.run()
    engine.assert_idle()
    assert engine.finished["b"] is FinishReason.LENGTH
