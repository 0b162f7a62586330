"""KV heads in slabs: a part of a block that goes from one rank to another is a run of heads in each of its planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kv_store.base import Buffer
    from kv_store.block_format import BlockLayout


class Cut(NamedTuple):
    """The places of a part in each block of a region: `num_runs` runs of `run_bytes`, `stride_bytes` apart."""

    first_byte: int  # in the block
    run_bytes: int
    stride_bytes: int
    num_runs: int


@dataclass(frozen=True, slots=True)
class SlabShape:
    """A slab as [planes, heads, bytes of a head]; a plane is the keys or the values of a layer."""

    num_planes: int
    num_heads: int
    head_bytes: int

    @classmethod
    def of(cls, block: BlockLayout) -> SlabShape:
        """The shape of slabs of this layout."""
        num_planes = 2 * block.num_layers
        return cls(num_planes, block.num_kv_heads, block.payload_bytes // (num_planes * block.num_kv_heads))

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self.num_planes * self.num_heads * self.head_bytes

    def cut(self, first_head: int, num_heads: int, *, is_whole: bool) -> Cut:
        """The places of these heads. `is_whole`: they are all heads of the slab, and of the one at the other end."""
        if is_whole:
            return Cut(0, self.num_bytes, self.num_bytes, 1)
        plane_bytes = self.num_heads * self.head_bytes
        return Cut(first_head * self.head_bytes, num_heads * self.head_bytes, plane_bytes, self.num_planes)

    def runs(self, slab: Buffer, first_head: int, num_heads: int) -> list[memoryview]:
        """Returns the bytes of these heads in each plane, in place; one run if they are all heads."""
        first_byte, run_bytes, stride_bytes, _ = self.cut(first_head, num_heads, is_whole=num_heads == self.num_heads)
        view = memoryview(slab)
        return [view[start : start + run_bytes] for start in range(first_byte, self.num_bytes, stride_bytes)]
