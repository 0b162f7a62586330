"""A worker's facts on the model that it has loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from common.engine.config import Kernels
from common.engine.contract.layout import KVLayout
from common.types import PoolingFacts


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a loaded model for the engine, "auto" resolved."""

    fingerprint: bytes  # 32 bytes: identity of the model, see `fingerprint_model`; the layout is no part of it
    layout: KVLayout
    vocab_size: int
    max_model_len: int  # the model's own limit
    eos_token_ids: frozenset[int]
    bytes_per_block: int  # of a rank, the same in all groups
    available_kv_bytes: int  # for the KV cache, from settings and measured free memory; the draft model's included
    device: str
    dtype: str
    draft_bytes_per_block: int = 0  # of the draft model, on the rank that has it
    position_dims: int = 1  # dimensions of a token's position
    tokenizer_directory: Path | None = None  # of the model; None: output cannot be constrained
    kernels: Kernels = "torch"
    kernels_failed: bool = False  # compiled ones computed something else
    num_threads: int = 0  # CPU threads of a step; 0: it runs elsewhere
    pooling: PoolingFacts = field(default_factory=PoolingFacts)

    @property
    def bytes_of_block(self) -> int:
        """Bytes of a block with the draft model's part of it."""
        return self.bytes_per_block + self.draft_bytes_per_block
