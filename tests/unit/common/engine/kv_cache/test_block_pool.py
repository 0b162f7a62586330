import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.kv_cache import Block, BlockPool, FreeBlockQueue
from common.types import BlockHash, split_hashes


def name(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


class TestFreeBlockQueue:
    def test_order_with_removal_from_the_middle(self):
        queue, blocks = FreeBlockQueue(), [Block(i) for i in range(5)]
        for block in blocks[:4]:
            queue.append(block)
        queue.remove(blocks[2])
        queue.appendleft(blocks[4])
        assert ids(queue) == [4, 0, 1, 3]
        assert [queue.popleft().block_id for _ in range(len(queue))] == [4, 0, 1, 3]
        assert list(queue) == []

    def test_misuse_is_refused(self):
        queue, block = FreeBlockQueue(), Block(1)
        with pytest.raises(IndexError):
            queue.popleft()
        with pytest.raises(ValueError, match="not in the free queue"):
            queue.remove(block)
        queue.append(block)
        with pytest.raises(ValueError, match="already"):
            queue.append(block)


class TestBlockPool:
    def test_the_null_block_is_never_given(self):
        pool = BlockPool(4)
        assert sorted(ids(pool.allocate(pool.num_free))) == [1, 2, 3]
        with pytest.raises(ValueError, match="1 blocks requested, 0 free"):
            pool.allocate(1)

    def test_a_cached_block_survives_its_owner_until_it_is_the_oldest(self):
        pool = BlockPool(4)
        head, tail = blocks = pool.allocate(2)
        pool.cache(head, name(1))
        pool.cache(tail, name(2))
        pool.free(blocks)
        assert pool.num_free == 3
        pool.allocate(2)  # the empty block, then the tail: of a prefix the head lives longest
        assert (pool.find(name(1)), pool.find(name(2))) == (head, None)
        pool.share([head])
        assert pool.num_free == 0
        assert head.ref_cnt == 1

    def test_a_block_without_content_is_reused_before_a_cached_one(self):
        pool = BlockPool(3)
        cached, empty = blocks = pool.allocate(2)
        pool.cache(cached, name(1))
        pool.free([cached])
        pool.free([empty])
        assert ids(pool.allocate(1)) == ids(blocks[1:])
        assert pool.find(name(1)) is cached

    def test_equal_content_is_cached_once(self):
        pool = BlockPool(3)
        first, second = pool.allocate(2)
        pool.cache(first, name(1))
        pool.cache(second, name(1))
        assert pool.find(name(1)) is first
        pool.free([second])
        assert pool.find(name(1)) is first
        pool.free([first])
        assert pool.check_integrity({}) == []

    def test_a_double_free_is_refused(self):
        pool = BlockPool(3)
        blocks = pool.allocate(1)
        pool.free(blocks)
        with pytest.raises(ValueError, match="is freed but has no users"):
            pool.free(blocks)

    def test_reset_keeps_what_is_in_use(self):
        pool = BlockPool(4)
        used, unused = pool.allocate(2)
        pool.cache(used, name(1))
        pool.cache(unused, name(2))
        pool.free([unused])
        pool.reset_cache()
        assert (pool.find(name(1)), pool.find(name(2))) == (used, None)
        assert pool.num_cached == 1

    def test_integrity_names_what_is_wrong(self):
        pool = BlockPool(4)
        block, _ = pool.allocate(2)
        assert pool.check_integrity({1: 1, 2: 1}) == []
        assert pool.check_integrity({1: 1}) == ["block 2 has ref_cnt 1 but 0 owners"]
        block.ref_cnt = 0  # a leak
        assert "block 1 with ref_cnt 0 is outside the free queue" in pool.check_integrity({2: 1})


class PoolMachine(RuleBasedStateMachine):
    """Allocations, shares and pins of a pool in any order, against a plain list of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.owned: list[list[Block]] = []
        self.written: dict[int, int] = {}  # block_id -> content of the latest allocation
        self.content = 0
        self.reported: set[bytes] = set()  # what somebody knows who hears of changes now and then

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert not {block.block_id for owner in self.owned for block in owner} & set(ids(blocks))
        self.owned.append(blocks)
        for block in blocks:
            self.content += 1
            self.written[block.block_id] = self.content

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), duplicate=st.booleans())
    def cache(self, data, duplicate):
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.owned))))
        content = 1 if duplicate else self.written[block.block_id]
        if not duplicate or self.pool.find(name(1)) is not None:
            self.pool.cache(block, name(content))

    @rule(content=st.integers(1, 40))
    def hit(self, content):
        block = self.pool.find(name(content))
        if block is not None:
            assert self.written[block.block_id] == content
            self.pool.share([block])
            self.owned.append([block])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule()
    def reset(self):
        self.pool.reset_cache()

    @rule()
    def report(self):
        change = self.pool.changes.take()
        stored, removed = set(split_hashes(change.stored)), set(split_hashes(change.removed))
        assert removed <= self.reported
        assert not stored & (self.reported - removed)
        self.reported = self.reported - removed | stored
        assert self.reported == {name(content) for content in range(self.content + 1) if self.pool.find(name(content))}
        assert len(self.reported) == self.pool.num_cached
        assert not self.pool.changes

    @invariant()
    def every_block_is_free_or_owned(self):
        users: dict[int, int] = {}
        for owner in self.owned:
            for block in owner:
                users[block.block_id] = users.get(block.block_id, 0) + 1
        assert self.pool.check_integrity(users) == []
        assert self.pool.num_free == self.pool.num_blocks - len(users)

    def teardown(self):
        for owner in self.owned:
            self.pool.free(owner)
        assert self.pool.num_free == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
