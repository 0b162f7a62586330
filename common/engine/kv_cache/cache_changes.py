"""What has become of the prefix cache since somebody last asked."""

from __future__ import annotations

from typing import NamedTuple

from common.types import BlockHash


class CacheChange(NamedTuple):
    """Concatenated block hashes of `HASH_BYTES` each; none is in both."""

    stored: bytes = b""  # in the order in which they came, so that a prompt's head is before its end
    removed: bytes = b""


class CacheChanges:
    """The net change of a set of block hashes: what came and went between two `take`s leaves no trace.

    Never holds more than twice what the set does, whether it is taken or not.
    """

    __slots__ = ("_removed", "_stored")

    def __init__(self) -> None:
        self._stored: dict[BlockHash, None] = {}  # dicts keep the order
        self._removed: dict[BlockHash, None] = {}

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)

    def store(self, block_hash: BlockHash) -> None:
        """The set has one more."""
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def remove(self, block_hash: BlockHash) -> None:
        """The set has one less."""
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> CacheChange:
        """All of it; from now on it counts anew."""
        change = CacheChange(b"".join(self._stored), b"".join(self._removed))
        self._stored, self._removed = {}, {}
        return change
