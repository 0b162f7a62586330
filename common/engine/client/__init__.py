"""Clients, through which the rest of a pod uses its engine.

`create_client` for pods (`AsyncMPClient`, a process of its own; `DataParallelClient`, several),
`common.engine.client.threaded.AsyncInprocClient` on a thread, `common.engine.client.inproc.InprocClient` without
asyncio.
"""

import itertools
import socket
import tempfile

import msgspec

from common.engine.client.base import EngineClient
from common.engine.client.data_parallel import DataParallelClient
from common.engine.client.mp import AsyncMPClient
from common.engine.config import DataParallelMember, EngineConfig

__all__ = ["AsyncMPClient", "DataParallelClient", "EngineClient", "create_client"]


def create_client(config: EngineConfig, *, name: str = "") -> EngineClient:
    """Creates a client of an engine process, or of several, which `start` starts; `name` of the pod marks their log
    lines."""
    if config.parallel.data_parallel_size == 1:
        return AsyncMPClient(config, name=name)
    directory = tempfile.mkdtemp(prefix="baton-engines-")  # mode 0700
    return DataParallelClient(_engines(config, name, f"{directory}/rendezvous"), directory)


def _engines(config: EngineConfig, name: str, rendezvous: str) -> list[AsyncMPClient]:
    """The engines of a pod. Those that step together have a socket to each other, and share the tokens of a step."""
    num_engines = config.parallel.data_parallel_size
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_engines)]
    if config.parallel.is_lockstep:
        for one, other in itertools.combinations(range(num_engines), 2):
            sockets[one][other], sockets[other][one] = socket.socketpair(type=socket.SOCK_SEQPACKET)
        num_tokens = max(1, config.scheduler.max_num_batched_tokens // num_engines)
        scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=num_tokens)
        config = msgspec.structs.replace(config, scheduler=scheduler)
    engines = []
    for rank, to in enumerate(sockets):
        descriptors = {other: each.fileno() for other, each in to.items()}
        member = DataParallelMember(rank=rank, rendezvous=rendezvous, sockets=descriptors)
        own = msgspec.structs.replace(config, data_parallel=member)
        engines.append(AsyncMPClient(own, name=f"{name} engine {rank}".strip(), sockets=list(to.values())))
    return engines
