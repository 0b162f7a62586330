"""The reports of a pod for as long as it is connected: its load, and the content of its prefix cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NoReturn

import grpc

from common.errors import UnavailableError
from common.pb import pods_pb2, pods_pb2_grpc
from common.rpc.errors import from_rpc_error

_INTERVAL_MS = 50
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0


async def follow_stats(
    stub: pods_pb2_grpc.PodAsyncStub,
    take: Callable[[pods_pb2.PodStats], bool],
    *,
    first_pause_s: float = _FIRST_PAUSE_S,
) -> NoReturn:
    """Give each report to `take`. If that says False, KV events are missing: start over, with a snapshot.

    Streams lose nothing, so a pod whose events have gaps has a fault. It may keep it: each time it is asked after twice
    the pause, from `first_pause_s` seconds on. Raises UnavailableError, or what gRPC says, when the pod ends the
    stream.
    """
    pause_s = first_pause_s
    while await _read(stub, take):
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    raise UnavailableError("the pod ended the stats stream")


async def _read(stub: pods_pb2_grpc.PodAsyncStub, take: Callable[[pods_pb2.PodStats], bool]) -> bool:
    """One stream. True: events are missing."""
    call = stub.WatchStats(pods_pb2.WatchStatsRequest(min_interval_ms=_INTERVAL_MS, with_kv_events=True))
    try:
        async for stats in call:
            if not take(stats):
                return True
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
    return False
