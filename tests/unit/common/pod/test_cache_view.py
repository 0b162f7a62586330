"""What a pod says about its prefix cache is exact, whoever watches since when, and however seldom."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from common.pod.cache_view import HASHES_PER_EVENT, CacheView
from common.types import HASH_BYTES, BlockHash, split_hashes
from router.placing.index import PrefixIndex

MANY = 2 * HASHES_PER_EVENT + 7


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(HASH_BYTES, "big"))


def names(numbers) -> bytes:
    return b"".join(name(number) for number in numbers)


def held_by(index: PrefixIndex, slot: int) -> set[bytes]:
    return set(index._holders[slot].held)


class ViewMachine(RuleBasedStateMachine):
    """A view with watchers, each of which feeds a pod of an index."""

    @initialize()
    def start(self):
        self.view = CacheView()
        self.held: set[int] = set()
        self.index = PrefixIndex(10_000)
        self.watchers: list = []  # slot, watch, its context

    @rule(numbers=st.sets(st.integers(0, 30)), removed=st.sets(st.integers(0, 30)))
    def change(self, numbers, removed):
        removed &= self.held
        stored = numbers - (self.held - removed)
        self.view.apply(names(stored), names(removed))
        self.held = self.held - removed | stored
        assert len(self.view) == len(self.held)

    @rule()
    def join(self):
        context = self.view.watch()
        self.watchers.append((self.index.join(31), context.__enter__(), context))

    @precondition(lambda self: self.watchers)
    @rule(data=st.data())
    def leave(self, data):
        slot, _, context = self.watchers.pop(data.draw(st.integers(0, len(self.watchers) - 1)))
        context.__exit__(None, None, None)
        self.index.forget(slot)
        assert len(self.view._watches) == len(self.watchers)

    @precondition(lambda self: self.watchers)
    @rule(data=st.data())
    def tell(self, data):
        slot, watch, _ = data.draw(st.sampled_from(self.watchers))
        for event in watch.take():
            assert self.index.apply(slot, event.sequence, event.stored, event.removed, is_snapshot=event.is_snapshot)
        assert held_by(self.index, slot) == {name(number) for number in self.held}
        assert not watch.take()


TestViewMachine = ViewMachine.TestCase
TestViewMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_first_word_is_a_snapshot_even_of_nothing() -> None:
    with CacheView().watch() as watch:
        (event,) = watch.take()
        assert (event.is_snapshot, event.stored, event.removed) == (True, b"", b"")
        assert watch.take() == []


def test_much_is_cut_and_a_change_meanwhile_comes_after_it() -> None:
    view = CacheView()
    view.apply(names(range(MANY)), b"")
    with view.watch() as watch:
        events = watch.take()
        view.apply(names([MANY]), names([0]))
        assert [event.is_snapshot for event in events] == [True, False, False]
        assert [len(event.stored) // HASH_BYTES for event in events] == [HASHES_PER_EVENT, HASHES_PER_EVENT, 7]
        assert [event.sequence for event in events] == [1, 2, 3]
        assert b"".join(event.stored for event in events) == names(range(MANY)), "heads of prompts come first"
        removed, stored = watch.take()
        assert (removed.sequence, removed.removed, removed.stored) == (4, name(0), b"")
        assert (stored.sequence, stored.removed, stored.stored) == (5, b"", name(MANY))


def test_what_a_watcher_is_owed_is_bounded_by_what_the_cache_holds() -> None:
    view = CacheView()
    with view.watch() as watch:
        watch.take()
        for number in range(1000):
            view.apply(names([number + 3]), b"")
            if number >= 3:
                view.apply(b"", names([number]))
        owed = [(split_hashes(event.stored), split_hashes(event.removed)) for event in watch.take()]
    assert owed == [([name(number) for number in (1000, 1001, 1002)], [])]


def test_an_engine_that_removes_what_it_never_stored_is_not_believed() -> None:
    with pytest.raises(KeyError):
        CacheView().apply(b"", name(1))
