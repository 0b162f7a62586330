import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.executor.fake import ONE_GROUP
from common.engine.kv_cache import KVCacheManager, KVGroups
from common.engine.scheduler.request import Request
from common.types import SampledToken, hash_prompt, root_hash
from tests.unit.common.engine.scheduler_factories import BLOCK_SIZE, create_request


def make_request(request_id: str, prompt, **settings) -> Request:
    message = create_request(request_id, prompt, **settings)
    return Request(message, added_at=0.0, max_model_len=64, eos=frozenset())


def make_manager(num_blocks: int = 17, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, KVGroups(ONE_GROUP, BLOCK_SIZE), enable_prefix_caching=enable_prefix_caching)


def compute(kv: KVCacheManager, request: Request) -> None:
    """Admit `request` and compute all its tokens."""
    prefix = kv.find_cached_prefix(request)
    assert kv.can_allocate(request, prefix, 0)
    kv.allocate(request, prefix)
    request.num_computed_tokens = request.num_tokens
    kv.cache_computed(request)


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (14, 3)])
def test_a_prefix_hit_leaves_at_least_one_token_to_compute(num_tokens, num_hit):
    kv, prompt = make_manager(), list(range(100, 114))
    compute(kv, make_request("a", prompt))
    again = make_request("b", prompt[:num_tokens])
    assert len(kv.find_cached_prefix(again)) == num_hit


def test_the_hit_is_shared_and_only_the_rest_is_allocated():
    kv, prompt = make_manager(), list(range(100, 110))
    a, b = make_request("a", prompt), make_request("b", [*prompt[:8], 7, 7])
    compute(kv, a)
    compute(kv, b)
    assert ids(kv.blocks(a))[:2] == ids(kv.blocks(b))[:2]
    assert ids(kv.blocks(a))[2:] != ids(kv.blocks(b))[2:]
    assert kv.num_free_blocks == kv.num_blocks - 4
    kv.free(a)
    assert kv.num_free_blocks == kv.num_blocks - 3
    assert kv.check_integrity([]) == []


def test_a_hit_must_be_contiguous():
    kv, prompt = make_manager(), list(range(100, 113))
    compute(kv, make_request("a", prompt))
    other = [prompt[0] + 1, *prompt[1:]]  # later blocks hold the same tokens after another first one
    assert kv.find_cached_prefix(make_request("b", other)) == []


def test_another_salt_never_hits():
    kv, prompt = make_manager(), list(range(100, 113))
    compute(kv, make_request("a", prompt, cache_salt="tenant-1"))
    assert kv.find_cached_prefix(make_request("b", prompt)) == []
    assert kv.find_cached_prefix(make_request("c", prompt, cache_salt="tenant-2")) == []
    assert len(kv.find_cached_prefix(make_request("d", prompt, cache_salt="tenant-1"))) == 3


def test_output_tokens_are_found_as_prompt_of_the_next_turn():
    kv = make_manager()
    a = make_request("a", [100, 101, 102], max_tokens=9)
    compute(kv, a)
    for token_id in range(6):
        a.append(SampledToken(token_id))
        kv.grow(a, a.num_tokens)
        a.num_computed_tokens = a.num_tokens
        kv.cache_computed(a)
    assert a.block_hashes == hash_prompt(a.token_ids, BLOCK_SIZE, root_hash())
    kv.free(a)
    assert len(kv.find_cached_prefix(make_request("b", [*a.token_ids, 5]))) == 2


def test_hashes_that_are_known_are_completed():
    prompt = list(range(100, 113))
    request = make_request("a", prompt, cache_salt="s")
    request.complete_block_hashes(BLOCK_SIZE, 1)
    request.complete_block_hashes(BLOCK_SIZE, 3)
    assert request.block_hashes == hash_prompt(prompt, BLOCK_SIZE, root_hash("s"))


def test_free_cached_blocks_of_the_hit_count_against_what_is_free():
    kv, prompt = make_manager(num_blocks=5), list(range(100, 113))  # 4 usable, all needed
    a = make_request("a", prompt)
    compute(kv, a)
    kv.free(a)
    longer = make_request("b", [*prompt[:12], 1, 2, 3, 4, 5])
    prefix = kv.find_cached_prefix(longer)
    assert len(prefix) == 3
    assert not kv.can_allocate(longer, prefix, 0)  # 3 revived and 2 fresh of 4
    same = make_request("c", prompt)
    assert kv.can_allocate(same, prefix, 0)
    assert not kv.can_allocate(same, prefix, 1)


def test_growth_is_all_or_nothing():
    kv = make_manager(num_blocks=4)
    a = make_request("a", 8)
    compute(kv, a)
    assert kv.grow(a, 8) == []
    assert kv.grow(a, 17) is None
    assert kv.num_free_blocks == 1
    assert kv.grow(a, 9) == [ids(kv.blocks(a))[2:]]
    assert kv.grow(a, 13) is None


def test_pinned_blocks_are_not_reused_after_their_request_is_gone():
    kv = make_manager(num_blocks=4)
    a = make_request("a", 12)
    compute(kv, a)
    pinned = list(kv.blocks(a))[:2]
    kv.pin(pinned)
    kv.free(a)
    assert kv.num_free_blocks == 1
    assert kv.check_integrity(pinned) == []
    kv.unpin(pinned)
    assert kv.num_free_blocks == 3


def test_without_prefix_caching_nothing_is_found():
    kv = make_manager(enable_prefix_caching=False)
    compute(kv, make_request("a", 9))
    assert kv.find_cached_prefix(make_request("a2", create_request("a", 9).prompt_token_ids)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.booleans()), max_size=14))
def test_what_is_found_is_the_content_of_equal_tokens(prompts):
    """Requests over a two-token alphabet come and go in a tiny pool; each block found was written for that prefix."""
    kv = make_manager(num_blocks=9)
    content: dict[int, list[int]] = {}
    living: list[Request] = []
    for index, (prompt, ends) in enumerate(prompts):
        request = make_request(f"r{index}", prompt)
        prefix = kv.find_cached_prefix(request)
        for position, block in enumerate(prefix):
            assert content[block.block_id] == prompt[: (position + 1) * BLOCK_SIZE]
        if not kv.can_allocate(request, prefix, 0):
            kv.free(living.pop(0))
            continue
        compute(kv, request)
        for position, block in enumerate(kv.blocks(request)[len(prefix) :], start=len(prefix)):
            content[block.block_id] = prompt[: (position + 1) * BLOCK_SIZE]
        living.append(request)
        if ends:
            kv.free(living.pop(0))
        assert kv.check_integrity([]) == []
    for request in living:
        kv.free(request)
    assert kv.num_free_blocks == kv.num_blocks
