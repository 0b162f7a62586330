"""A machine of an engine other than machine 0: it joins, runs its ranks, and joins again when the engine has ended.

`common.engine.executor.multiproc.nodes` is the other end. Nothing here outlives the connection to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time

import msgspec

from common import __version__
from common.engine.config import EngineConfig
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.digests import create_digests
from common.engine.executor.multiproc.link import Link
from common.engine.executor.multiproc.protocol import (
    JoinNode,
    RankEnded,
    RankLaunch,
    StartRanks,
    ToNode,
    encode,
)
from common.engine.executor.multiproc.rank_process import start_rank
from common.engine.executor.multiproc.tls import TlsStream, client_context
from common.engine.launch import EngineFailed
from common.errors import EngineDeadError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_PAUSE_S = 0.5  # before the next attempt


def run_node(config: EngineConfig) -> None:
    """Serves engines, one after the other. Raises EngineDeadError when none has come for `join_timeout_s`, and
    ConfigError if machine 0 refuses this one."""
    while True:
        link = _join(config)
        try:
            _serve(link, config)
        except EngineDeadError as error:
            logger.warning("%s; joining again", error)
        finally:
            link.close()


def connect(config: EngineConfig) -> Channel:
    """A connection to machine 0, on which it presented its certificate. Raises OSError."""
    parallel, tls = config.parallel, config.tls
    assert tls is not None
    connection = socket.create_connection((parallel.master_addr, parallel.master_port), _CONNECT_TIMEOUT_S)
    try:
        return Channel(TlsStream(connection, client_context(tls), tls.server_name or parallel.master_addr))
    except BaseException:
        connection.close()
        raise


def _join(config: EngineConfig) -> Link[ToNode]:
    parallel = config.parallel
    where, due = f"{parallel.master_addr}:{parallel.master_port}", time.monotonic() + parallel.join_timeout_s
    logger.info("node %d of %d joins at %s", parallel.node_rank, parallel.nnodes, where)
    said = ""
    while True:
        try:
            channel = connect(config)
        except OSError as error:
            if str(error) != said:
                said = str(error)
                logger.info("node 0 at %s: %s", where, said)
            if time.monotonic() >= due:
                reason = f"node 0 at {where} did not answer within {parallel.join_timeout_s:g} s (join_timeout_s)"
                raise EngineDeadError(f"{reason}: {error}") from error
            time.sleep(_PAUSE_S)
            continue
        link: Link[ToNode] = Link(channel, ToNode, f"node 0 ({where})", parallel.node_timeout_s)
        with contextlib.suppress(OSError):  # of which the first message tells
            link.send(JoinNode(parallel.node_rank, parallel.nnodes, parallel.num_ranks, __version__))
        return link


def _serve(link: Link[ToNode], config: EngineConfig) -> None:
    with contextlib.ExitStack() as ranks:
        for message in link.messages():
            match message:
                case StartRanks(launches):
                    digests = create_digests(config.parallel.num_ranks)
                    ranks.callback(os.close, digests)
                    for launch in launches:
                        ranks.callback(_end, _start(launch, len(launches), digests, link, config))
                case EngineFailed() as failed:
                    raise failed.to_error()


def _start(
    launch: RankLaunch, num_ranks: int, digests: int, link: Link[ToNode], config: EngineConfig
) -> subprocess.Popen[bytes]:
    own = config.parallel
    parallel = msgspec.structs.replace(
        launch.config.parallel,
        node_rank=own.node_rank,
        master_addr=own.master_addr,
        master_port=own.master_port,
    )
    of_rank = msgspec.structs.replace(launch.config, parallel=parallel, tls=config.tls)
    store_host = link.own_host if launch.store_host else ""
    launch = msgspec.structs.replace(launch, config=of_rank, digests=digests, store_host=store_host)
    own_end, others = socket.socketpair()
    with own_end, others:
        process = start_rank(launch.rank, num_ranks, others, (digests,))
        Channel(own_end).send(encode(launch))
    threading.Thread(target=_watch, args=(launch.rank, process, link), name=f"rank-{launch.rank}", daemon=True).start()
    return process


def _watch(rank: int, process: subprocess.Popen[bytes], link: Link[ToNode]) -> None:
    code = process.wait()
    with contextlib.suppress(OSError):  # the connection is closed
        link.send(RankEnded(rank, code))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
