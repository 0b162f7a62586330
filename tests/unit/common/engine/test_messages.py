"""Facts of an engine that follow from others."""

from __future__ import annotations

import pytest

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.messages import EngineSpec


@pytest.mark.parametrize(("num_ranks", "heads_of_rank"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_whole_block_has_each_head_once(num_ranks: int, heads_of_rank: int) -> None:
    head_bytes = 2 * 16 * 64 * 4
    spec = EngineSpec(
        fingerprint=b"f",
        layout=KVLayout(16, (KVGroupSpec((0,), 4, 64, 64, "float32"),), num_ranks),
        num_blocks=9,
        max_model_len=32,
        vocab_size=500,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        device="cpu",
        dtype="float32",
        bytes_per_block=heads_of_rank * head_bytes,
    )
    assert spec.bytes_per_whole_block == 4 * head_bytes
