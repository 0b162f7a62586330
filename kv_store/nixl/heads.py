"""KV heads in slabs: what goes of a block from one rank to another is a run of heads, and so a run of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kv_store.base import Buffer
    from kv_store.block_format import BlockLayout


class Cut(NamedTuple):
    """The place of a part in each block of a region."""

    first_byte: int  # in the block
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlabShape:
    """A slab as [heads, bytes of a head]: keys and values of all layers."""

    num_heads: int
    head_bytes: int

    @classmethod
    def of(cls, block: BlockLayout) -> SlabShape:
        """The shape of slabs of this layout."""
        return cls(block.num_kv_heads, block.payload_bytes // block.num_kv_heads)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self.num_heads * self.head_bytes

    def cut(self, first_head: int, num_heads: int) -> Cut:
        """The place of these heads."""
        return Cut(first_head * self.head_bytes, num_heads * self.head_bytes)

    def heads(self, slab: Buffer, first_head: int, num_heads: int) -> Buffer:
        """Returns the bytes of these heads, in place."""
        first_byte, num_bytes = self.cut(first_head, num_heads)
        return memoryview(slab)[first_byte : first_byte + num_bytes]
