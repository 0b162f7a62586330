"""Clients, through which the rest of a pod uses its engine.

`create_client` for pods (`AsyncMPClient`, a process of its own; `DataParallelClient`, several),
`common.engine.client.threaded.AsyncInprocClient` on a thread, `common.engine.client.inproc.InprocClient` without
asyncio.
"""

import msgspec

from common.engine.client.base import EngineClient
from common.engine.client.data_parallel import DataParallelClient
from common.engine.client.mp import AsyncMPClient
from common.engine.config import EngineConfig

__all__ = ["AsyncMPClient", "DataParallelClient", "EngineClient", "create_client"]


def create_client(config: EngineConfig, *, name: str = "") -> EngineClient:
    """Creates a client of an engine process, or of several, which `start` starts; `name` of the pod marks their log
    lines."""
    if config.parallel.data_parallel_size == 1:
        return AsyncMPClient(config, name=name)
    return DataParallelClient(
        [
            AsyncMPClient(
                msgspec.structs.replace(config, data_parallel_rank=rank), name=f"{name} engine {rank}".strip()
            )
            for rank in range(config.parallel.data_parallel_size)
        ]
    )
