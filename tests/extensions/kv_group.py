"""A kind of KV group as someone outside the project would add it: each token reads those of its own chunk before it.

--executor tests.extensions.kv_group:create
"""

from __future__ import annotations

from common.engine.config import EngineConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.executor.fake import ONE_GROUP, FakeExecutor

CHUNK = 24  # tokens


class ChunkGroup:
    """See KVGroupKind."""

    is_state = False

    def __init__(self, spec: KVGroupSpec) -> None:
        pass

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """See KVGroupKind. The next token may be the first of a chunk."""
        return num_computed_tokens // CHUNK * CHUNK


SPEC = KVGroupSpec((1,), num_kv_heads=1, head_dim=1, value_head_dim=1, dtype="float32", kind=f"{__name__}:ChunkGroup")
GROUPS = (*ONE_GROUP, SPEC)


def create(config: EngineConfig) -> FakeExecutor:
    """An ExecutorFactory: of a model with a full group and one of this kind."""
    return FakeExecutor(block_size=config.cache.block_size, groups=GROUPS)
