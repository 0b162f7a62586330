"""The KV cache of a simulated pod: the rules of the real one, without the tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from common.types import HASH_BYTES


def split(hashes: bytes) -> list[bytes]:
    """One item per block."""
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


class BlockCache:
    """Reference counts, an LRU of blocks that nobody uses, and the events that a router learns of it by."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_private = 0  # used, under no hash
        self._users: dict[bytes, int] = {}  # cached block -> users
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # cached ones without users, least recently used first
        self._stored: dict[bytes, None] = {}  # since the last report
        self._removed: dict[bytes, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self._num_blocks - self._num_private - len(self._users) + len(self._idle)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are cached."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._users:
                return index
        return len(hashes)

    def num_idle(self, hashes: Sequence[bytes]) -> int:
        """Counts the cached blocks that nobody uses: sharing them takes free blocks."""
        return sum(block_hash in self._idle for block_hash in hashes)

    def share(self, hashes: Sequence[bytes]) -> None:
        """One more user of each of these cached blocks."""
        for block_hash in hashes:
            self._users[block_hash] += 1
            self._idle.pop(block_hash, None)

    def allocate(self, count: int) -> None:
        """Take free blocks, of which there are enough."""
        self._num_private += count
        while self._num_private + len(self._users) > self._num_blocks:
            evicted, _ = self._idle.popitem(last=False)
            del self._users[evicted]
            if evicted in self._stored:
                del self._stored[evicted]
            else:
                self._removed[evicted] = None

    def fill(self, block_hash: bytes) -> bool:
        """A private block is full; False if the content is cached already and the block stays private."""
        if block_hash in self._users:
            return False
        self._num_private -= 1
        self._users[block_hash] = 1
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None
        return True

    def release(self, hashes: Sequence[bytes], num_private: int) -> None:
        """One user less of each cached block, given in prompt order, and private ones given back."""
        self._num_private -= num_private
        for block_hash in reversed(hashes):
            self._users[block_hash] -= 1
            if not self._users[block_hash]:
                self._idle[block_hash] = None

    def take_events(self) -> tuple[bytes, bytes]:
        """Stored and removed since the last time."""
        events = b"".join(self._stored), b"".join(self._removed)
        self._stored, self._removed = {}, {}
        return events
