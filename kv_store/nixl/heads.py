"""KV heads in slabs: a part of a block that goes from one rank to another is a run of heads in
each plane of some layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common.engine.contract.layout import Part
    from kv_store.base import Buffer
    from kv_store.block_format import BlockLayout


class Cut(NamedTuple):
    """The places of a part in each block of a region: a run of the block's runs, all of which are `stride_bytes` apart,
    also from one block to the next."""

    first_byte: int  # offset of the block's first run
    run_bytes: int
    stride_bytes: int
    runs_per_block: int
    first_run: int  # index of the part's first run
    num_runs: int


@dataclass(frozen=True, slots=True)
class SlabShape:
    """A slab as [planes, heads, bytes of a head]; a plane is the keys or the values of a layer, or both in one."""

    num_planes: int
    num_heads: int
    head_bytes: int
    planes_per_layer: int = 2

    @classmethod
    def of(cls, block: BlockLayout) -> SlabShape:
        """The shape of slabs of this layout."""
        num_planes = block.num_planes * (block.num_layers + block.num_feature_layers)
        head_bytes = block.slab_bytes // (num_planes * block.num_kv_heads)
        return cls(num_planes, block.num_kv_heads, head_bytes, block.num_planes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self.num_planes * self.num_heads * self.head_bytes

    @property
    def num_layers(self) -> int:
        """Layers of the slab."""
        return self.num_planes // self.planes_per_layer

    def cut(self, part: Part, *, in_one_run: bool) -> Cut:
        """The places of a part. `in_one_run`: it has all heads of the slab, and of the one at the other end."""
        plane_bytes, first_head = self.num_heads * self.head_bytes, part.head * self.head_bytes
        first_plane, num_planes = (self.planes_per_layer * layers for layers in (part.layer, part.num_layers))
        if in_one_run:
            return Cut(first_plane * plane_bytes, num_planes * plane_bytes, self.num_bytes, 1, 0, 1)
        run_bytes = part.num_heads * self.head_bytes
        return Cut(first_head, run_bytes, plane_bytes, self.num_planes, first_plane, num_planes)

    def runs(self, slab: Buffer, part: Part) -> list[memoryview]:
        """Returns the bytes of a part in each plane, in place; one run if it has all heads."""
        cut, view = self.cut(part, in_one_run=part.num_heads == self.num_heads), memoryview(slab)
        starts = (cut.first_byte + run * cut.stride_bytes for run in range(cut.first_run, cut.first_run + cut.num_runs))
        return [view[start : start + cut.run_bytes] for start in starts]
