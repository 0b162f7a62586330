"""The prefix index next to a plain model of what pods hold, and the events that it must not believe."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import HASH_BYTES
from router.placing.index import InvalidEventError, PrefixIndex

NOW = 100.0


def chain(*names: str) -> list[bytes]:
    """Hashes of a prompt's blocks; each stands for all blocks before it too, as real ones do."""
    return ["/".join(names[: end + 1]).encode().ljust(HASH_BYTES, b".") for end in range(len(names))]


def blocks(*names: str) -> bytes:
    return b"".join(chain(*names))


def index_of(*holdings: bytes, capacity=100, max_holdings=1000) -> PrefixIndex:
    """An index whose pods 0, 1, ... hold these blocks."""
    index = PrefixIndex(max_holdings)
    for held in holdings:
        slot = index.join(capacity)
        assert index.apply(slot, 1, held, b"", is_snapshot=True)
    return index


def test_leading_blocks_are_counted_for_each_pod():
    index = index_of(blocks("a", "b", "c"), blocks("a"), b"", blocks("x"), blocks("a", "z"))
    assert index.match(blocks("a", "b", "c", "d"), NOW).computed.tolist() == [3, 1, 0, 0, 1]
    assert index.match(blocks("q"), NOW).computed.tolist() == [0] * 5
    assert index.match(b"", NOW).computed.tolist() == [0] * 5
    assert PrefixIndex(1).match(blocks("a"), NOW).computed.tolist() == []


def test_long_prompts_and_many_pods():
    prompt = b"".join(number.to_bytes(HASH_BYTES, "big") for number in range(5000))
    lengths = [0, 1, 255, 256, 257, 4999, 5000, *(random.Random(3).randrange(5000) for _ in range(120))]
    index = index_of(*(prompt[: length * HASH_BYTES] for length in lengths), capacity=5000, max_holdings=10**6)
    assert index.match(prompt, NOW).computed.tolist() == lengths


def test_a_hole_is_no_harm():
    index = index_of(blocks("a") + chain("a", "b", "c")[2], blocks("a", "b"))
    assert index.match(blocks("a", "b", "c"), NOW).computed.tolist() in ([1, 2], [3, 2])


def test_events_must_come_in_order():
    index = PrefixIndex(1000)
    slot = index.join(100)
    assert not index.apply(slot, 1, blocks("a"), b""), "a snapshot comes first"
    assert index.apply(slot, 7, blocks("a"), b"", is_snapshot=True)
    assert index.apply(slot, 8, chain("a", "b")[1], b"")
    assert not index.apply(slot, 10, chain("a", "b", "c")[2], b"")
    assert index.match(blocks("a", "b", "c"), NOW).computed.tolist() == [2], "what came before the gap still counts"
    assert not index.apply(slot, 9, b"", b""), "nothing but a snapshot helps"
    assert index.apply(slot, 20, blocks("a"), b"", is_snapshot=True)
    assert index.match(blocks("a", "b", "c"), NOW).computed.tolist() == [1]
    assert index.apply(slot, 21, b"", blocks("a"))
    assert index.size.num_blocks == 0


@pytest.mark.parametrize(
    ("stored", "removed", "is_snapshot", "said"),
    [
        (b"short", b"", False, "cut"),
        (b"", b"x" * 17, False, "cut"),
        (b"", blocks("b"), False, "never stored"),
        (b"", blocks("a") * 2, False, "never stored"),
        (blocks("b"), blocks("b"), False, "never stored"),
        (blocks("a"), blocks("a"), True, "snapshot"),
        (blocks("b", "c", "d"), b"", False, "the cache has 3"),
    ],
)
def test_impossible_events(stored, removed, is_snapshot, said):
    index = index_of(blocks("a"), capacity=3)
    with pytest.raises(InvalidEventError, match=said):
        index.apply(0, 2, stored, removed, is_snapshot=is_snapshot)
    index.forget(0)
    assert index.check_integrity() == []
    assert index.size.num_holdings == 0


def test_memory_is_bounded_and_what_is_beyond_may_still_be_removed():
    index = index_of(blocks("a", "b", "c"), blocks("a", "b"), max_holdings=4)
    assert index.size[:3] == (3, 4, 1)
    assert index.match(blocks("a", "b", "c"), NOW).computed.tolist() == [3, 1]
    assert index.apply(1, 2, b"", chain("a", "b")[1])
    assert index.size.num_unindexed == 0
    with pytest.raises(InvalidEventError):
        index.apply(1, 3, b"", chain("a", "b")[1])
    assert index.apply(0, 2, b"", chain("a", "b", "c")[2])
    assert index.apply(1, 4, chain("a", "b")[1], b""), "room again"
    assert index.match(blocks("a", "b"), NOW).computed.tolist() == [2, 2]


def test_a_forgotten_pod_counts_no_more_and_its_slot_is_used_again_when_it_is_swept():
    many = b"".join(number.to_bytes(HASH_BYTES, "big") for number in range(5000))
    index = index_of(blocks("a") + many, blocks("a"), capacity=6000, max_holdings=10_000)
    index.forget(0)
    for start in range(0, len(many), HASH_BYTES):
        assert not index.match(many[start : start + HASH_BYTES], NOW).computed.any()
    assert index.join(10) == 2, "slot 0 is not swept yet"
    for sequence in range(2, 5):
        index.apply(1, sequence, b"", b"")
    assert index.size[:2] == (1, 1)
    slot = index.join(10)
    assert slot == 0
    assert index.match(blocks("a"), NOW).computed.tolist() == [0, 1, 0]


def test_what_a_pod_will_hold_counts_until_it_is_over():
    index = index_of(blocks("a"), b"", b"")
    index.expect(2, blocks("a", "b", "c", "d"), 0, NOW, 20, arrives=False)
    short = index.expect(1, blocks("a", "b"), 0, NOW, 10, arrives=False)
    index.expect(0, blocks("z"), 0, NOW, 20, arrives=False)
    index.expect(0, blocks("a", "b"), 2, NOW, 20, arrives=False)
    prompt = blocks("a", "b", "c", "x")
    assert index.match(prompt, NOW).computed.tolist() == [1, 2, 3]
    short.settle(NOW + 1)
    assert index.match(prompt, NOW + 0.5).computed.tolist() == [1, 2, 3]
    assert index.match(prompt, NOW + 1).computed.tolist() == [1, 0, 3]
    index.forget(2)
    assert index.match(prompt, NOW + 1).computed.tolist() == [1, 0, 0]


def test_expectations_build_on_what_is_held_and_on_each_other():
    index = index_of(blocks("a", "b"), b"")
    index.expect(0, blocks("a", "b", "c", "d"), 2, NOW, 20, arrives=False)
    assert index.match(blocks("a", "b", "c", "x"), NOW).computed.tolist() == [3, 0]
    index.expect(0, blocks("a", "b", "c", "x", "y"), 3, NOW, 20, arrives=False)
    assert index.match(blocks("a", "b", "c", "x", "y", "z"), NOW).computed.tolist() == [5, 0]
    assert index.match(blocks("a", "b", "c", "d", "e"), NOW).computed.tolist() == [4, 0]
    assert index.match(blocks("a", "x", "c"), NOW).computed.tolist() == [1, 0]
    assert index.apply(0, 2, b"", chain("a", "b")[1])
    assert index.match(blocks("a", "b", "c", "x", "y"), NOW).computed.tolist() == [5, 0]


def test_what_is_handed_over_comes_later_than_a_prompt_that_is_sent_now():
    index = index_of(blocks("a"), b"")
    handed_over = index.expect(0, blocks("a", "b", "c"), 1, NOW, 20, arrives=True)
    index.expect(1, blocks("a", "b"), 0, NOW, 20, arrives=False)
    held = index.match(blocks("a", "b", "x"), NOW)
    assert (held.computed.tolist(), held.arriving.tolist()) == ([1, 2], [2, 2])
    handed_over.settle(NOW + 10)
    assert index.match(blocks("a", "b", "x"), NOW).computed.tolist() == [2, 2]


def test_expectations_that_are_over_are_given_back():
    index = index_of(b"")
    for number in range(3000):
        index.expect(0, blocks(str(number)), 0, NOW + number, 1, arrives=False)
    assert index.size.num_expectations <= 256


@st.composite
def prompts(draw):
    return tuple(draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=8)))


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts(), min_size=1, max_size=30), st.integers(0, 2**32), st.integers(1, 6))
def test_against_a_model(all_prompts, seed, num_pods):
    """Pods that cache prompts and evict them from their ends, come and go; the index says what each holds."""
    choices = random.Random(seed)
    index = PrefixIndex(10_000)
    held: dict[int, set[bytes]] = {}
    sequences: dict[int, int] = {}

    def join():
        slot = index.join(1000)
        held[slot], sequences[slot] = set(), 1
        assert index.apply(slot, 1, b"", b"", is_snapshot=True)

    for _ in range(num_pods):
        join()
    for prompt in all_prompts:
        slot = choices.choice(list(held))
        hashes = chain(*prompt)
        cut = choices.randrange(len(hashes) + 1)
        gone = [each for each in held[slot] if each in hashes[cut:] or _follows(each, hashes[cut:])]
        stored = [each for each in hashes[:cut] if each not in held[slot]]
        sequences[slot] += 1
        assert index.apply(slot, sequences[slot], b"".join(stored), b"".join(gone))
        held[slot] = (held[slot] - set(gone)) | set(stored)
        if choices.random() < 0.1:
            index.forget(slot)
            del held[slot]
            join()
        probe = chain(*choices.choice(all_prompts))
        counts = index.match(b"".join(probe), NOW).computed
        for each, blocks_held in held.items():
            expected = next((depth for depth, block in enumerate(probe) if block not in blocks_held), len(probe))
            assert counts[each] == expected
        assert index.check_integrity() == []


def _follows(block: bytes, evicted: list[bytes]) -> bool:
    """Whether `block` continues one of the evicted."""
    return any(block.rstrip(b".").startswith(each.rstrip(b".") + b"/") for each in evicted)
