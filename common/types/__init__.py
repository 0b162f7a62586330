"""Plain values that travel between router, pods and engine. No torch, no grpc, no I/O."""

from common.types.block_hash import (
    HASH_BYTES,
    BlockHash,
    hash_block,
    hash_partial_block,
    hash_prompt,
    root_hash,
    split_hashes,
)
from common.types.generation import (
    FinishReason,
    Logprobs,
    RequestId,
    SampledToken,
    SamplingParams,
    TransferId,
)
from common.types.pairing import block_size_misfit

__all__ = [
    "HASH_BYTES",
    "BlockHash",
    "FinishReason",
    "Logprobs",
    "RequestId",
    "SampledToken",
    "SamplingParams",
    "TransferId",
    "block_size_misfit",
    "hash_block",
    "hash_partial_block",
    "hash_prompt",
    "root_hash",
    "split_hashes",
]
