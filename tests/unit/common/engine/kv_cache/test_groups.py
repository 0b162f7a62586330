from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.contract.kv_groups import max_blocks_of, max_spans_in
from common.engine.executor.fake import ONE_GROUP
from common.engine.kv_cache import BlockOrder, KVCacheManager, KVGroups, create_kv_cache_manager
from common.engine.scheduler.request import Request
from common.errors import ConfigError
from common.types import HASH_BYTES, SampledToken, group_key, group_of, hash_prompt, root_hash
from tests.unit.common.engine.kv_cache.test_kv_cache_manager import compute, ids, make_request
from tests.unit.common.engine.scheduler_factories import BLOCK_SIZE

(FULL,) = ONE_GROUP
WINDOW = replace(FULL, kind="window", window=6)
CHUNKED = replace(FULL, kind="chunked", window=6)
STATE = replace(FULL, kind="state", state_bytes=8)
PROMPT = list(range(100, 130))


def make_groups(*specs) -> KVGroups:
    return KVGroups(specs or (FULL, WINDOW), BLOCK_SIZE)


def make_manager(num_blocks: int = 41, *specs) -> KVCacheManager:
    return create_kv_cache_manager(num_blocks, make_groups(*specs), enable_prefix_caching=True)


def consumer(request_id: str, prompt) -> Request:
    return make_request(request_id, prompt, role="consumer")


def compute_in_steps(kv: KVCacheManager, request: Request, *lengths: int) -> None:
    for num_tokens in lengths:
        request.num_computed_tokens = num_tokens
        kv.cache_computed(request)


def test_the_common_case_is_one_group():
    assert type(make_manager(9, FULL)) is KVCacheManager
    assert type(make_manager(9, WINDOW)) is not KVCacheManager


@pytest.mark.parametrize("window", [None, 0])
def test_a_window_group_has_a_window(window):
    with pytest.raises(ConfigError, match="window"):
        make_groups(replace(FULL, kind="window", window=window))


def test_an_unknown_kind_is_named():
    with pytest.raises(ConfigError, match="kv-group-kind: 'ring'"):
        make_groups(replace(FULL, kind="ring"))


@pytest.mark.parametrize(("num_computed", "first"), [(0, 0), (8, 0), (9, 1), (12, 1), (13, 2), (29, 6)])
def test_what_falls_out_of_a_window(num_computed, first):
    """The next token reads itself and 5 before it."""
    assert make_groups().first_spans(num_computed) == [0, first]


@pytest.mark.parametrize(("num_computed", "first"), [(0, 0), (5, 0), (6, 1), (11, 1), (12, 3), (17, 3), (18, 4)])
def test_what_falls_out_of_a_chunk(num_computed, first):
    """The next token reads itself and those before it down to a multiple of 6."""
    assert make_groups(FULL, CHUNKED).first_spans(num_computed) == [0, first]


def test_keys_tell_the_group():
    block_hash = root_hash()
    assert group_key(block_hash, 0) == block_hash
    assert [group_of(group_key(block_hash, group)) for group in range(3)] == [0, 1, 2]
    assert len({group_key(block_hash, group) for group in range(3)}) == 3


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 9))
def test_the_order_of_blocks(first_spans, num_spans):
    order = BlockOrder(first_spans)
    blocks = [(span, group) for span in range(20) for group, first in enumerate(first_spans) if span >= first]
    count = order.num_blocks(num_spans)
    assert all(span < num_spans for span, _ in blocks[:count])
    assert all(span >= num_spans for span, _ in blocks[count:])
    assert [order.num_spans(block) for block in range(len(blocks))] == [span for span, _ in blocks]


def test_blocks_that_fell_out_are_free_while_the_request_goes_on():
    kv = make_manager()
    request = make_request("a", PROMPT, max_tokens=9)
    compute(kv, request)
    full, window = kv.block_ids(request)
    assert 0 not in full
    assert window[:6] == [0] * 6  # tokens 25 to 29 are read by the next one
    assert 0 not in window[6:]
    assert kv.num_blocks - kv.num_free_blocks == 8 + 2
    assert kv.check_integrity([]) == []
    for token_id in range(9):
        request.append(SampledToken(token_id))
        assert kv.grow(request, request.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
        kv.cache_computed(request)
        assert sum(block_id != 0 for block_id in kv.block_ids(request)[1]) <= 3
    kv.free(request)
    assert kv.num_free_blocks == kv.num_blocks


def test_a_request_of_a_window_alone_holds_a_few_blocks():
    kv = make_manager(9, WINDOW)
    request = make_request("a", PROMPT)
    kv.allocate(request, [])
    compute_in_steps(kv, request, 10, 20, 30)
    assert kv.num_blocks - kv.num_free_blocks == 2


def test_growth_takes_a_block_of_each_group():
    kv = make_manager(7)
    request = make_request("a", 8)
    kv.allocate(request, [])
    assert kv.num_free_blocks == 2
    first, second = kv.grow(request, 9)
    assert [first, second] == [[table[-1]] for table in kv.block_ids(request)]
    assert kv.num_missing_blocks(request, 13) == 2
    assert kv.grow(request, 13) is None
    assert kv.grow(request, 12) == []


def test_a_hit_needs_the_last_blocks_of_a_window_only():
    kv = make_manager()
    compute(kv, make_request("a", PROMPT))
    prefix = kv.find_cached_prefix(make_request("b", PROMPT))
    assert len(prefix) == 7
    assert [[block.block_id != 0 for block in span] for span in prefix] == [[True, False]] * 5 + [[True, True]] * 2


def test_the_hit_is_shortened_until_all_groups_have_it():
    """The window lost its block 5: prefixes of 6 and 7 blocks need it, one of 5 needs blocks 3 and 4 of it."""
    kv = make_manager()
    request = make_request("a", PROMPT)
    kv.allocate(request, [])
    compute_in_steps(kv, request, 12, 20, 30)
    key = group_key(request.block_hashes[5], 1)
    kv._pool.forget([kv._pool.find(key)])
    assert len(kv.find_cached_prefix(make_request("b", PROMPT))) == 5
    kv._pool.forget([kv._pool.find(request.block_hashes[2])])
    assert len(kv.find_cached_prefix(make_request("c", PROMPT))) == 2


@pytest.mark.parametrize(
    ("absent", "num_found"),  # blocks of the first group, and of that with chunks
    [
        (([], [4, 5]), 7),  # chunks begin at tokens 24,
        (([], [4, 5, 6]), 6),
        (([5], []), 5),  # 18,
        (([5], [4]), 4),
        (([5], [0, 1, 2, 3, 4]), 3),  # and 12
    ],
)
def test_a_hit_needs_the_blocks_of_the_chunk_that_the_next_token_is_in(absent, num_found):
    """None where a chunk begins: after 6 blocks, and after 3."""
    kv = make_manager(41, FULL, CHUNKED)
    request = make_request("a", PROMPT)
    compute(kv, request)
    for group, spans in enumerate(absent):
        kv._pool.forget([kv._pool.find(group_key(request.block_hashes[span], group)) for span in spans])
    assert len(kv.find_cached_prefix(make_request("b", PROMPT))) == num_found


def test_a_hit_after_a_long_chunk_is_where_the_window_was():
    """What fell out within a chunk was written all the same."""
    kv = make_manager()
    compute(kv, make_request("a", PROMPT))
    assert len(kv.find_cached_prefix(make_request("b", PROMPT[:14]))) == 3


def test_the_hit_is_shared_and_the_rest_allocated_in_each_group():
    kv = make_manager()
    a, b = make_request("a", PROMPT), make_request("b", [*PROMPT[:20], 7, 7])
    compute(kv, a)
    free = kv.num_free_blocks
    prefix = kv.find_cached_prefix(b)
    assert kv.can_allocate(b, prefix, free - 4)  # 1 new in each group, and blocks 3 and 4 of the window are free
    assert not kv.can_allocate(b, prefix, free - 3)
    kv.allocate(b, prefix)
    assert kv.num_free_blocks == free - 4
    assert kv.block_ids(a)[0][:5] == kv.block_ids(b)[0][:5]
    assert kv.check_integrity([]) == []


def test_routers_learn_of_the_first_group():
    kv = make_manager()
    request = make_request("a", PROMPT)
    compute(kv, request)
    assert kv.cache_changes.take().stored == b"".join(hash_prompt(PROMPT, BLOCK_SIZE, root_hash()))
    kv.free(request)
    kv.reset_prefix_cache()
    assert len(kv.cache_changes.take().removed) == 7 * HASH_BYTES
    assert kv.find_cached_prefix(make_request("b", PROMPT)) == []


def test_a_consumer_gets_what_it_reads_after_the_handoff():
    kv = make_manager()
    request = consumer("a", PROMPT)
    assert kv.can_allocate(request, [], kv.num_blocks - 10)
    kv.allocate(request, [])
    assert [block_id != 0 for block_id in kv.block_ids(request)[1]] == [False] * 6 + [True] * 2
    request.awaits_handoff = False
    for num_computed, lacks in [(0, True), (20, True), (29, False), (30, False)]:
        request.num_computed_tokens = num_computed
        assert kv.lacks_blocks(request) == lacks
    kv.cache_computed(request)
    assert kv.check_integrity([]) == []


def test_a_producer_keeps_what_its_consumer_goes_on_with():
    """Also if it has output already, computed here for its next token."""
    kv = make_manager()
    compute(kv, make_request("a", PROMPT))
    request = make_request("b", PROMPT[:14], output=PROMPT[14:], max_tokens=99, role="producer")
    prefix = kv.find_cached_prefix(request)
    assert len(prefix) == 3
    kv.allocate(request, prefix)
    compute_in_steps(kv, request, 20, 30)
    assert [block_id != 0 for block_id in kv.block_ids(request)[1]] == [False] * 2 + [True] * 6


def test_blocks_are_named_in_the_order_in_which_they_move():
    kv = make_manager()
    request = consumer("a", PROMPT)
    kv.allocate(request, [])
    request.complete_block_hashes(BLOCK_SIZE, 7)
    hashes = tuple(request.block_hashes)
    full, window = kv.block_ids(request)
    blocks, keys = kv.keyed(request, 5, hashes[5:], len(PROMPT))
    assert ids(blocks) == [full[5], full[6], window[6]]
    assert keys == (hashes[5], hashes[6], group_key(hashes[6], 1))


@pytest.mark.parametrize(
    ("absent", "first", "num_kept"),
    [
        ([], 0, 7),
        ([(0, 1), (4, 1)], 0, 7),
        ([(5, 1)], 0, 5),
        ([(2, 0)], 0, 2),
        ([(2, 0), (1, 1)], 0, 1),
        ([(3, 1)], 4, 3),
    ],
)
def test_what_a_tier_keeps_is_searched_like_the_cache(absent, first, num_kept):
    kv = make_manager()
    hashes = tuple(hash_prompt(PROMPT, BLOCK_SIZE, root_hash()))[first:]
    keys = kv.lookup_keys(hashes)
    missing = {group_key(hashes[span - first], group) for span, group in absent if span >= first}
    found = [key not in missing for key in keys]
    assert kv.num_kept(first, [*found, False].index(False), found) == num_kept


@pytest.mark.parametrize(("first", "num_valid", "usable"), [(0, 7, 7), (0, 6, 0), (2, 6, 2), (5, 6, 6), (0, 0, 0)])
def test_a_broken_restore_is_used_where_no_group_has_a_hole(first, num_valid, usable):
    """Of the window, blocks from 5 on were wanted for a prefix of 7."""
    assert make_manager().num_usable(first, num_valid, 7) == usable


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(
        [(FULL, WINDOW), (WINDOW,), (WINDOW, replace(FULL, kind="window", window=3), FULL), (FULL, CHUNKED)]
    ),
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=22), st.integers(1, 9), st.booleans()), max_size=14
    ),
)
def test_what_is_found_is_the_content_of_equal_tokens(specs, prompts):
    """Requests over a two-token alphabet come and go in a tiny pool, and are computed in chunks: each block found was
    written for that prefix in that group, and what the next token reads is there."""
    kv = make_manager(6 * len(specs) + 3, *specs)
    content: dict[int, tuple[int, list[int]]] = {}
    living: list[Request] = []
    for index, (prompt, chunk, ends) in enumerate(prompts):
        request = make_request(f"r{index}", prompt)
        prefix = kv.find_cached_prefix(request)
        while not kv.can_allocate(request, prefix, 0):
            kv.free(living.pop(0))
            prefix = kv.find_cached_prefix(request)
        kv.allocate(request, prefix)
        start = request.num_computed_tokens = len(prefix) * BLOCK_SIZE
        while start < len(prompt):
            stop = min(start + chunk, len(prompt))
            tables, firsts = kv.block_ids(request), kv.groups.first_spans(start)
            for group, (table, first) in enumerate(zip(tables, firsts, strict=True)):
                for span in range(first, start // BLOCK_SIZE):
                    assert content[table[span]] == (group, prompt[: (span + 1) * BLOCK_SIZE])
                for span in range(start // BLOCK_SIZE, stop // BLOCK_SIZE):
                    assert table[span]
                    content[table[span]] = (group, prompt[: (span + 1) * BLOCK_SIZE])
            compute_in_steps(kv, request, stop)
            start = stop
        assert kv.check_integrity([]) == []
        living.append(request)
        if ends:
            kv.free(living.pop(0))
    for request in living:
        kv.free(request)
    assert kv.num_free_blocks == kv.num_blocks


def spans_with_states(kv: KVCacheManager, request: Request) -> list[int]:
    first, second = kv.block_ids(request)[1:]
    spans = [span for span, block_id in enumerate(first) if block_id]
    assert [span for span, block_id in enumerate(second) if block_id] == spans
    return spans


def test_a_request_has_blocks_for_its_last_states_only():
    kv = make_manager(41, FULL, STATE, STATE)
    request = make_request("a", PROMPT)
    kv.allocate(request, [])
    assert spans_with_states(kv, request) == [6, 7]
    compute_in_steps(kv, request, 11, 28, 29)
    assert spans_with_states(kv, request) == [7]
    request.append(SampledToken(1))
    request.append(SampledToken(2))
    request.append(SampledToken(3))
    assert kv.grow(request, 33) is not None
    assert spans_with_states(kv, request) == [7, 8]
    compute_in_steps(kv, request, 33)
    assert spans_with_states(kv, request) == [8]
    assert kv.check_integrity([]) == []
    kv.free(request)
    assert kv.num_free_blocks == kv.num_blocks


def test_a_hit_ends_where_a_state_was_kept():
    kv = make_manager(81, FULL, STATE, STATE)
    compute(kv, make_request("a", PROMPT))  # states after 7 blocks, as 30 tokens leave the eighth open
    assert len(kv.find_cached_prefix(make_request("b", PROMPT))) == 7
    assert len(kv.find_cached_prefix(make_request("c", [*PROMPT[:25], 7, 7, 7, 7]))) == 0


def test_the_second_to_leave_a_text_keeps_the_state_where_it_does():
    kv = make_manager(81, FULL, STATE, STATE)
    compute(kv, make_request("a", PROMPT))
    second = make_request("b", [*PROMPT[:12], *range(20)])
    prefix = kv.find_cached_prefix(second)
    assert prefix == []
    kv.allocate(second, prefix)
    assert spans_with_states(kv, second) == [2, 6, 7]
    compute_in_steps(kv, second, 12, 32)
    assert len(kv.find_cached_prefix(make_request("c", [*PROMPT[:12], *range(50, 70)]))) == 3


def test_states_on_the_way_through_an_output_are_the_next_to_go():
    """But for the last: a prompt that goes on from the output needs that."""
    kv = make_manager(41, FULL, STATE)
    request = make_request("a", PROMPT, max_tokens=60)
    compute(kv, request)
    for _ in range(22):
        request.append(SampledToken(1))
        assert kv.grow(request, request.num_tokens) is not None
        compute_in_steps(kv, request, request.num_tokens)
    kv.free(request)
    states = {request.block_hashes.index(key[:HASH_BYTES]) for key in kv._pool._cached if group_of(key) == 1}
    assert {6, 7, 12} <= states < set(range(6, 13))


def test_a_consumer_gets_the_state_after_its_prompt():
    kv = make_manager(41, FULL, STATE, STATE)
    request = consumer("a", PROMPT)
    assert kv.can_allocate(request, [], kv.num_blocks - 10)
    kv.allocate(request, [])
    assert spans_with_states(kv, request) == [7]
    request.awaits_handoff = False
    for num_computed, lacks in [(0, False), (8, True), (28, True), (29, True), (30, False)]:
        request.num_computed_tokens = num_computed
        assert kv.lacks_blocks(request) == lacks


@given(st.integers(0, 3), st.integers(0, 2), st.integers(0, 40))
def test_what_fits_is_what_a_request_takes_at_most(num_full, num_states, num_blocks):
    groups = [FULL] * num_full + [STATE] * num_states
    if groups:
        num_spans = max_spans_in(groups, num_blocks, 50)
        assert max_blocks_of(groups, num_spans) <= num_blocks or not num_spans
        assert num_spans == 50 or num_spans < 4 or max_blocks_of(groups, num_spans + 1) > num_blocks


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (STATE,), (FULL, STATE, STATE), (FULL, WINDOW, STATE)])
def test_as_many_runs_fit_as_blocks_allow(groups):
    for num_blocks in range(40):
        fitting = [number for number in range(50) if max_blocks_of(groups, number) <= num_blocks]
        assert max_spans_in(groups, num_blocks, 49) == fitting[-1]
