"""Consumers whose producer has blocks of another size."""

import itertools

import pytest

from common.engine.kv_connector import Piece, Regroup
from common.engine.messages import KVReceived
from common.errors import InvalidRequestError
from tests.unit.common.engine.scheduler_factories import (
    FakeEngine,
    create_request,
    create_scheduler,
    expected_output,
    first_token,
    stored_prompt,
)

SIZES = [(16, 4), (8, 4), (4, 16), (4, 8), (8, 1), (1, 8)]  # here, at the producer
LENGTHS = [1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 35]


def consumer(ours, theirs, prompt, *, cached=0, **settings):
    """An engine with a consumer, the medium filled by its producer; the first `cached` tokens were computed here."""
    engine = FakeEngine(create_scheduler(block_size=ours, num_blocks=1 + 256 // ours), block_size=ours)
    request = create_request("a", prompt, role="consumer", peer_block_size=theirs, **settings)
    if cached:
        engine.add(create_request("warm", request.prompt_token_ids[:cached], max_tokens=1))
        engine.run()
    engine.medium = stored_prompt(request, theirs)
    engine.add(request)
    engine.run()
    return engine, request


def finish(engine, request, *, computed=0):
    """The answer is right, and only so many tokens of the prompt were computed."""
    before = engine.scheduler.stats().num_prompt_tokens
    while engine.scheduler.has_unfinished or engine.scheduler.has_work:
        engine.settle_all()
        engine.step()
        engine.assert_sound()
    outputs, reason = expected_output(request)
    assert engine.outputs["a"] == outputs
    assert engine.finished["a"] is reason
    assert engine.scheduler.stats().num_prompt_tokens - before == computed
    engine.assert_idle()
    (received,) = (event for event in engine.events["a"] if isinstance(event, KVReceived))
    return received


@pytest.mark.parametrize("prompt", LENGTHS)
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_the_whole_prompt_comes(ours, theirs, prompt):
    engine, request = consumer(ours, theirs, prompt)
    engine.update_transfer("a", prompt, final=True, first_token=first_token(request))
    (load,) = engine.step().loads
    assert load.block_hashes == tuple(stored_prompt(request, theirs))
    received = finish(engine, request)
    assert (received.num_tokens, received.recompute_reason) == (prompt, "")


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_it_comes_in_chunks(ours, theirs, chunk):
    """Several loads may fill the same block of ours."""
    engine, request = consumer(ours, theirs, 35)
    hashes = []
    for num_ready in range(chunk, 35, chunk):
        engine.update_transfer("a", num_ready)
        hashes += [block_hash for load in engine.step().loads for block_hash in load.block_hashes]
        assert len(hashes) == num_ready // theirs
    engine.update_transfer("a", 35, final=True, first_token=first_token(request))
    assert finish(engine, request).num_tokens == 35


@pytest.mark.parametrize("prompt", LENGTHS)
@pytest.mark.parametrize("cached", [4, 8, 12, 16, 20, 32])
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_what_is_cached_here_is_not_written_to(ours, theirs, cached, prompt):
    """The cached prefix may end within a block of the producer's: of that only the rest is wanted."""
    engine, request = consumer(ours, theirs, prompt, cached=min(cached, prompt))
    num_local = min(cached, prompt - 1) // ours * ours
    engine.update_transfer("a", prompt, final=True, first_token=first_token(request))
    (load,) = engine.step().loads
    assert load.block_hashes == tuple(stored_prompt(request, theirs))[num_local // theirs :]
    assert len(load.block_ids) == -(-prompt // ours) - num_local // ours
    assert finish(engine, request).num_tokens == prompt - num_local


@pytest.mark.parametrize("num_ok", range(5))
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_a_broken_load_keeps_its_leading_tokens(ours, theirs, num_ok):
    engine, request = consumer(ours, theirs, 35)
    engine.update_transfer("a", 35, final=True, first_token=first_token(request))
    (load,) = engine.step().loads
    engine.settle(load.job_id, num_ok, "block_corrupt")
    num_valid = min(num_ok * theirs, 35)
    is_whole = num_ok >= len(load.block_hashes)
    received = finish(engine, request, computed=35 - num_valid)
    assert (received.num_tokens, received.recompute_reason) == (num_valid, "block_corrupt" if not is_whole else "")


@pytest.mark.parametrize("lost", range(2))
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_of_a_prefix_and_a_broken_load_the_longer_one_counts(ours, theirs, lost):
    engine, request = consumer(ours, theirs, 35, cached=20)
    num_local = 20 // ours * ours
    del engine.medium[list(engine.medium)[num_local // theirs + lost]]
    engine.update_transfer("a", 35, final=True, first_token=first_token(request))
    engine.step()
    num_valid = max(num_local, (num_local // theirs + lost) * theirs)
    received = finish(engine, request, computed=35 - num_valid)
    assert (received.num_tokens, received.recompute_reason) == (num_valid - num_local, "block_missing")


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_a_failed_producer_leaves_what_came(ours, theirs):
    engine, request = consumer(ours, theirs, 35)
    engine.update_transfer("a", 20)
    engine.update_transfer("a", 20, final=True, failure="prefill_failed")
    received = finish(engine, request, computed=35 - 20 // theirs * theirs)
    assert (received.num_tokens, received.recompute_reason) == (20 // theirs * theirs, "prefill_failed")


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_an_abort_leaves_blocks_pinned_until_all_loads_settle(ours, theirs):
    engine, _ = consumer(ours, theirs, 35)
    for num_ready in (8, 16, 24, 32):
        engine.update_transfer("a", num_ready)
        engine.step()
    jobs = list(engine.jobs)
    engine.abort("a")
    engine.run()
    for job_id in reversed(jobs):
        assert engine.scheduler.check_integrity().num_blocks_in_use > 0
        engine.settle(job_id)
        engine.step()
        engine.assert_sound()
    engine.assert_idle()


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_what_was_regrouped_is_found_by_the_next(ours, theirs):
    engine, request = consumer(ours, theirs, 35)
    engine.update_transfer("a", 35, final=True, first_token=first_token(request))
    finish(engine, request)
    engine.add(create_request("b", request.prompt_token_ids))
    assert engine.step().num_scheduled_tokens == {"b": 35 - 34 // ours * ours}


def test_only_regrouped_blocks_are_offered_to_a_tier():
    """The store has them in the producer's size only."""
    for theirs, offered in ((0, 0), (4, 4), (16, 4)):
        engine = FakeEngine(create_scheduler(block_size=8, keeps_blocks=True, wants_offloads=True), block_size=8)
        request = create_request("a", 35, role="consumer", peer_block_size=theirs)
        engine.medium = stored_prompt(request, theirs or 8)
        engine.add(request)
        engine.run()
        engine.update_transfer("a", 35, final=True, first_token=first_token(request))
        saves = []
        while engine.scheduler.has_unfinished:
            engine.settle_all()
            saves += engine.step().saves
        assert sum(len(save.block_ids) for save in saves) == offered


def test_sizes_that_do_not_fit_are_refused():
    for ours, theirs, is_direct in ((4, 6, False), (6, 4, False), (4, -4, False), (4, 8, True)):
        engine = FakeEngine(create_scheduler(block_size=ours, is_direct=is_direct), block_size=ours)
        with pytest.raises(InvalidRequestError, match=f"{ours} here and {theirs} at the producer"):
            engine.add(create_request("a", 10, role="consumer", peer_block_size=theirs))
        engine.assert_idle()


def test_pieces_of_blocks():
    assert list(Regroup(16, 0).pieces(1, 16, 64)) == [Piece(0, 16, 0, 16)]
    assert list(Regroup(16, 48).pieces(1, 5, 64)) == [Piece(1, 0, 0, 5)]
    assert list(Regroup(64, -16).pieces(0, 50, 16)) == [Piece(0, 0, 16, 16), Piece(1, 0, 32, 16), Piece(2, 0, 48, 2)]
    assert list(Regroup(64, -64).pieces(0, 64, 16)) == []


def test_pieces_cover_each_wanted_token_once():
    for theirs, ours, offset, num_last in itertools.product((1, 4, 12), (1, 4, 12), (-5, -4, 0, 3, 12), (1, 3)):
        regroup, filled = Regroup(theirs, offset), []
        for index, count in enumerate((theirs, theirs, min(num_last, theirs))):
            for piece in regroup.pieces(index, count, ours):
                assert piece.num_tokens > 0
                assert piece.start + piece.num_tokens <= ours
                slots = range(piece.block * ours + piece.start, piece.block * ours + piece.start + piece.num_tokens)
                sources = range(index * theirs + piece.source, index * theirs + piece.source + piece.num_tokens)
                filled += zip(slots, sources, strict=True)
        wanted = range(max(0, -offset), 2 * theirs + min(num_last, theirs))
        assert filled == [(offset + source, source) for source in wanted]
