"""How the rest of a pod talks to its engine.

`create_client` for pods (`AsyncMPClient`, a process of its own), `common.engine.client.threaded.AsyncInprocClient` on a
thread, `common.engine.client.inproc.InprocClient` without asyncio.
"""

from common.engine.client.base import EngineClient
from common.engine.client.mp import AsyncMPClient
from common.engine.config import EngineConfig
from common.engine.launch import DEFAULT_EXECUTOR

__all__ = ["AsyncMPClient", "EngineClient", "create_client"]


def create_client(config: EngineConfig, *, executor: str = DEFAULT_EXECUTOR, name: str = "") -> EngineClient:
    """A client of an engine process that `start` will start; `name` of the pod marks its log lines.

    `executor` names an ExecutorFactory as "module:factory".
    """
    return AsyncMPClient(config, executor=executor, name=name)
