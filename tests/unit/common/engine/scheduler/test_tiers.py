"""Tiers below the device: lookups, restores, offloads."""

import pytest

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.engine.messages import KVReceived, RequestStarted
from common.engine.transfers.port import PINNED_SHARE
from common.errors import OverloadedError
from common.types import FinishReason
from tests.unit.common.engine.scheduler_factories import (
    BLOCK_SIZE,
    TWO_GROUPS,
    FakeEngine,
    create_request,
    create_requests,
    create_scheduler,
    digest_of,
    expected_output,
    fingerprints,
    first_token,
    prompt_digests,
    stored_prompt,
)


def create_engine(*, wants_offloads: bool = False, **settings) -> FakeEngine:
    return FakeEngine(create_scheduler(keeps_blocks=True, wants_offloads=wants_offloads, **settings))


def assert_answered(engine: FakeEngine, *requests) -> None:
    for request in requests:
        outputs, reason = expected_output(request)
        assert engine.outputs[request.request_id] == outputs
        assert engine.finished[request.request_id] is reason


def jobs(engine: FakeEngine, kind: str) -> list[BlockTransfer]:
    return [transfer for job_kind, transfer in engine.jobs.values() if job_kind == kind]


def started(engine: FakeEngine, request_id: str = "a") -> list[RequestStarted]:
    return [event for event in engine.events[request_id] if isinstance(event, RequestStarted)]


def answer(engine: FakeEngine, num_found: int, error: str = "") -> None:
    engine.settle_as(TransferResult(jobs(engine, "lookup")[0].job_id, num_found, error))


class TestLookup:
    def test_a_new_request_asks_for_its_blocks_but_the_one_of_its_last_token(self):
        engine, request = create_engine(), create_request("a", 3 * BLOCK_SIZE)
        engine.add(request)
        step = engine.step()
        (lookup,) = step.lookups
        assert lookup.block_hashes == tuple(stored_prompt(request))[:2]
        assert lookup.block_ids == ()
        assert lookup.num_tokens_in_last == BLOCK_SIZE
        assert not step.num_scheduled_tokens
        assert not engine.scheduler.has_work
        assert engine.scheduler.has_unfinished
        assert engine.scheduler.stats().num_waiting == 1
        assert engine.scheduler.stats().num_queued_tokens == 3 * BLOCK_SIZE
        engine.assert_sound()

    @pytest.mark.parametrize(("num_found", "error"), [(0, ""), (0, "store_failed"), (-3, "store_failed")])
    def test_without_a_find_it_is_computed(self, num_found, error):
        engine, request = create_engine(), create_request("a", 10)
        engine.add(request)
        engine.step()
        answer(engine, num_found, error)
        engine.run()
        assert_answered(engine, request)
        assert engine.scheduler.stats().num_prompt_tokens == 10
        engine.assert_idle()

    def test_nobody_asks_without_tiers_or_with_nothing_to_share(self):
        short, engine = create_request("a", BLOCK_SIZE), create_engine()
        engine.add(short)
        assert not engine.step().lookups
        without = FakeEngine(create_scheduler())
        without.add(create_request("a", 10))
        assert not without.step().lookups
        uncached = create_engine(wants_offloads=True, enable_prefix_caching=False)
        uncached.add(create_request("a", 10))
        step = uncached.step()
        assert not step.lookups
        assert not step.saves

    def test_it_asks_only_for_what_is_not_here(self):
        engine, prompt = create_engine(), list(range(3, 17))
        engine.settle_at_once = True
        engine.add(create_request("a", prompt[:9]))
        engine.run()
        engine.settle_at_once = False
        request = create_request("b", prompt)
        engine.add(request)
        (lookup,) = engine.step().lookups
        assert lookup.block_hashes == tuple(stored_prompt(request))[2:3]
        same = create_request("c", prompt[:9])
        engine.add(same)
        assert "c" in engine.step().num_scheduled_tokens  # all that can be shared is here

    def test_nobody_waits_behind_it(self):
        engine = create_engine()
        engine.add(create_request("a", 10), create_request("b", 3))
        assert list(engine.step().num_scheduled_tokens) == ["b"]

    def test_it_keeps_its_place_in_the_order(self):
        engine = create_engine(max_num_seqs=1)
        first, second = create_requests(2, 10)
        engine.add(first, second)
        engine.step()
        lookups = jobs(engine, "lookup")
        engine.settle(lookups[1].job_id)
        engine.settle(lookups[0].job_id)
        assert list(engine.step().num_scheduled_tokens) == ["r0"]

    def test_those_who_ask_count_as_waiting(self):
        engine = create_engine(max_num_waiting=2)
        engine.add(*create_requests(2, 10))
        with pytest.raises(OverloadedError, match="2 requests"):
            engine.add(create_request("b", 2))

    @pytest.mark.parametrize("num_steps", [0, 1])
    def test_abort_while_it_asks(self, num_steps):
        engine = create_engine()
        engine.add(create_request("a", 10))
        for _ in range(num_steps):
            engine.step()
        (output,) = engine.abort("a")
        assert output.finish_reason is FinishReason.ABORT
        engine.assert_sound()
        assert engine.cancelled == set(engine.jobs)
        engine.settle_all()
        engine.step()
        engine.assert_idle()

    def test_a_consumer_does_not_ask_before_its_handoff_has_failed(self):
        request = create_request("a", 10, role="consumer")
        engine = FakeEngine(create_scheduler(keeps_blocks=True, is_direct=True))
        engine.add(request)
        assert not engine.step().lookups
        engine.update_transfer("a", 0, final=True, failure="prefill_gone")  # who may still be writing
        assert len(engine.step().lookups) == 1
        engine.settle_all()
        engine.update_transfer("a", 0, is_quiescent=True)
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()


class TestRestore:
    def restoring(self, num_found: int = 2, prompt: int = 10, **settings):
        """An engine that loads two blocks of a request."""
        engine, request = create_engine(**settings), create_request("a", prompt)
        engine.medium = stored_prompt(request)
        engine.add(request)
        engine.step()
        answer(engine, num_found)
        engine.step()
        engine.step()
        return engine, request

    @pytest.mark.parametrize("num_found", [2, 99])
    def test_what_is_kept_is_loaded_and_the_rest_computed(self, num_found):
        engine, request = self.restoring(num_found)
        (load,) = jobs(engine, "load")
        assert load.is_for_tier
        assert load.block_hashes == tuple(stored_prompt(request))[:2]
        assert load.num_tokens_in_last == BLOCK_SIZE
        assert engine.scheduler.stats().num_waiting_for_remote_kv == 1
        assert not engine.scheduler.has_work
        assert started(engine) == []
        engine.settle()
        assert started(engine) == []
        assert engine.step().num_scheduled_tokens == {"a": 2}
        assert started(engine) == [RequestStarted(queue_s=3.0, num_cached_tokens=8)]
        engine.run()
        assert_answered(engine, request)
        stats = engine.scheduler.stats()
        assert (stats.tier_queries, stats.tier_hits) == (8, 8)
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 0)
        engine.assert_idle()

    @pytest.mark.parametrize("num_ok", [0, 1])
    def test_what_does_not_come_is_computed(self, num_ok):
        engine, request = self.restoring()
        engine.settle(num_blocks_ok=num_ok, error="store_failed")
        assert engine.step().num_scheduled_tokens == {"a": 10 - num_ok * BLOCK_SIZE}
        engine.run()
        assert_answered(engine, request)
        assert engine.scheduler.stats().tier_hits == num_ok * BLOCK_SIZE
        assert len(started(engine)) == 1
        engine.assert_idle()

    def test_what_was_restored_is_cached(self):
        engine, request = self.restoring()
        engine.settle()
        engine.run()
        again = create_request("b", request.prompt_token_ids)
        engine.add(again)
        step = engine.step()
        assert step.num_scheduled_tokens == {"b": 2}
        assert not step.lookups

    def test_abort_leaves_its_blocks_pinned_until_the_load_settles(self):
        engine, _ = self.restoring()
        engine.abort("a")
        assert engine.scheduler.check_integrity().num_blocks_in_use == 2
        assert engine.step().cancelled_job_ids == [jobs(engine, "load")[0].job_id]
        engine.assert_sound()
        engine.settle()
        engine.step()
        engine.assert_idle()

    def test_it_needs_no_seat_and_is_started_when_it_gets_one(self):
        engine = create_engine(max_num_seqs=1)
        running, request = create_request("b", 2, max_tokens=12), create_request("a", 10)
        engine.medium = stored_prompt(request)
        engine.add(running, request)
        engine.step()
        engine.settle()
        assert len(engine.step().loads) == 1
        engine.settle()
        engine.step()
        engine.step()
        assert engine.scheduler.stats().num_running == 1
        assert started(engine) == []
        engine.run()
        assert_answered(engine, running, request)
        assert started(engine)[0].num_cached_tokens == 8

    def test_but_it_does_not_run_far_ahead_of_the_batch(self):
        engine = create_engine(max_num_seqs=5)
        requests = create_requests(9, 10)
        for request in requests:
            engine.medium |= stored_prompt(request)
        engine.add(*requests)
        engine.step()
        engine.settle_all()
        assert len(engine.step().loads) == 6
        assert not engine.scheduler.has_work  # it does not spin
        engine.settle_all()
        assert not engine.step().loads, "one that is restored already waits for a slot"
        assert engine.scheduler.stats().num_running == 5
        engine.settle_at_once = True
        engine.run()
        engine.step()
        engine.run()
        assert_answered(engine, *requests)
        assert engine.scheduler.stats().tier_hits == 9 * 8
        engine.assert_idle()

    def test_a_local_prefix_that_grew_meanwhile_is_not_loaded(self):
        engine, request = create_engine(), create_request("a", 14)
        engine.medium = stored_prompt(request)
        engine.add(request)
        engine.step()
        sooner = create_request("b", request.prompt_token_ids[:9])
        engine.add(sooner)
        engine.step()
        engine.settle(jobs(engine, "lookup")[1].job_id, num_blocks_ok=0)
        engine.step()
        engine.step()
        engine.settle(jobs(engine, "lookup")[0].job_id)
        (load,) = engine.step().loads
        assert load.block_hashes == tuple(stored_prompt(request))[2:3]
        engine.settle_all()
        assert engine.step().num_scheduled_tokens["a"] == 2
        engine.run()
        assert_answered(engine, request, sooner)
        engine.assert_idle()

    @pytest.mark.parametrize("num_slots", [1, 2])
    def test_once_all_of_it_is_here_nothing_is_loaded(self, num_slots):
        engine, request = create_engine(max_num_seqs=num_slots), create_request("a", 10)
        engine.medium = stored_prompt(request)
        engine.add(request)
        engine.step()
        twin = create_request("b", request.prompt_token_ids)
        engine.add(twin)
        engine.step()
        engine.settle(jobs(engine, "lookup")[1].job_id, num_blocks_ok=0)
        engine.step()
        engine.step()
        engine.settle()
        assert len(engine.step().num_scheduled_tokens) == num_slots
        engine.run()
        assert_answered(engine, request, twin)
        assert not jobs(engine, "load")
        engine.assert_idle()

    def test_a_local_prefix_that_shrank_is_asked_for_once_more(self):
        engine, request = create_engine(), create_request("a", 14)
        engine.medium = stored_prompt(request)
        sooner = create_request("b", request.prompt_token_ids[:9])
        engine.settle_at_once = True
        engine.medium.clear()
        engine.add(sooner)
        engine.run()
        engine.settle_at_once = False
        engine.medium = stored_prompt(request)
        engine.add(request)
        assert len(engine.step().lookups[0].block_hashes) == 1
        engine.scheduler.reset_prefix_cache()
        engine.settle()
        (lookup,) = engine.step().lookups
        assert len(lookup.block_hashes) == 3
        engine.assert_sound()
        engine.settle()
        (load,) = engine.step().loads
        assert len(load.block_ids) == 3
        engine.settle()
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_a_preempted_request_gets_its_output_back(self):
        engine = create_engine(wants_offloads=True, num_blocks=8, max_num_seqs=2)
        requests = create_requests(5, 7, max_tokens=14)
        engine.settle_at_once = True
        engine.add(*requests)
        engine.run()
        engine.step()
        engine.run()
        stats = engine.scheduler.stats()
        assert stats.num_preemptions
        assert stats.tier_hits
        assert_answered(engine, *requests)
        assert all(len(started(engine, request.request_id)) == 1 for request in requests)
        engine.assert_idle()

    def test_a_producer_of_a_direct_connector_restores_before_it_computes(self):
        request = create_request("a", 10, role="producer")
        engine = FakeEngine(create_scheduler(keeps_blocks=True, is_direct=True))
        engine.medium = stored_prompt(request)
        engine.add(request)
        engine.step()
        engine.settle()
        engine.step()
        engine.step()
        assert started(engine) == []
        engine.settle()
        assert engine.step().num_scheduled_tokens == {"a": 2}
        assert len(started(engine)) == 1
        engine.set_target("a", [5, 6, 7])
        (save,) = engine.step().saves
        assert save.destination is not None
        assert len(save.block_ids) == 3
        engine.settle()
        engine.run()
        engine.assert_idle()


class TestOffload:
    def test_full_blocks_of_all_requests_go_out_in_one_save_in_the_step_that_fills_them(self):
        engine = create_engine(wants_offloads=True)
        requests = create_requests(2, 10, max_tokens=3)
        engine.add(*requests)
        engine.step()
        engine.settle_all()
        step = engine.step()
        (save,) = step.saves
        assert save.request_id == ""
        assert save.is_for_tier
        assert save.num_tokens_in_last == BLOCK_SIZE
        assert save.block_hashes == tuple(h for request in requests for h in list(stored_prompt(request))[:2])
        assert not engine.step().saves
        assert len(engine.step().saves[0].block_ids) == 2  # the second output token filled the third block
        engine.run()
        assert_answered(engine, *requests)
        assert engine.scheduler.has_unfinished
        assert engine.scheduler.check_integrity().num_blocks_in_use == 6
        assert engine.scheduler.check_integrity().num_transfers == 2
        engine.settle_all()
        engine.step()
        assert engine.scheduler.stats().num_offloaded_blocks == 6
        assert_answered(engine, *requests)
        engine.assert_idle()

    def test_output_blocks_are_offered_with_what_they_hold(self):
        engine, request = create_engine(wants_offloads=True, num_blocks=65), create_request("a", 3, max_tokens=12)
        engine.settle_at_once = True
        engine.add(request)
        engine.run()
        engine.step()
        tokens = request.prompt_token_ids + expected_output(request)[0]
        values = fingerprints(tokens)
        full = {tuple(values[i : i + BLOCK_SIZE]) for i in range(0, 12, BLOCK_SIZE)}
        assert {tuple(content) for content in engine.medium.values()} == full

    @pytest.mark.parametrize(("num_ok", "error"), [(0, "store_failed"), (1, "store_full"), (-1, ""), (99, "")])
    def test_how_they_end_is_counted_and_nothing_else(self, num_ok, error):
        engine, request = create_engine(wants_offloads=True), create_request("a", 10, max_tokens=1)
        engine.add(request)
        engine.step()
        engine.settle()
        engine.run()
        engine.settle_as(TransferResult(jobs(engine, "save")[0].job_id, num_ok, error))
        engine.step()
        stats = engine.scheduler.stats()
        num_ok = min(max(num_ok, 0), 2)
        assert (stats.num_offloaded_blocks, stats.num_offload_failures) == (num_ok, 2 - num_ok)
        assert_answered(engine, request)
        engine.assert_idle()

    def test_what_came_from_the_cache_or_from_below_is_not_offered(self):
        engine, request = create_engine(wants_offloads=True), create_request("a", 14)
        engine.medium = dict(list(stored_prompt(request).items())[:2])
        engine.add(request)
        engine.step()
        engine.settle()
        engine.step()
        engine.step()
        engine.settle()
        (save,) = engine.step().saves
        assert save.block_hashes == tuple(stored_prompt(request))[2:3]
        engine.settle()
        engine.run()
        engine.settle_all()
        engine.run()
        engine.add(create_request("b", request.prompt_token_ids, max_tokens=1))
        assert not engine.step().saves

    def test_what_a_handoff_saves_is_not_offered_as_well(self):
        engine = create_engine(wants_offloads=True)
        engine.add(create_request("a", 10, role="producer"))
        engine.step()
        engine.settle()
        (save,) = engine.step().saves
        assert not save.is_for_tier

    def test_a_direct_producer_offers_what_it_computes(self):
        engine = create_engine(wants_offloads=True, is_direct=True)
        engine.add(create_request("a", 10, role="producer"))
        engine.step()
        engine.settle()
        (save,) = engine.step().saves
        assert save.is_for_tier

    def test_what_a_direct_consumer_received_is_offered(self):
        engine = create_engine(wants_offloads=True, is_direct=True)
        request = create_request("a", 10, role="consumer")
        engine.add(request)
        engine.step()
        for block_id, start in zip(engine.windows["a"], range(0, 10, BLOCK_SIZE), strict=True):
            engine.write_block(block_id, fingerprints(request.prompt_token_ids)[start : start + BLOCK_SIZE])
        engine.update_transfer(
            "a", 10, final=True, first_token=first_token(request), digests=prompt_digests(request), is_quiescent=True
        )
        engine.settle()
        (save,) = engine.step().saves
        assert [event for event in engine.events["a"] if isinstance(event, KVReceived)]
        assert engine.scheduler.check_integrity().violations == []
        assert save.is_for_tier
        assert save.block_hashes == tuple(stored_prompt(request))[:2]
        engine.run()
        assert_answered(engine, request)
        engine.settle_all()
        engine.step()
        engine.assert_idle()

    def test_what_a_consumer_of_a_store_received_is_not(self):
        engine = create_engine(wants_offloads=True)
        request = create_request("a", 10, role="consumer")
        engine.medium = stored_prompt(request)
        engine.add(request)
        engine.step()
        engine.update_transfer("a", 10, final=True, first_token=first_token(request))
        engine.settle()
        assert not engine.step().saves
        engine.run()
        assert_answered(engine, request)
        assert engine.scheduler.stats().num_offloaded_blocks == 0

    def test_they_pin_a_share_of_the_pool_and_the_rest_follows(self):
        engine = create_engine(wants_offloads=True, num_blocks=2 * PINNED_SHARE + 1)
        request = create_request("a", 16, max_tokens=8)
        engine.add(request)
        engine.step()
        engine.settle()
        step = engine.step()
        assert len(step.saves[0].block_ids) == 2
        assert not engine.step().saves
        engine.settle()
        (save,) = engine.step().saves
        assert save.block_hashes == tuple(stored_prompt(request))[2:4]
        engine.run()
        assert_answered(engine, request)
        assert engine.scheduler.stats().num_offloads_skipped == 1  # full when it ended, and no room
        engine.settle_all()
        engine.step()
        engine.assert_idle()


class TestGroups:
    def test_what_fell_out_is_not_restored_and_not_cached(self):
        engine, request = create_engine(groups=TWO_GROUPS), create_request("a", 14)
        engine.settle_at_once = True
        engine.medium.update(stored_prompt(request, groups=TWO_GROUPS))
        shorter = create_request("b", request.prompt_token_ids[: BLOCK_SIZE + 2])
        engine.add(request)
        engine.run()
        engine.medium.clear()
        engine.add(shorter)
        engine.run()
        assert_answered(engine, request, shorter)
        engine.assert_idle()

    def test_a_failed_handoff_offloads_what_came(self):
        engine = create_engine(wants_offloads=True, is_direct=True, groups=TWO_GROUPS)
        request = create_request("a", 14, role="consumer")
        engine.add(request)
        engine.step()
        (block_id, *_) = started(engine)[0].reserved_block_ids
        values = fingerprints(request.prompt_token_ids)[:BLOCK_SIZE]
        engine.write_block(block_id, values)
        engine.update_transfer("a", BLOCK_SIZE, digests=[digest_of(values)])
        engine.settle_at_once = True
        engine.update_transfer("a", BLOCK_SIZE, final=True, failure="prefill_gone", is_quiescent=True)
        engine.settle_all()
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()
