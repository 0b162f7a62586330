"""Clients, through which the rest of a pod uses its engine.

`create_client` for pods (`AsyncMPClient`, a process of its own; `DataParallelClient`, several),
`common.engine.client.threaded.AsyncInprocClient` on a thread, `common.engine.client.inproc.InprocClient` without
asyncio.
"""

import itertools
import secrets
import socket
import tempfile
from collections.abc import Mapping

import msgspec

from common.engine.client.base import EngineClient
from common.engine.client.data_parallel import DataParallelClient
from common.engine.client.mp import AsyncMPClient
from common.engine.config import EngineConfig, LockstepConfig

__all__ = ["AsyncMPClient", "DataParallelClient", "EngineClient", "create_client"]


def create_client(config: EngineConfig, *, name: str = "") -> EngineClient:
    """Creates a client of an engine process, or of several, which `start` starts; `name` of the pod marks their log
    lines."""
    if config.parallel.data_parallel_size == 1:
        return AsyncMPClient(config, name=name)
    return DataParallelClient(_engines(config, name))


def _engines(config: EngineConfig, name: str) -> list[AsyncMPClient]:
    """The engines of a pod. Those that step together have a socket to each other, and share the tokens of a step."""
    num_engines = config.parallel.data_parallel_size
    configs = [msgspec.structs.replace(config, data_parallel_rank=rank) for rank in range(num_engines)]
    sockets: list[dict[int, socket.socket]] = [{} for _ in configs]
    if config.parallel.is_lockstep:
        for one, other in itertools.combinations(range(num_engines), 2):
            sockets[one][other], sockets[other][one] = socket.socketpair(type=socket.SOCK_SEQPACKET)
        rendezvous = f"{tempfile.gettempdir()}/baton-experts-{secrets.token_hex(16)}"
        configs = [_stepping_together(each, rendezvous, to) for each, to in zip(configs, sockets, strict=True)]
    return [
        AsyncMPClient(each, name=f"{name} engine {rank}".strip(), sockets=list(sockets[rank].values()))
        for rank, each in enumerate(configs)
    ]


def _stepping_together(config: EngineConfig, rendezvous: str, sockets: Mapping[int, socket.socket]) -> EngineConfig:
    num_tokens = max(1, config.scheduler.max_num_batched_tokens // config.parallel.data_parallel_size)
    return msgspec.structs.replace(
        config,
        scheduler=msgspec.structs.replace(config.scheduler, max_num_batched_tokens=num_tokens),
        lockstep=LockstepConfig(rendezvous=rendezvous, sockets={rank: each.fileno() for rank, each in sockets.items()}),
    )
