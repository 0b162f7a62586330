"""Ownership of KV blocks: the pool, and the block tables of requests. No tensors, no torch."""

from common.engine.kv_cache.block_pool import Block, BlockPool, FreeBlockQueue
from common.engine.kv_cache.cache_changes import CacheChange, CacheChanges
from common.engine.kv_cache.grouped_kv_cache_manager import create_kv_cache_manager
from common.engine.kv_cache.groups import BlockOrder, KVGroups
from common.engine.kv_cache.kv_cache_manager import KeyedBlocks, KVCacheManager, Prefix

__all__ = [
    "Block",
    "BlockOrder",
    "BlockPool",
    "CacheChange",
    "CacheChanges",
    "FreeBlockQueue",
    "KVCacheManager",
    "KVGroups",
    "KeyedBlocks",
    "Prefix",
    "create_kv_cache_manager",
]
