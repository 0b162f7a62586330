"""The registry in which pods announce themselves and routers find them."""

from common.registry.record import PodRecord, RecordError
from common.registry.redis_registry import Reading, RedisRegistry

__all__ = ["PodRecord", "Reading", "RecordError", "RedisRegistry"]
