"""The changes of the prefix cache since they were last taken."""

from __future__ import annotations

from typing import NamedTuple

from common.types import BlockHash


class CacheChange(NamedTuple):
    """Concatenated block hashes of `HASH_BYTES` each; none is in both."""

    stored: bytes = b""  # in the order of insertion, so that a prompt's head precedes its end
    removed: bytes = b""


class CacheChanges:
    """The net change of a set of block hashes: hashes added and removed between two `take`s do not
    appear.

    Never holds more than twice as many hashes as the set, even if it is never taken.
    """

    __slots__ = ("_removed", "_stored")

    def __init__(self) -> None:
        self._stored: dict[BlockHash, None] = {}  # dicts keep the order
        self._removed: dict[BlockHash, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)

    def store(self, block_hash: BlockHash) -> None:
        """Notes a hash added to the set."""
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def remove(self, block_hash: BlockHash) -> None:
        """Notes a hash removed from the set."""
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> CacheChange:
        """Returns the change and resets it."""
        change = CacheChange(b"".join(self._stored), b"".join(self._removed))
        self._stored, self._removed = {}, {}
        return change
