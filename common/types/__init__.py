"""Plain values that travel between router, pods and engine. No torch, no grpc, no I/O."""

from common.types.adapter_name import AdapterName
from common.types.block_hash import (
    ADAPTER_DIGEST_BYTES,
    HASH_BYTES,
    MAX_KV_GROUPS,
    BlockHash,
    ExtraKey,
    group_key,
    group_of,
    hash_partial_block,
    hash_prompt,
    root_hash,
    split_hashes,
)
from common.types.constraint import Constraint, ConstraintKind
from common.types.generation import (
    FinishReason,
    Logprobs,
    RequestId,
    SampledToken,
    SamplingParams,
    TransferId,
)
from common.types.pooling import NO_SAMPLING, PoolingFacts, PoolingParams
from common.types.positions import PromptPositions

__all__ = [
    "ADAPTER_DIGEST_BYTES",
    "HASH_BYTES",
    "MAX_KV_GROUPS",
    "NO_SAMPLING",
    "AdapterName",
    "BlockHash",
    "Constraint",
    "ConstraintKind",
    "ExtraKey",
    "FinishReason",
    "Logprobs",
    "PoolingFacts",
    "PoolingParams",
    "PromptPositions",
    "RequestId",
    "SampledToken",
    "SamplingParams",
    "TransferId",
    "group_key",
    "group_of",
    "hash_partial_block",
    "hash_prompt",
    "root_hash",
    "split_hashes",
]
