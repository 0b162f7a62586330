"""Invariants of the scheduler: each function returns the violations, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from common.engine.kv_cache import Block
from common.engine.scheduler.request import Request


def overwritten(computing: Mapping[Request, Sequence[Block]], windowed: Iterable[Block]) -> list[str]:
    """Nothing is computed into blocks that a producer may write to; what was verified of them is cached."""
    written_to = {block.block_id for block in windowed if block.block_hash is None}
    return [
        f"{request} computes into block {block.block_id}, which a producer may write to"
        for request, blocks in computing.items()
        for block in blocks
        if block.block_id in written_to
    ]
