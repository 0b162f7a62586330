"""Clients, through which the rest of a pod uses its engine.

`create_client` for pods (`AsyncMPClient`, a process of its own), `common.engine.client.threaded.AsyncInprocClient` on a
thread, `common.engine.client.inproc.InprocClient` without asyncio.
"""

from common.engine.client.base import EngineClient
from common.engine.client.mp import AsyncMPClient
from common.engine.config import EngineConfig

__all__ = ["AsyncMPClient", "EngineClient", "create_client"]


def create_client(config: EngineConfig, *, name: str = "") -> EngineClient:
    """Creates a client of an engine process, which `start` starts; `name` of the pod marks its log lines."""
    return AsyncMPClient(config, name=name)
