"""Ownership of KV blocks: the pool, and the block tables of requests. No tensors, no torch."""

from common.engine.kv_cache.block_pool import Block, BlockPool, FreeBlockQueue
from common.engine.kv_cache.cache_changes import CacheChange, CacheChanges
from common.engine.kv_cache.kv_cache_manager import KVCacheManager

__all__ = ["Block", "BlockPool", "CacheChange", "CacheChanges", "FreeBlockQueue", "KVCacheManager"]
