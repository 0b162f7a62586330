"""The inspector Protocol, one implementation per medium."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

# What BlockFormat.namespace, of any version, and BlockHash.hex() can be. Other names are not of Baton.
NAMESPACE_PATTERN = r"v[1-9][0-9]{0,3}-[0-9a-f]{16}-[1-9][0-9]{0,3}"
HASH_PATTERN = r"[0-9a-f]{32}(?:[0-9a-f]{2})?"  # with a KV group but the first
NAMESPACE = re.compile(NAMESPACE_PATTERN)


class StoredBlock(NamedTuple):
    """A block as the medium lists it, without its contents."""

    namespace: str
    hash_hex: str  # with the KV group, see group_key
    num_bytes: int  # that it takes on the medium
    used_at: float | None  # its last use, seconds since 1970; None: unknown
    location: str  # by which the inspector finds it again


class StoreInspector(Protocol):
    """A store as an operator sees it. Used by one thread; may block. Methods raise ConfigError that names the setting
    with the store's place if the medium fails.

    The store may be in use: blocks come and go meanwhile.
    """

    def blocks(self, namespace: str | None = None) -> Iterator[StoredBlock]:
        """Iterates over all blocks, or those of one namespace, in no order. They may be removed meanwhile."""

    def read(self, block: StoredBlock) -> bytes | None:
        """Returns its frame; None if it is gone."""

    def remove(self, blocks: Sequence[StoredBlock]) -> int:
        """Deletes the blocks. Returns how many of them were still there."""

    def close(self) -> None:
        """Release the medium. Idempotent."""
