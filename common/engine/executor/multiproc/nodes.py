"""The other machines of an engine, as machine 0 sees them.

1. `Nodes` listens at the master address. Other machines connect, and wait; both ends of each connection present a
   certificate of the cluster, and say that they are alive. What comes before the certificate is bounded.
2. When all are there, each gets the launches of its ranks. Its ranks connect twice each, with the token of this start.
3. A connection that ends, or on which nothing comes, ends the engine. With the engine all connections end, and with
   them the ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from common import __version__
from common.engine.config import EngineConfig
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.link import Link
from common.engine.executor.multiproc.protocol import (
    Decoder,
    FromJoining,
    FromNode,
    JoinNode,
    JoinRank,
    RankEnded,
    RankLaunch,
    StartRanks,
)
from common.engine.executor.multiproc.rank_process import describe_exit
from common.engine.executor.multiproc.tls import TlsStream, server_context
from common.engine.launch import EngineFailed
from common.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 5.0  # of each message until a connection is known
_MAX_GREETING_BYTES = 1024
_MAX_GREETINGS = 64  # at once
_MAX_REFUSED = 100  # that are logged
_RANKS_TIMEOUT_S = 60.0  # for processes to start and connect


class Nodes:
    """See the module. Used in this order: `wait`, `start`, `close`."""

    def __init__(self, config: EngineConfig, numbers: Iterable[int], on_failure: Callable[[Exception], None]) -> None:
        """Listens for the machines of these numbers. Raises ConfigError."""
        assert config.tls is not None
        self._parallel = config.parallel
        self._on_failure = on_failure
        self._missing = set(numbers)
        self._context = server_context(config.tls)
        self._token = secrets.token_bytes(16)
        self._changed = threading.Condition()  # guards what follows
        self._links: dict[int, Link[FromNode]] = {}
        self._unfit: dict[int, str] = {}  # missing machines of which one came that was refused, and why
        self._channels: dict[tuple[int, bool], Channel] = {}
        self._ended: dict[int, str] = {}  # ranks, and how
        self._failure: Exception | None = None
        self._has_started = False
        self._refused: set[tuple[str, str]] = set()  # that were logged
        self._greetings = threading.BoundedSemaphore(_MAX_GREETINGS)
        self._listener = _listen(self._parallel.master_addr, self._parallel.master_port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def wait(self) -> None:
        """Returns when all machines are there. Raises EngineDeadError that says which are missing, and why those were
        refused that do not fit: a corrected one may come in their place until then, as in a rolling update."""
        timeout_s = self._parallel.join_timeout_s
        logger.info("waiting for %s at %s:%d", _names(self._missing), *self.address)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._missing, timeout_s)
            if self._failure is not None:
                raise self._failure
            if self._missing:
                reason = f"{_names(self._missing)} of {self._parallel.nnodes} did not join within {timeout_s:g} s"
                refused = "".join(f"; refused: {self._unfit[number]}" for number in sorted(self._unfit))
                raise EngineDeadError(f"{reason} (join_timeout_s){refused}")
            self._has_started = True

    def start(self, launches: Sequence[RankLaunch]) -> list[RemoteRank]:
        """Starts ranks on their machines. Raises EngineDeadError if they do not come."""
        by_node: dict[int, list[RankLaunch]] = {number: [] for number in self._links}
        for each in launches:
            launch = msgspec.structs.replace(each, token=self._token)
            by_node[launch.rank // self._parallel.ranks_per_node].append(launch)
        for number, of_node in by_node.items():
            try:
                self._links[number].send(StartRanks(of_node))
            except OSError as error:
                raise EngineDeadError(f"{self._links[number].peer} is gone: {error}") from error
        wanted = {(launch.rank, is_events) for launch in launches for is_events in (False, True)}
        with self._changed:
            self._changed.wait_for(lambda: self._failure or wanted <= self._channels.keys(), _RANKS_TIMEOUT_S)
            if self._failure is not None:
                raise self._failure
            if missing := {rank for rank, _ in wanted - self._channels.keys()}:
                reason = f"did not connect within {_RANKS_TIMEOUT_S:g} s"
                raise EngineDeadError(f"{', '.join(f'rank {rank}' for rank in sorted(missing))} {reason}")
        self._stop_listening()
        return [
            RemoteRank(RemoteProcess(self, rank), self._channels[rank, False], self._channels[rank, True])
            for rank in sorted(launch.rank for launch in launches)
        ]

    def wait_for_end(self, rank: int, timeout_s: float) -> str:
        """How a rank's process has ended, or "" if it has not in time."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self._ended, timeout_s)
            return self._ended.get(rank, "")

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        self._stop_listening()
        with self._changed:
            self._has_started = True
            links = [*self._links.values()]
        for link in links:
            link.close()

    # -- threads ----------------------------------------------------------------------------------------------------

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, too
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed
                return
            if self._greetings.acquire(blocking=False):
                threading.Thread(
                    target=self._greet, args=(connection, address[0]), name="greeting", daemon=True
                ).start()
            else:
                connection.close()

    def _greet(self, connection: socket.socket, host: str) -> None:
        """Learns who connects, and from then on listens to a machine."""
        link: Link[FromNode] | None = None
        try:
            connection.settimeout(_GREETING_TIMEOUT_S)
            channel = Channel(TlsStream(connection, self._context))
            channel.limit_receives(_GREETING_TIMEOUT_S)
            channel.limit_sends(_GREETING_TIMEOUT_S)
            greeting = Decoder[FromJoining](FromJoining)(channel.receive(_MAX_GREETING_BYTES))
            if isinstance(greeting, JoinRank):
                self._take_rank(greeting, channel)
            else:
                link = self._take_node(greeting, channel, host)
        except (OSError, EOFError, ssl.SSLError, msgspec.MsgspecError, ConfigError) as error:
            self._log_refused(host, str(error))
            connection.close()
            return
        finally:
            self._greetings.release()
        if link is not None:
            self._listen_to(greeting.node_rank, link)  # type: ignore[union-attr]
            connection.close()

    def _log_refused(self, host: str, reason: str) -> None:
        """Once for each reason, as machines try again."""
        with self._changed:
            is_new = (host, reason) not in self._refused and len(self._refused) < _MAX_REFUSED
            if is_new:
                self._refused.add((host, reason))
        if is_new:
            logger.warning("a connection from %s was refused: %s", host, reason)

    def _take_rank(self, greeting: JoinRank, channel: Channel) -> None:
        if not hmac.compare_digest(greeting.token, self._token):
            raise ConfigError("a rank of another start")
        channel.limit_receives(0)  # none
        with self._changed:
            if (greeting.rank, greeting.is_events) in self._channels:
                raise ConfigError(f"a second rank {greeting.rank}")
            self._channels[greeting.rank, greeting.is_events] = channel
            self._changed.notify_all()

    def _take_node(self, greeting: JoinNode, channel: Channel, host: str) -> Link[FromNode]:
        own, number = self._parallel, greeting.node_rank
        link: Link[FromNode] = Link(channel, FromNode, f"node {number} ({host})", own.node_timeout_s)
        wanted = {"version": __version__, "nnodes": own.nnodes, "num_ranks": own.num_ranks}
        with self._changed:
            problem = next(
                (
                    f"{link.peer} has {name} {getattr(greeting, name)}, node 0 has {value}"
                    for name, value in wanted.items()
                    if getattr(greeting, name) != value
                ),
                "" if number in self._missing else f"--node-rank: node {number} is not awaited, or is there already",
            )
            if problem:
                if number in self._missing:
                    self._unfit[number] = problem
                error = ConfigError(problem, param="nnodes")
                link.send(EngineFailed.of(error))
                raise error
            self._missing.remove(number)
            self._unfit.pop(number, None)
            self._links[number] = link
            self._changed.notify_all()
        logger.info("%s has joined", link.peer)
        return link

    def _listen_to(self, number: int, link: Link[FromNode]) -> None:
        try:
            for message in link.messages():
                if isinstance(message, RankEnded):
                    self._note_end([message.rank], describe_exit(message.code))
        except Exception as error:  # noqa: BLE001  gone, or an invalid message
            with self._changed:
                if not self._has_started:  # it may come again
                    logger.warning("%s", error)
                    self._missing.add(number)
                    del self._links[number]
                    return
                self._failure = self._failure or error
                per_node = self._parallel.ranks_per_node
            self._note_end(range(number * per_node, (number + 1) * per_node), f"is gone: {error}")
            self._on_failure(error)

    def _note_end(self, ranks: Iterable[int], how: str) -> None:
        with self._changed:
            for rank in ranks:
                self._ended.setdefault(rank, how)
            self._changed.notify_all()


class RemoteProcess:
    """A rank's process on another machine, which ends when the machine's connection does."""

    is_stopped = False  # as far as is known here
    pid = None

    def __init__(self, nodes: Nodes, rank: int) -> None:
        self._nodes = nodes
        self._rank = rank

    def end(self, timeout_s: float) -> None:
        """See LocalProcess."""
        self._nodes.wait_for_end(self._rank, timeout_s)

    def describe_end(self, timeout_s: float) -> str:
        """See LocalProcess."""
        return self._nodes.wait_for_end(self._rank, timeout_s) or "has closed its connection"


class RemoteRank(NamedTuple):
    """A rank that has connected."""

    process: RemoteProcess
    calls: Channel
    events: Channel


def _names(numbers: Iterable[int]) -> str:
    return " and ".join(f"node {number}" for number in sorted(numbers))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_MAX_GREETINGS)
    except OSError as error:
        reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError.of("master_addr", reason) from error
