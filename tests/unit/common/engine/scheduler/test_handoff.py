"""Producers and consumers: saves, loads, failures, aborts under transfer."""

import pytest

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.engine.messages import KVReceived, KVSaved, RequestStarted
from common.errors import InvalidRequestError
from common.types import FinishReason
from tests.unit.common.engine.scheduler_factories import (
    BLOCK_SIZE,
    FakeEngine,
    create_request,
    create_scheduler,
    expected_output,
    first_token,
    stored_prompt,
)

PROMPT_LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2]


def consumer(prompt: int = 10, **settings):
    """An engine with a consumer that holds its blocks, and the medium filled by some prefill pod."""
    request = create_request("a", prompt, role="consumer", **settings)
    engine = FakeEngine()
    engine.medium = stored_prompt(request)
    engine.add(request)
    engine.run()
    return engine, request


def assert_answered(engine: FakeEngine, request) -> None:
    outputs, reason = expected_output(request)
    assert engine.outputs[request.request_id] == outputs
    assert engine.finished[request.request_id] is reason


def received(engine: FakeEngine, request_id: str = "a") -> list[KVReceived]:
    return [event for event in engine.events[request_id] if isinstance(event, KVReceived)]


def saved(engine: FakeEngine, request_id: str = "a") -> list[KVSaved]:
    return [event for event in engine.events[request_id] if isinstance(event, KVSaved)]


class TestConsumer:
    def test_it_reserves_its_blocks_and_costs_nothing_until_kv_comes(self):
        engine, _ = consumer(prompt=10)
        stats = engine.scheduler.stats()
        assert stats.num_waiting_for_remote_kv == 1
        assert stats.num_blocks - stats.num_free_blocks == 3
        assert engine.events["a"] == [RequestStarted(queue_s=0.0, num_cached_tokens=0)]
        assert not engine.scheduler.has_work
        assert engine.scheduler.has_unfinished
        engine.assert_sound()

    @pytest.mark.parametrize("prompt", PROMPT_LENGTHS)
    def test_it_continues_from_loaded_kv_and_first_token_with_no_prefill(self, prompt):
        engine, request = consumer(prompt=prompt)
        engine.update_transfer("a", prompt, final=True, first_token=first_token(request))
        assert not engine.scheduler.has_work  # its KV is loaded without a step
        engine.now += 2.0
        engine.settle_all()
        assert engine.scheduler.has_work
        step = engine.step()
        assert engine.outputs["a"][0] == first_token(request).token_id
        assert received(engine) == [KVReceived(num_tokens=prompt, handoff_s=2.0)]
        assert step.num_scheduled_tokens == {"a": 1}
        assert [new.num_computed_tokens for new in step.new_requests] == [prompt]
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_its_first_token_does_not_wait_for_a_step(self):
        engine, request = consumer(prompt=10)
        engine.add(create_request("failing", 10, role="consumer"))
        engine.run()
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        engine.settle()
        engine.update_transfer("failing", 0, final=True, failure="prefill_gone")
        engine.begin_step()
        assert engine.outputs["a"] == [first_token(request).token_id]
        engine.end_step()
        engine.run()
        assert_answered(engine, request)

    def test_blocks_are_loaded_as_they_get_ready_and_the_partial_one_last(self):
        engine, request = consumer(prompt=10)
        loads: list[BlockTransfer] = []
        for num_ready in (3, 4, 7, 9, 10):
            engine.update_transfer("a", num_ready)
            loads += engine.step().loads
        assert [len(load.block_ids) for load in loads] == [1, 1, 1]
        assert [load.num_tokens_in_last for load in loads] == [4, 4, 2]
        assert [load.block_hashes[0] for load in loads] == list(stored_prompt(request))
        engine.settle_all()
        engine.run()
        assert not received(engine)
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        engine.run()
        assert received(engine) == [KVReceived(num_tokens=10, handoff_s=0.0)]
        assert_answered(engine, request)

    def test_updates_may_come_before_the_blocks_are_free(self):
        engine = FakeEngine(create_scheduler(num_blocks=11), settle_at_once=True)
        hog, request = create_request("hog", 33), create_request("a", 10, role="consumer")
        engine.medium = stored_prompt(request)
        engine.add(hog)
        engine.now += 1
        engine.add(request)
        engine.step()
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        assert engine.scheduler.stats().num_waiting_for_remote_kv == 0
        engine.run()
        assert_answered(engine, hog)
        assert_answered(engine, request)
        assert received(engine)[0].recompute_reason == ""
        engine.assert_idle()

    def test_only_what_is_not_cached_here_is_loaded(self):
        engine = FakeEngine()
        request = create_request("a", 14, role="consumer")
        engine.medium = stored_prompt(request)
        engine.add(create_request("b", request.prompt_token_ids[:9]))
        engine.run()
        engine.add(request)
        engine.run()
        assert engine.events["a"] == [RequestStarted(queue_s=0.0, num_cached_tokens=8)]
        engine.update_transfer("a", 6)
        assert not engine.scheduler.has_work
        engine.update_transfer("a", 14, final=True, first_token=first_token(request))
        (load,) = engine.step().loads
        assert load.block_hashes == tuple(stored_prompt(request))[2:]
        engine.settle_all()
        engine.run()
        assert received(engine)[0].num_tokens == 6
        assert_answered(engine, request)

    def test_loaded_blocks_become_findable_only_after_success(self):
        engine, request = consumer(prompt=14)
        engine.update_transfer("a", 14, final=True, first_token=first_token(request))
        engine.step()
        other = create_request("b", request.prompt_token_ids)
        engine.add(other)
        assert engine.step().num_scheduled_tokens == {"b": 14}
        engine.settle_all()
        engine.run()
        engine.add(create_request("c", request.prompt_token_ids))
        assert engine.step().num_scheduled_tokens == {"c": 2}

    def test_the_first_token_may_end_it(self):
        engine, request = consumer(prompt=10, max_tokens=1)
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        engine.step()
        engine.settle_all()
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_a_resumed_one_computes_only_its_earlier_output(self):
        whole = create_request("a", 10, max_tokens=8)
        tokens, _ = expected_output(whole)
        engine, request = consumer(prompt=10, max_tokens=8, output=tokens[:3])
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        engine.settle_all()
        assert engine.step().num_scheduled_tokens == {"a": 4}
        assert engine.outputs["a"] == tokens[:5]
        engine.run()
        assert_answered(engine, whole)
        engine.assert_idle()

    def test_updates_of_another_epoch_and_after_the_end_are_ignored(self):
        engine, request = consumer(prompt=10, epoch=2)
        engine.update_transfer("a", 10, epoch=1, final=True, failure="stale")
        engine.update_transfer("nobody", 10, final=True, failure="stale")
        assert not engine.scheduler.has_work
        engine.update_transfer("a", 10, epoch=2, final=True, first_token=first_token(request))
        engine.update_transfer("a", 10, epoch=2, final=True, failure="late")
        engine.step()
        engine.settle_all()
        engine.run()
        engine.update_transfer("a", 10, epoch=2, final=True, failure="late")
        assert [event.recompute_reason for event in received(engine)] == [""]
        assert_answered(engine, request)
        engine.assert_idle()

    def test_one_that_is_ready_waits_for_a_slot_and_keeps_room_to_grow(self):
        engine = FakeEngine(create_scheduler(num_blocks=11, max_num_seqs=1), settle_at_once=True)
        running = create_request("r", 5, max_tokens=20)
        ready, later = create_request("a", 8, role="consumer"), create_request("b", 20, role="consumer")
        engine.add(running, ready)
        engine.step()
        engine.medium = stored_prompt(ready) | stored_prompt(later)
        engine.update_transfer("a", 8, final=True, first_token=first_token(ready))
        engine.add(later)
        engine.step()
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_remote_kv) == (1, 2, 0)
        assert stats.num_free_blocks == 6, "it needs 5, and each of the others one to grow"
        assert stats.num_queued_tokens == 1 + 1 + 20
        engine.update_transfer("b", 20, final=True, first_token=first_token(later))
        engine.run()
        for request in (running, ready, later):
            assert_answered(engine, request)
        engine.assert_idle()

    @pytest.mark.parametrize(("prompt", "is_reserved"), [(20, True), (21, False)])
    def test_it_leaves_the_prompt_before_it_the_blocks_that_it_needs(self, prompt, is_reserved):
        engine = FakeEngine(create_scheduler(num_blocks=11, max_num_seqs=1))
        engine.add(create_request("running", 5, max_tokens=20))
        engine.step()
        engine.add(create_request("waiting", 8))  # 2 blocks
        engine.now += 1
        engine.add(create_request("a", prompt, role="consumer"))
        engine.step()
        stats = engine.scheduler.stats()
        assert stats.num_waiting_for_remote_kv == is_reserved
        assert stats.num_blocks - stats.num_free_blocks == 2 + (5 if is_reserved else 0), "8 less 2, less 1 to grow"

    def test_many_that_get_ready_at_once_share_the_budget(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=2), settle_at_once=True)
        requests = [create_request(name, 6, role="consumer") for name in "abcd"]
        engine.add(*requests)
        for request in requests:
            engine.medium |= stored_prompt(request)
            engine.update_transfer(request.request_id, 6, final=True, first_token=first_token(request))
        while engine.scheduler.has_work:
            assert engine.step().total_num_scheduled_tokens <= 2
        for request in requests:
            assert_answered(engine, request)


class TestBlockedQueue:
    """A request that finds no blocks behind reservations and jobs costs no steps, and goes on once they are free."""

    def blocked(self, **settings):
        engine = FakeEngine(create_scheduler(num_blocks=11, **settings))
        holder = create_request("a", 24, role="consumer")
        engine.medium = stored_prompt(holder)
        engine.add(holder)
        engine.run()
        engine.add(create_request("plain", 16))
        assert engine.run() <= 1
        assert not engine.scheduler.has_work
        assert engine.scheduler.stats().num_waiting == 1
        return engine, holder

    def test_until_the_holder_is_aborted(self):
        engine, _ = self.blocked()
        engine.abort("a")
        engine.run()
        assert engine.finished["plain"] is FinishReason.LENGTH

    def test_until_the_holder_is_done(self):
        engine, holder = self.blocked()
        engine.settle_at_once = True
        engine.update_transfer("a", 24, final=True, first_token=first_token(holder))
        engine.run()
        assert list(engine.finished) == ["a", "plain"]

    def test_until_the_last_job_of_an_aborted_holder_settles(self):
        engine, _ = self.blocked()
        engine.update_transfer("a", 24)
        engine.step()
        engine.abort("a")
        engine.run()
        assert not engine.scheduler.has_work
        engine.settle_all()
        engine.run()
        assert engine.finished["plain"] is FinishReason.LENGTH

    def test_until_the_one_ahead_is_aborted(self):
        engine, _ = self.blocked()
        engine.now += 1
        engine.add(create_request("small", 2))
        engine.run()
        assert engine.finished == {}
        engine.abort("plain")
        engine.run()
        assert engine.finished["small"] is FinishReason.LENGTH

    def test_a_consumer_waits_in_the_same_way(self):
        engine, _ = self.blocked()
        engine.abort("plain")
        engine.add(create_request("b", 20, role="consumer"))
        engine.now += 0.5
        engine.add(create_request("small", 2))  # would fit, but must not pass
        assert engine.run() <= 1
        assert engine.scheduler.stats().num_waiting == 2
        engine.abort("a")
        engine.run()
        assert engine.scheduler.stats().num_waiting_for_remote_kv == 1
        assert engine.finished["small"] is FinishReason.LENGTH

    def test_until_one_that_fits_comes_first(self):
        engine, _ = self.blocked(policy="priority")
        engine.add(create_request("urgent", 2, priority=-1, max_tokens=1))
        engine.run()
        assert list(engine.finished) == ["urgent"]


class TestConsumerRecompute:
    @pytest.mark.parametrize(("num_ready", "num_kept"), [(0, 0), (7, 4), (8, 8), (10, 9)])
    def test_failed_prefill_keeps_what_arrived(self, num_ready, num_kept):
        engine, request = consumer(prompt=10)
        engine.update_transfer("a", num_ready)
        engine.step()
        engine.settle_all()
        engine.run()
        engine.update_transfer("a", num_ready, final=True, failure="prefill_gone")
        step = engine.step()
        if not step.num_scheduled_tokens:
            step = engine.step()
        assert step.num_scheduled_tokens == {"a": 10 - num_kept}  # one token is computed again to sample the next
        (event,) = received(engine)
        assert (event.num_tokens, event.recompute_reason) == (
            min(num_ready // 4 * 4 + num_ready // 10 * 2, 10),
            "prefill_gone",
        )
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    @pytest.mark.parametrize("num_blocks_ok", [0, 1, 2])
    def test_a_failed_load_is_recomputed_behind_the_first_token(self, num_blocks_ok):
        engine, request = consumer(prompt=10)
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        engine.settle(num_blocks_ok=num_blocks_ok, error="block_corrupt")
        assert engine.step().num_scheduled_tokens == {"a": 11 - num_blocks_ok * 4}
        assert engine.outputs["a"][0] == first_token(request).token_id
        (event,) = received(engine)
        assert (event.num_tokens, event.recompute_reason) == (num_blocks_ok * 4, "block_corrupt")
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_a_gap_ends_the_valid_prefix_and_later_loads_are_waited_for(self):
        engine, request = consumer(prompt=14)
        jobs = []
        for num_ready in (4, 8, 12):
            engine.update_transfer("a", num_ready)
            jobs += [load.job_id for load in engine.step().loads]
        engine.settle(jobs[2])
        engine.settle(jobs[1], num_blocks_ok=0, error="block_missing")
        assert engine.cancelled == {jobs[0]}
        engine.step()
        assert not received(engine)  # the first load may still write
        assert engine.scheduler.check_integrity().num_transfers == 1
        engine.settle(jobs[0])
        engine.step()
        assert received(engine) == [KVReceived(num_tokens=4, handoff_s=0.0, recompute_reason="block_missing")]
        engine.update_transfer("a", 14, final=True, first_token=first_token(request))  # too late to matter
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_what_settled_with_the_failure_is_not_cancelled(self):
        engine, _ = consumer(prompt=14)
        for num_ready in (4, 8):
            engine.update_transfer("a", num_ready)
            engine.step()
        engine.settle(num_blocks_ok=0, error="block_missing")
        engine.settle()
        engine.step()
        assert engine.step().cancelled_job_ids == []

    def test_a_failure_waits_for_the_loads_in_flight(self):
        engine, request = consumer(prompt=10)
        engine.update_transfer("a", 8)
        engine.step()
        engine.update_transfer("a", 8, final=True, failure="prefill_gone")
        engine.run()
        assert not received(engine)
        assert not engine.scheduler.has_work
        engine.settle_all()
        engine.run()
        assert [event.num_tokens for event in received(engine)] == [8]
        assert_answered(engine, request)

    def test_it_is_computed_even_if_others_hold_everything_else(self):
        """It keeps its blocks, so it needs none; to grow, it preempts or is preempted as anybody."""
        engine = FakeEngine(create_scheduler(num_blocks=11))
        consumers = [create_request(name, 12, role="consumer", max_tokens=20) for name in ("a", "b")]
        plain = create_request("plain", 4, max_tokens=20)
        engine.add(*consumers, plain)
        while engine.scheduler.stats().num_free_blocks:
            engine.step()
        for request in consumers:
            engine.update_transfer(request.request_id, 0, final=True, failure="prefill_gone")
        step = engine.step()
        assert step.num_scheduled_tokens == {"plain": 1, "a": 12, "b": 12}
        engine.run()
        for request in (*consumers, plain):
            assert_answered(engine, request)
        assert engine.scheduler.stats().num_preemptions > 0
        engine.assert_idle()


class TestConsumerAbort:
    def test_blocks_stay_pinned_until_the_load_settles(self):
        engine, request = consumer(prompt=10)
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        (load,) = engine.step().loads
        (output,) = engine.abort("a")
        assert output.finish_reason is FinishReason.ABORT
        assert engine.cancelled == {load.job_id}
        assert not engine.scheduler.has_work
        assert engine.scheduler.has_unfinished
        report = engine.scheduler.check_integrity()
        assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 3, 1)
        engine.settle_all()
        engine.run()
        engine.assert_idle()

    def test_before_and_after_the_reservation(self):
        engine, _ = consumer(prompt=10)
        engine.abort("a")
        engine.run()
        engine.assert_idle()
        engine.add(create_request("b", 10, role="consumer"))
        engine.abort("b")
        engine.run()
        engine.assert_idle()

    def test_news_after_it_starts_nothing(self):
        engine, _ = consumer(prompt=10)
        engine.abort("a")
        engine.update_transfer("a", 8)
        assert engine.step().loads == []
        engine.assert_idle()


class TestProducer:
    @pytest.mark.parametrize("prompt", PROMPT_LENGTHS)
    def test_it_saves_its_prompt_and_ends_with_the_first_token(self, prompt):
        engine = FakeEngine(settle_at_once=True)
        request = create_request("a", prompt, role="producer")
        engine.add(request)
        engine.run()
        assert engine.outputs["a"] == [first_token(request).token_id]
        assert engine.finished["a"] is FinishReason.HANDOFF
        assert saved(engine) == [KVSaved(num_tokens=prompt)]
        assert engine.medium == stored_prompt(request)
        engine.assert_idle()

    def test_chunks_are_saved_while_the_next_is_computed(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=6))
        request = create_request("a", 15, role="producer")
        engine.add(request)
        saves = [engine.step().saves for _ in range(3)]
        assert [[len(save.block_ids) for save in step] for step in saves] == [[1], [2], [1]]
        assert saves[2][0].num_tokens_in_last == 3
        assert [h for step in saves for save in step for h in save.block_hashes] == list(stored_prompt(request))

    @pytest.mark.parametrize(
        ("sampling", "reason"),
        [({"max_tokens": 1}, FinishReason.LENGTH), ({"stop": True}, FinishReason.STOP), ({}, FinishReason.HANDOFF)],
    )
    def test_the_finish_reason_is_that_of_the_whole_request(self, sampling, reason):
        if sampling.pop("stop", False):
            sampling["stop_token_ids"] = (first_token(create_request("a", 10)).token_id,)
        engine = FakeEngine(settle_at_once=True)
        engine.add(create_request("a", 10, role="producer", **sampling))
        engine.run()
        assert engine.finished["a"] is reason

    def test_a_resumed_one_saves_its_last_block_once_nothing_more_is_written_there(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=5))
        request = create_request("a", 5, role="producer", output=[5, 6, 7])
        engine.add(request)
        assert [[len(save.block_ids) for save in engine.step().saves] for _ in range(2)] == [[1], [1]]
        engine.settle_all()
        engine.run()
        assert engine.medium == stored_prompt(request)
        assert saved(engine)[-1] == KVSaved(num_tokens=5)

    def test_cached_blocks_are_saved_again(self):
        engine = FakeEngine(settle_at_once=True)
        request = create_request("a", 14, role="producer")
        engine.add(create_request("b", request.prompt_token_ids))
        engine.run()
        engine.add(request)
        step = engine.step()
        assert step.num_scheduled_tokens == {"a": 2}
        before, after = step.saves  # the cached blocks go out before the step
        assert before.block_hashes + after.block_hashes == tuple(stored_prompt(request))
        assert engine.medium == stored_prompt(request)

    def test_blocks_stay_pinned_until_all_saves_settle(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=8))
        engine.add(create_request("a", 10, role="producer"))
        engine.step()
        engine.step()
        assert engine.finished["a"] is FinishReason.HANDOFF
        engine.run()
        assert not engine.scheduler.has_work
        assert engine.scheduler.has_unfinished
        report = engine.scheduler.check_integrity()
        assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 3, 1)
        engine.settle()
        engine.step()
        assert engine.scheduler.check_integrity().num_blocks_in_use == 3  # freed together, the tail first
        with pytest.raises(InvalidRequestError, match="exists already"):
            engine.scheduler.add_request(create_request("a"), 0.0)
        engine.settle()
        engine.step()
        assert saved(engine) == [KVSaved(num_tokens=8), KVSaved(num_tokens=10)]
        engine.assert_idle()

    def test_progress_is_contiguous(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=4))
        engine.add(create_request("a", 12, role="producer"))
        jobs = [engine.step().saves[0].job_id for _ in range(3)]
        engine.settle(jobs[1])
        engine.step()
        assert saved(engine) == []
        engine.settle(jobs[0])
        engine.step()
        engine.settle(jobs[2])
        engine.step()
        assert saved(engine) == [KVSaved(num_tokens=8), KVSaved(num_tokens=12)]
        engine.assert_idle()

    def test_the_first_failure_is_the_last_word(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=4))
        engine.add(create_request("a", 14, role="producer"))
        jobs = [engine.step().saves[0].job_id for _ in range(2)]
        engine.settle(jobs[1], num_blocks_ok=0, error="store_failed")
        assert saved(engine) == [KVSaved(num_tokens=0, failure="store_failed")]
        assert engine.step().saves == []
        engine.step()
        assert engine.finished["a"] is FinishReason.HANDOFF
        engine.settle_all()
        engine.run()
        engine.step()
        assert len(saved(engine)) == 1
        engine.assert_idle()

    def test_a_preempted_one_keeps_what_is_being_saved_and_saves_the_rest_later(self):
        engine = FakeEngine(create_scheduler(num_blocks=11, max_num_batched_tokens=3, policy="priority"))
        low = create_request("low", 26, role="producer", priority=1)
        high = create_request("high", 4, max_tokens=20)
        engine.add(high)
        engine.step()
        engine.add(low)
        while not engine.scheduler.stats().num_preemptions:
            engine.step()
            engine.assert_sound()
        pinned = {block_id for _, transfer in engine.jobs.values() for block_id in transfer.block_ids}
        assert engine.scheduler.check_integrity().num_blocks_in_use >= len(pinned) > 0
        engine.settle_all()
        engine.settle_at_once = True
        engine.run()
        assert_answered(engine, high)
        assert engine.outputs["low"] == [first_token(low).token_id]
        assert stored_prompt(low).items() <= engine.medium.items()
        assert saved(engine, "low")[-1] == KVSaved(num_tokens=26)
        engine.assert_idle()

    def test_abort_under_a_save(self):
        engine = FakeEngine(create_scheduler(max_num_batched_tokens=8))
        engine.add(create_request("a", 20, role="producer"))
        (save,) = engine.step().saves
        (output,) = engine.abort("a")
        assert output.finish_reason is FinishReason.ABORT
        assert saved(engine) == [KVSaved(num_tokens=0, failure="aborted")]
        step = engine.step()
        assert (step.cancelled_job_ids, step.dropped_request_ids) == ([save.job_id], ["a"])
        assert engine.scheduler.check_integrity().num_blocks_in_use == 2
        engine.settle_all()
        engine.run()
        engine.assert_idle()

    def test_abort_after_its_end_hurries_the_saves(self):
        engine = FakeEngine()
        engine.add(create_request("a", 10, role="producer"))
        (save,) = engine.step().saves
        assert engine.abort("a") == []
        assert engine.step().cancelled_job_ids == [save.job_id]
        engine.settle(num_blocks_ok=1, error="cancelled")
        engine.step()
        assert saved(engine) == [KVSaved(num_tokens=0, failure="aborted")]
        engine.assert_idle()


def test_an_unknown_job_is_ignored(caplog):
    engine = FakeEngine()
    engine.add(create_request("a", 10, role="producer"))
    engine.step()
    job_id = next(iter(engine.jobs))
    engine.settle()
    engine.scheduler.actor.settle(TransferResult(job_id, 3))
    engine.step()
    assert f"unknown connector job {job_id}" in caplog.text
    engine.assert_idle()


@pytest.mark.parametrize("prompt", PROMPT_LENGTHS)
@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_prefill_pod_to_decode_pod(prompt, chunk):
    """Two schedulers and one medium: what the producer says, the consumer is told."""
    prefill = FakeEngine(create_scheduler(max_num_batched_tokens=chunk), settle_at_once=True)
    decode = FakeEngine(settle_at_once=True)
    decode.medium = prefill.medium
    produce, consume = (create_request("a", prompt, role=role, max_tokens=9) for role in ("producer", "consumer"))
    prefill.add(produce)
    decode.add(consume)
    while prefill.scheduler.has_unfinished:
        prefill.step()
        for event in saved(prefill):
            decode.update_transfer("a", event.num_tokens)
        if decode.scheduler.has_work:
            decode.step()
    decode.update_transfer("a", prompt, final=True, first_token=first_token(produce))
    decode.run()
    assert_answered(decode, consume)
    assert [(event.num_tokens, event.recompute_reason) for event in received(decode)] == [(prompt, "")]
    assert decode.scheduler.stats().num_prompt_tokens == 0
    prefill.run()
    prefill.assert_idle()
    decode.assert_idle()
