"""Direct connectors: producers that write into the blocks that a consumer has reserved."""

import pytest

from common.engine.kv_connector import Destination
from common.engine.messages import KVReceived, KVSaved, RequestStarted
from common.errors import InvalidRequestError
from common.types import FinishReason
from tests.unit.common.engine.scheduler_factories import (
    BLOCK_SIZE,
    FakeEngine,
    connect_directly,
    create_request,
    create_scheduler,
    expected_output,
    fingerprints,
    first_token,
    prompt_digests,
)

PROMPT_LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2]


def direct_engine(**settings) -> FakeEngine:
    return FakeEngine(create_scheduler(is_direct=True, **settings))


def producer(prompt: int = 10, *, max_num_batched_tokens: int = 64, **settings):
    engine = direct_engine(max_num_batched_tokens=max_num_batched_tokens)
    request = create_request("a", prompt, role="producer", **settings)
    engine.add(request)
    return engine, request


def consumer(prompt: int = 10, *, num_blocks: int = 65, enable_prefix_caching: bool = True, **settings):
    """An engine with a consumer that has reserved its blocks."""
    engine = direct_engine(num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching)
    request = create_request("a", prompt, role="consumer", **settings)
    engine.add(request)
    engine.run()
    return engine, request


def events(engine: FakeEngine, kind, request_id: str = "a"):
    return [event for event in engine.events[request_id] if isinstance(event, kind)]


def reserved(engine: FakeEngine, request_id: str = "a") -> list[int]:
    (started,) = events(engine, RequestStarted, request_id)
    return started.reserved_block_ids


def fill(engine: FakeEngine, request, num_blocks: int = 99, *, held: int = 0) -> list[bytes]:
    """Some producer writes leading blocks; their digests."""
    values = fingerprints(request.prompt_token_ids)[held:]
    block_ids = reserved(engine, request.request_id)[:num_blocks]
    for index, block_id in enumerate(block_ids):
        engine.write_block(block_id, values[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
    return prompt_digests(request, held)[: len(block_ids)]


def assert_answered(engine: FakeEngine, request) -> None:
    outputs, reason = expected_output(request)
    assert engine.outputs[request.request_id] == outputs
    assert engine.finished[request.request_id] is reason


class TestProducer:
    def test_nothing_is_saved_before_the_target_comes(self):
        engine, request = producer(prompt=10, max_num_batched_tokens=4)
        assert [engine.step().saves for _ in range(3)] == [[], [], []]
        assert engine.finished["a"] is FinishReason.HANDOFF
        assert engine.outputs["a"] == [first_token(request).token_id]
        engine.run()
        assert not engine.jobs
        assert engine.scheduler.has_unfinished
        assert engine.scheduler.check_integrity().num_blocks_in_use == 3
        engine.assert_sound()

        engine.set_target("a", [7, 5, 6])
        assert not engine.scheduler.has_work  # they are saved without a step
        (save,) = engine.step().saves
        assert save.destination == Destination(b"peer", (7, 5, 6))
        assert (len(save.block_ids), save.num_tokens_in_last) == (3, 2)
        engine.settle_all()
        engine.run()
        engine.step()
        assert events(engine, KVSaved) == [KVSaved(num_tokens=10, digests=prompt_digests(request))]
        engine.assert_idle()

    def test_what_is_computed_is_sent_at_once_and_the_rest_as_it_comes(self):
        engine, _ = producer(prompt=14, max_num_batched_tokens=4)
        engine.step()
        engine.step()
        engine.set_target("a", [10, 11, 12, 13])
        assert [transfer.destination.block_ids for _, transfer in engine.jobs.values()] == [(10, 11)]
        saves = [engine.step().saves for _ in range(2)]
        assert [[save.destination.block_ids for save in step] for step in saves] == [[(10, 11), (12,)], [(13,)]]

    def test_a_long_run_is_saved_in_parts_which_are_reported_one_by_one(self):
        engine = direct_engine(part_blocks=2)
        request = create_request("a", 18, role="producer")
        engine.add(request)
        engine.run()
        engine.set_target("a", [13, 11, 12, 10], held=4)
        (first, first_save), (second, second_save) = [(job_id, save) for job_id, (_, save) in engine.jobs.items()]
        assert [first_save.destination.block_ids, second_save.destination.block_ids] == [(13, 11), (12, 10)]
        assert [first_save.num_tokens_in_last, second_save.num_tokens_in_last] == [4, 2]
        digests = prompt_digests(request, 4)
        for job_id, told in (
            (first, KVSaved(num_tokens=12, digests=digests[:2])),
            (second, KVSaved(num_tokens=18, digests=digests[2:])),
        ):
            engine.settle(job_id)
            engine.run()
            assert events(engine, KVSaved)[-1] == told
        engine.step()
        engine.assert_idle()

    def test_one_that_gets_no_tokens_in_a_step_still_starts_its_saves(self):
        engine = direct_engine(max_num_batched_tokens=4)
        engine.add(create_request("hog", 24))
        engine.step()
        request = create_request("a", 8, role="producer", priority=1)
        engine.add(request)
        while engine.scheduler.stats().num_running != 2:
            engine.step()
        blocked = create_request("b", 3)
        engine.add(blocked)
        engine.set_target("a", [10, 11])
        engine.run()
        engine.settle_all()
        engine.run()
        engine.step()
        assert events(engine, KVSaved)[-1].num_tokens == 8
        engine.assert_idle()

    def test_held_blocks_are_not_sent_but_count(self):
        engine, request = producer(prompt=14)
        engine.step()
        engine.set_target("a", [9, 8], held=8)
        (save,) = engine.step().saves
        assert save.destination.block_ids == (9, 8)
        assert len(save.block_hashes) == 2
        engine.settle_all()
        engine.run()
        engine.step()
        assert events(engine, KVSaved) == [
            KVSaved(num_tokens=8),
            KVSaved(num_tokens=14, digests=prompt_digests(request, 8)),
        ]
        engine.assert_idle()

    @pytest.mark.parametrize("num_steps", [0, 1])
    def test_a_consumer_may_hold_all_of_a_resumed_prompt(self, num_steps):
        engine, _ = producer(prompt=5, output=[5, 6, 7, 8], max_tokens=9)
        for _ in range(num_steps):
            engine.step()
        engine.set_target("a", [], held=5)
        engine.run()
        assert events(engine, KVSaved) == [KVSaved(num_tokens=5)]
        assert engine.finished["a"] is FinishReason.HANDOFF
        engine.assert_idle()

    def test_digests_go_out_in_order_with_the_tokens_that_they_belong_to(self):
        engine, request = producer(prompt=10, max_num_batched_tokens=4)
        engine.set_target("a", [1, 2, 3])
        jobs = [engine.step().saves[0].job_id for _ in range(3)]
        engine.settle(jobs[1])
        engine.step()
        assert events(engine, KVSaved) == []
        engine.settle(jobs[0])
        engine.step()
        engine.settle(jobs[2])
        engine.step()
        digests = prompt_digests(request)
        assert events(engine, KVSaved) == [
            KVSaved(num_tokens=8, digests=digests[:2]),
            KVSaved(num_tokens=10, digests=digests[2:]),
        ]

    @pytest.mark.parametrize("finished", [False, True])
    @pytest.mark.parametrize(
        ("held", "block_ids"),
        [
            (0, [1, 2]),
            (0, [1, 2, 3, 4]),
            (3, [1, 2]),
            (4, [1, 2, 3]),
            (12, []),
            (-4, [1, 2, 3, 4]),
            (0, [1, 2, 2]),
            (0, [0, 1, 2]),
        ],
    )
    def test_a_target_that_does_not_fit_is_refused(self, held, block_ids, finished):
        engine, request = producer(prompt=10)
        if finished:
            engine.run()
        engine.set_target("a", block_ids, held=held)
        engine.run()
        assert not engine.jobs
        assert events(engine, KVSaved) == [KVSaved(num_tokens=0, failure="incompatible")]
        assert engine.outputs["a"] == [first_token(request).token_id]
        engine.assert_idle()

    def test_stray_targets_are_ignored(self):
        engine, _ = producer(prompt=10, epoch=2)
        engine.add(create_request("plain", 3))
        engine.run()
        engine.set_target("a", [1, 2, 3], epoch=1)
        engine.set_target("nobody", [1, 2, 3])
        engine.set_target("plain", [1], epoch=0)
        assert not engine.scheduler.has_work
        engine.set_target("a", [1, 2, 3], epoch=2)
        engine.set_target("a", [4, 5, 6], epoch=2)
        (save,) = engine.step().saves
        assert save.destination.block_ids == (1, 2, 3)

    def test_abort_while_it_waits_for_its_target(self):
        engine, _ = producer(prompt=10)
        engine.run()
        assert engine.abort("a") == []
        engine.run()
        assert events(engine, KVSaved) == [KVSaved(num_tokens=0, failure="aborted")]
        engine.assert_idle()
        engine.set_target("a", [1, 2, 3])
        engine.assert_idle()

    def test_abort_between_target_and_the_end_of_the_save(self):
        engine, request = producer(prompt=10)
        engine.run()
        engine.set_target("a", [1, 2, 3])
        engine.abort("a")
        assert engine.cancelled == set(engine.jobs)
        assert events(engine, KVSaved) == []  # it still writes
        engine.settle(num_blocks_ok=1)
        digests = prompt_digests(request)[:1]
        assert events(engine, KVSaved) == [KVSaved(num_tokens=4, failure="aborted", digests=digests)]
        engine.assert_idle()

    def test_an_aborted_ones_last_word_waits_until_nothing_is_written(self):
        engine, request = producer(prompt=14, max_num_batched_tokens=4)
        engine.set_target("a", [1, 2, 3, 4])
        engine.step()
        engine.step()
        (output,) = engine.abort("a")
        assert (output.finish_reason, output.events) == (FinishReason.ABORT, [])
        engine.step()
        assert engine.cancelled == set(engine.jobs)
        engine.settle()
        engine.step()
        assert events(engine, KVSaved) == [KVSaved(num_tokens=4, digests=prompt_digests(request)[:1])]
        engine.settle(num_blocks_ok=0, error="transfer_cancelled")
        engine.step()
        assert events(engine, KVSaved)[-1] == KVSaved(num_tokens=4, failure="aborted")
        engine.run()
        engine.assert_idle()

    def test_a_failure_hurries_the_other_saves_and_is_said_after_them(self):
        engine, request = producer(prompt=14, max_num_batched_tokens=4)
        engine.set_target("a", [1, 2, 3, 4])
        jobs = [engine.step().saves[0].job_id for _ in range(2)]
        engine.settle(jobs[1], num_blocks_ok=0, error="transfer_timeout")
        assert engine.step().cancelled_job_ids[0] == jobs[0]
        assert events(engine, KVSaved) == []
        engine.settle_all()
        engine.run()
        engine.step()
        assert events(engine, KVSaved) == [
            KVSaved(num_tokens=4, failure="transfer_timeout", digests=prompt_digests(request)[:1])
        ]
        engine.run()
        engine.assert_idle()


class TestConsumer:
    def test_reserved_blocks_are_told_before_the_step_runs(self):
        engine = direct_engine()
        engine.add(create_request("a", 10, role="consumer"), create_request("plain", 3))
        engine.scheduler.schedule(0.0)
        started, _ = (event for output in engine.scheduler.take_urgent_outputs() for event in output.events)
        assert isinstance(started, RequestStarted)
        assert len(set(started.reserved_block_ids)) == 3
        report = engine.scheduler.check_integrity()
        assert (report.violations, report.num_blocks_in_use, report.num_transfers) == ([], 3 + 1, 1)

    def test_only_blocks_that_it_lacks_are_reserved(self):
        engine = direct_engine()
        request = create_request("a", 14, role="consumer")
        engine.add(create_request("b", request.prompt_token_ids[:9]))
        engine.run()
        engine.add(request)
        engine.run()
        (started,) = events(engine, RequestStarted)
        assert (started.num_cached_tokens, len(started.reserved_block_ids)) == (8, 2)
        digests = fill(engine, request, held=8)
        engine.update_transfer("a", 12, digests=digests[:1])
        (load,) = engine.step().loads
        assert load.digests == (digests[0],)
        engine.update_transfer(
            "a", 14, digests=digests[1:], final=True, first_token=first_token(request), is_quiescent=True
        )
        engine.step()
        engine.settle_all()
        engine.run()
        assert events(engine, KVReceived)[0].num_tokens == 6
        assert_answered(engine, request)
        engine.assert_idle()

    @pytest.mark.parametrize("prompt", PROMPT_LENGTHS)
    def test_it_continues_in_place_once_its_producer_is_quiet(self, prompt):
        engine, request = consumer(prompt=prompt)
        blocks, digests = reserved(engine), fill(engine, request)
        engine.update_transfer(
            "a", prompt, final=True, first_token=first_token(request), digests=digests, is_quiescent=True
        )
        (load,) = engine.step().loads
        assert (list(load.block_ids), list(load.digests)) == (blocks, digests)
        engine.settle_all()
        (new,) = engine.step().new_requests
        assert new.block_ids[0][: len(blocks)] == blocks
        engine.run()
        assert_answered(engine, request)
        assert [event.recompute_reason for event in events(engine, KVReceived)] == [""]
        engine.assert_idle()

    def test_a_success_waits_for_quiet(self):
        engine, request = consumer(prompt=10)
        engine.update_transfer("a", 10, final=True, first_token=first_token(request), digests=fill(engine, request))
        engine.step()
        engine.settle_all()
        engine.run()
        assert engine.outputs["a"] == []
        engine.update_transfer("a", 10, is_quiescent=True)
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_no_more_is_loaded_than_digests_are_known(self):
        engine, request = consumer(prompt=14)
        digests = fill(engine, request)
        engine.update_transfer("a", 14, digests=digests[:2])
        assert [len(load.block_ids) for load in engine.step().loads] == [2]
        engine.update_transfer("a", 14, digests=digests[2:3], final=True, is_quiescent=True)
        assert [len(load.block_ids) for load in engine.step().loads] == [1]
        engine.settle_all()
        engine.run()
        (event,) = events(engine, KVReceived)
        assert (event.num_tokens, event.recompute_reason) == (12, "incomplete")
        assert_answered(engine, request)
        engine.assert_idle()

    def test_other_bytes_than_the_digest_says_are_not_used(self):
        engine, request = consumer(prompt=10)
        digests = fill(engine, request)
        engine.write_block(reserved(engine)[1], [-5] * BLOCK_SIZE)
        engine.update_transfer(
            "a", 10, final=True, first_token=first_token(request), digests=digests, is_quiescent=True
        )
        engine.step()
        engine.settle_all()
        engine.run()
        (event,) = events(engine, KVReceived)
        assert (event.num_tokens, event.recompute_reason) == (4, "block_corrupt")
        assert_answered(engine, request)
        engine.assert_idle()

    @pytest.mark.parametrize("knows_first", [False, True])
    @pytest.mark.parametrize("caching", [False, True])
    def test_a_failed_one_starts_over_elsewhere_while_it_may_be_written_to(self, caching, knows_first):
        engine, request = consumer(prompt=10, enable_prefix_caching=caching)
        blocks, digests = reserved(engine), fill(engine, request, 1)
        engine.update_transfer("a", 4, digests=digests)
        engine.step()
        engine.settle_all()
        engine.run()
        first = first_token(request) if knows_first else None
        engine.update_transfer("a", 4, final=True, failure="prefill_gone", first_token=first)
        engine.begin_step()
        assert engine.outputs["a"] == ([first.token_id] if first is not None else []), "the first token does not wait"
        (new,) = engine.end_step().new_requests
        kept = blocks[:1] if caching else []
        assert new.block_ids[0][: len(kept)] == kept
        assert not set(new.block_ids[0][len(kept) :]) & set(blocks)
        engine.assert_sound()
        (event,) = events(engine, KVReceived)
        assert (event.num_tokens, event.recompute_reason) == (4, "prefill_gone")
        for block_id in blocks[1:]:
            engine.write_block(block_id, [-7] * BLOCK_SIZE)  # late
        engine.run()
        assert_answered(engine, request)
        assert engine.scheduler.check_integrity().num_transfers == 1
        assert engine.scheduler.has_unfinished
        engine.update_transfer("a", 4, is_quiescent=True)
        engine.assert_idle()

    def test_it_keeps_its_blocks_if_its_producer_is_quiet(self):
        engine, request = consumer(prompt=10)
        blocks = reserved(engine)
        engine.update_transfer("a", 0, final=True, failure="prefill_gone", is_quiescent=True)
        (new,) = engine.step().new_requests
        assert new.block_ids == [blocks]
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_a_broken_load_starts_over_at_once(self):
        engine, request = consumer(prompt=14)
        digests = fill(engine, request)
        engine.update_transfer("a", 8, digests=digests[:2])
        engine.step()
        engine.settle(num_blocks_ok=1, error="block_corrupt")
        engine.run()
        (event,) = events(engine, KVReceived)
        assert (event.num_tokens, event.recompute_reason) == (4, "block_corrupt")
        assert_answered(engine, request)
        engine.update_transfer("a", 14, final=True, first_token=first_token(request), is_quiescent=True)
        engine.assert_idle()

    def test_the_first_token_may_end_a_failed_one(self):
        engine, request = consumer(prompt=10, max_tokens=1)
        engine.update_transfer("a", 0, final=True, failure="lost", first_token=first_token(request))
        engine.run()
        assert_answered(engine, request)
        engine.update_transfer("a", 0, is_quiescent=True)
        engine.assert_idle()

    def test_it_starts_over_in_its_place_of_the_order(self):
        engine, _ = consumer(prompt=12, num_blocks=11)
        plain = [create_request(name, 30, max_tokens=1) for name in ("b", "c")]
        engine.add(*plain)
        engine.run()
        assert engine.scheduler.stats().num_waiting == 2
        engine.update_transfer("a", 0, final=True, failure="prefill_gone")
        engine.run()
        assert list(engine.finished) == ["a"]  # the others need what the window holds
        assert not engine.scheduler.has_work
        engine.update_transfer("a", 0, is_quiescent=True)
        assert engine.scheduler.has_work
        engine.run()
        assert list(engine.finished) == ["a", "b", "c"]
        engine.assert_idle()

    def test_quiet_of_another_epoch_or_request_means_nothing(self):
        engine, _ = consumer(prompt=10, epoch=2)
        engine.update_transfer("a", 0, epoch=1, is_quiescent=True)
        engine.abort("a")
        engine.run()
        engine.update_transfer("a", 0, epoch=1, is_quiescent=True)
        engine.update_transfer("a", 0, epoch=3, is_quiescent=True)
        engine.run()
        assert engine.scheduler.check_integrity().num_blocks_in_use == 3
        engine.update_transfer("a", 0, epoch=2, is_quiescent=True)
        engine.assert_idle()

    def test_blocks_of_an_aborted_one_stay_pinned_until_quiet(self):
        engine, request = consumer(prompt=10)
        engine.update_transfer("a", 4, digests=fill(engine, request, 1))
        engine.step()
        engine.abort("a")
        engine.settle_all()
        engine.run()
        report = engine.scheduler.check_integrity()
        assert (report.violations, report.num_requests) == ([], 0)
        assert (report.num_blocks_in_use, report.num_transfers) == (3, 1)
        with pytest.raises(InvalidRequestError, match="exists already"):
            engine.scheduler.add_request(create_request("a"), 0.0)
        engine.update_transfer("a", 4, is_quiescent=True)
        engine.assert_idle()

    @pytest.mark.parametrize("is_quiet", [False, True])
    def test_no_window_opens_if_the_handoff_has_failed_before(self, is_quiet):
        engine = direct_engine()
        request = create_request("a", 10, role="consumer")
        engine.add(request)
        engine.update_transfer("a", 0, final=True, failure="prefill_failed", is_quiescent=is_quiet)
        engine.run()
        assert_answered(engine, request)
        engine.assert_idle()

    def test_integrity_names_a_block_that_is_computed_into_under_a_window(self):
        engine, _ = consumer(prompt=10)
        block = reserved(engine)[0]
        engine.scheduler._places.leave(engine.scheduler._places.live["a"])
        engine.scheduler._places.ready.append(engine.scheduler._places.live["a"])
        violations = engine.scheduler.check_integrity().violations
        assert any(f"computes into block {block}, which" in violation for violation in violations)


@pytest.mark.parametrize("prompt", PROMPT_LENGTHS)
@pytest.mark.parametrize("chunk", [3, 8, 64])
@pytest.mark.parametrize("num_held", [0, 1])
def test_prefill_pod_to_decode_pod(prompt, chunk, num_held):
    """Two schedulers and one write: what the producer says, the consumer is told."""
    prefill, decode = direct_engine(max_num_batched_tokens=chunk), direct_engine()
    prefill.settle_at_once = decode.settle_at_once = True
    connect_directly(prefill, decode)
    produce, consume = (create_request("a", prompt, role=role, max_tokens=9) for role in ("producer", "consumer"))
    if num_held:
        decode.add(create_request("before", [*consume.prompt_token_ids[:BLOCK_SIZE], 9]))
        decode.run()
    num_computed = decode.scheduler.stats().num_prompt_tokens
    prefill.add(produce)
    prefill.step()
    decode.add(consume)
    decode.step()
    (started,) = events(decode, RequestStarted)
    prefill.set_target("a", started.reserved_block_ids, held=started.num_cached_tokens, address=decode.address)
    num_told = 0
    while prefill.scheduler.has_unfinished:
        prefill.step()
        for event in events(prefill, KVSaved)[num_told:]:
            num_told += 1
            decode.update_transfer("a", event.num_tokens, digests=event.digests)
        if decode.scheduler.has_work:
            decode.step()
    decode.update_transfer("a", prompt, final=True, first_token=first_token(produce), is_quiescent=True)
    prefill.run()
    decode.run()
    assert_answered(decode, consume)
    assert [event.recompute_reason for event in events(decode, KVReceived)] == [""]
    assert decode.scheduler.stats().num_prompt_tokens == num_computed
    prefill.assert_idle()
    decode.assert_idle()
