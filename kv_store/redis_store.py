"""A store on Redis servers: one string per block, with a time to live.

    baton:<namespace>:<hash in hex> -> frame

How much is kept is the server's `maxmemory`; it should evict what is least recently used (`allkeys-lru`). Over several
servers the blocks are spread by rendezvous hashing: each block lives on the server whose name scores highest together
with its hash. So all pods agree, whatever the order in which they name the servers, and when a server is
added or removed only its own blocks move.

Each server has two circuit breakers (`kv_store.guard`):

1. One for all operations. It opens when the server does not answer (refused, reset, timed out), is loading its data, or
   rejects reads. Its blocks then go to the servers that score next.
2. One for writes. It opens when the server rejects only these: it is full and may not evict, or is read-only. Its
   blocks can still be read; new ones go to the servers that score next.

If no server is left, operations fail at once, with the reason.

Each pod has breakers of its own, and pods may disagree for a while. A load therefore tries the next server for a block
that is not found: a pod that could not write to this one may have written it there. A lookup does so only
while this pod itself cannot write there, since most blocks of a new prompt are on no server. A block that is not found
is computed again.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, NoReturn, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import redis
import xxhash
from msgspec import Meta
from redis.backoff import NoBackoff
from redis.exceptions import AuthorizationError, OutOfMemoryError
from redis.retry import Retry

from common.errors import ConfigError, StoreError, StoreUnavailableError
from common.types import BlockHash
from kv_store.base import Buffer, StoreConnectorOptions
from kv_store.guard import DEFAULT_BACKOFF, READ_ONLY, UNAVAILABLE, Backoff, Guard
from kv_store.redis_exchange import Activity, Command, Exchange, FrameReader

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_DEFAULT_PORT = 6379
_MIN_SILENCE_S = 0.5  # after which a server counts as hung, however short lookups may take
_PROBE_KEY = b"baton:probe"  # never exists
_FAILURES = (redis.RedisError, OSError)  # the client does not wrap all errors of the socket


class RedisOptions(StoreConnectorOptions, frozen=True, kw_only=True):
    """Options of the redis connector."""

    url: Annotated[
        str,
        Meta(
            description="redis://[user:password@]host[:port][/db], rediss:// with TLS; several, separated by commas, "
            "share the blocks."
        ),
    ] = "redis://127.0.0.1:6379/0"
    ttl_s: Annotated[int, Meta(ge=1, le=10**9, description="Seconds after its last use at which a block expires.")] = (
        3600
    )
    tls_ca_file: Annotated[
        str,
        Meta(description="PEM file of the authorities that may have signed a rediss:// server; default: the system's."),
    ] = ""


@dataclass(frozen=True, slots=True)
class RedisNode:
    """Address and credentials of one server."""

    host: str
    port: int
    db: int
    username: str | None
    password: str | None = field(repr=False)
    tls: bool

    @property
    def name(self) -> str:
        """Its name in messages and for hashing: without secrets, and the same for all pods."""
        return f"{self.host}:{self.port}/{self.db}"


def parse_nodes(urls: str) -> list[RedisNode]:
    """Parses the servers in an option `url`. Raises ConfigError that quotes nothing that may be a password."""
    nodes = []
    for index, url in enumerate(urls.split(","), 1):
        try:
            nodes.append(_node_of(urlsplit(url.strip())))
        except ValueError:  # its text may contain the password
            message = f"url: number {index} is not redis://[user:password@]host[:port][/db]"
            raise ConfigError(message, param="url") from None
    if len({node.name for node in nodes}) < len(nodes):
        raise ConfigError("url: names the same server twice", param="url")
    return nodes


def _node_of(url: SplitResult) -> RedisNode:
    if url.scheme not in ("redis", "rediss") or not url.hostname or url.query or url.fragment:
        raise ValueError("not a Redis URL")
    if (db := int(url.path.removeprefix("/") or 0)) < 0:
        raise ValueError("not a database")
    return RedisNode(
        host=url.hostname,
        port=url.port or _DEFAULT_PORT,
        db=db,
        username=unquote(url.username) if url.username else None,
        password=unquote(url.password) if url.password else None,
        tls=url.scheme == "rediss",
    )


class _Server:
    """A client of one server, and the breakers of that server. Threads take connections from its pool."""

    def __init__(
        self, node: RedisNode, options: RedisOptions, frame_bytes: int, backoff: Backoff, clock: Callable[[], float]
    ) -> None:
        self.name = node.name
        self._options = options
        self._frame_bytes = frame_bytes
        self._clock = clock
        self._activity = Activity()
        self._client = _create_client(node, options)
        self._seed = xxhash.xxh3_64_intdigest(node.name.encode())
        medium = f"Redis at {node.name}"
        self.operations = Guard(medium, UNAVAILABLE, partial(self._probe, is_write=False), backoff)
        self.writes = Guard(medium, READ_ONLY, partial(self._probe, is_write=True), backoff)

    def score(self, key: BlockHash) -> int:
        """The server with the highest score has the block."""
        return xxhash.xxh3_64_intdigest(key, self._seed)

    def check(self, is_write: bool) -> None:
        """Raises StoreUnavailableError while the server's breaker is open."""
        self.operations.check()
        if is_write:
            self.writes.check()

    def is_usable(self, is_write: bool) -> bool:
        """Whether its breaker is closed."""
        return self.operations.is_closed and (self.writes.is_closed or not is_write)

    def try_out(self) -> None:
        """Checks, when the store starts, whether the server can be read and written. Raises ConfigError if its answer
        means that the settings are wrong."""
        for is_write in (False, True):
            try:
                self._ask_for_nothing(is_write)
            except _FAILURES as error:
                if _is_setting_error(error):
                    raise _unusable(self.name, error) from error
                self.note_failure(error, is_write=is_write)
                return

    def note_failure(self, error: Exception, *, is_write: bool) -> bool:
        """Opens a breaker. False: the failure concerns only this operation, such as a key of another type."""
        reason = _one_line(error)
        if _is_refusal(error) and is_write:
            self.writes.open(reason)
        elif _is_refusal(error) or not isinstance(error, redis.ResponseError):
            self.operations.open(reason)
            self._client.connection_pool.disconnect(inuse_connections=False)  # idle ones may be broken, too
        else:
            return False
        return True

    def close(self) -> None:
        """Ends the probes and closes all connections."""
        self.operations.stop()
        self.writes.stop()
        self._client.close()

    def _probe(self, *, is_write: bool) -> None:
        try:
            self._ask_for_nothing(is_write)
        except _FAILURES as error:
            raise StoreError(_one_line(error)) from error

    def _ask_for_nothing(self, is_write: bool) -> None:
        """Probes reads or writes without effect. The value to write is as long as a block, because a server that is
        almost full accepts shorter ones."""
        command: Command = (b"EXPIRE", _PROBE_KEY, b"1")
        if is_write:
            command = (b"SET", _PROBE_KEY, memoryview(bytes(self._frame_bytes)), b"XX")
        with self.send([command], _silence_s(self._options)) as exchange:
            exchange.reply()

    @contextmanager
    def send(self, commands: Sequence[Command], silence_s: float) -> Iterator[Exchange]:
        """Sends commands in one go; inside the context, all their replies must be read from the exchange."""
        pool = self._client.connection_pool
        timeout_s = self._options.timeout_s
        exchange = Exchange(pool, self._activity, silence_s=silence_s, timeout_s=timeout_s, clock=self._clock)
        try:
            exchange.send(commands)
            yield exchange
        except BaseException:
            exchange.connection.disconnect()  # replies that are still to come would be taken for the next operation's
            raise
        finally:
            pool.release(exchange.connection)


class RedisStore:
    """A BlockStore on one or more Redis servers."""

    def __init__(
        self, options: RedisOptions, *, clock: Callable[[], float] = time.monotonic, backoff: Backoff = DEFAULT_BACKOFF
    ) -> None:
        self._options = options
        self._clock = clock  # seconds
        self._backoff = backoff
        self._ttl_s = b"%d" % options.ttl_s
        self._prefix = b""
        self._servers: list[_Server] = []

    def open(self, namespace: str, frame_bytes: int) -> None:
        """See BlockStore. Succeeds if a server is down, but not if one rejects the settings."""
        nodes = _checked_nodes(self._options)
        self._prefix = _prefix_of(namespace)
        self._servers = [_Server(node, self._options, frame_bytes, self._backoff, self._clock) for node in nodes]
        try:
            with ThreadPoolExecutor(len(nodes)) as pool:  # so that the time-outs of hung servers overlap
                list(pool.map(_Server.try_out, self._servers))
        except ConfigError:
            self.close()
            raise

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockStore."""

        def may_be_on_the_next(server: _Server, is_there: bool) -> bool:
            return not is_there and not server.writes.is_closed

        commands = [(b"EXPIRE", self._name_of(key), self._ttl_s) for key in keys]
        return self._ask(keys, commands, lambda exchange: lambda _: exchange.reply() == 1, may_be_on_the_next)

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore."""
        named = zip(map(self._name_of, keys), frames, strict=True)
        commands = [(b"SET", name, frame, b"EX", self._ttl_s) for name, frame in named]
        self._ask(keys, commands, _reply_reader, is_write=True)

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore."""

        def reader(exchange: Exchange) -> Callable[[int], int | None]:
            frames = FrameReader(exchange)
            return lambda index: frames.read_into(buffers[index])

        commands = [(b"GETEX", self._name_of(key), b"EX", self._ttl_s) for key in keys]
        return self._ask(keys, commands, reader, lambda _, size: size is None)

    def discard(self, key: BlockHash) -> None:
        """See BlockStore. From all servers, since a load may have found it on any."""
        command = (b"UNLINK", self._name_of(key))
        try:
            self._ask([key], [command], _reply_reader, lambda *_: True)
        except StoreError as error:
            logger.warning("cannot delete a corrupt block: %s", error)

    def close(self) -> None:
        """See BlockStore."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    def _ask(
        self,
        keys: Sequence[BlockHash],
        commands: Sequence[Command],
        reader: Callable[[Exchange], Callable[[int], _T]],
        goes_on: Callable[[_Server, _T], bool] = lambda *_: False,
        *,
        is_write: bool = False,
    ) -> list[_T]:
        """Sends each key's command to its server, and on to the next one if there is no reply or if `goes_on` is true
        for the reply. `reader` turns an exchange into a function that takes the next reply from it, given the key's
        index. After a server that hangs the next one is waited for half as long, so that all together, once connected,
        take less than twice the time of one. Raises StoreError if no server answers."""
        routes = [self._route_of(key) for key in keys]
        replies: dict[int, _T] = {}
        left: Sequence[int] = range(len(keys))
        give_up_at = self._clock() + self._options.timeout_s
        silence_s = _silence_s(self._options)
        while shares := self._shares_of(left, routes, replies, is_write):
            left = []
            for server, indices in shares.items():
                num_answered = 0
                try:
                    with server.send([commands[index] for index in indices], silence_s) as exchange:
                        take = reader(exchange)
                        for index in indices:
                            reply = replies[index] = take(index)
                            num_answered += 1
                            if goes_on(server, reply):
                                left.append(index)
                except _FAILURES as error:
                    problem = f"Redis at {server.name} failed: {_one_line(error)}"
                    if not server.note_failure(error, is_write=is_write):
                        raise StoreError(problem) from error
                    if self._clock() >= give_up_at:
                        raise StoreUnavailableError(problem) from error
                    if isinstance(error, redis.TimeoutError):
                        silence_s /= 2
                    left += indices[num_answered:]
        return [replies[index] for index in range(len(keys))]

    def _shares_of(
        self, indices: Sequence[int], routes: Sequence[Iterator[_Server]], replied: Container[int], is_write: bool
    ) -> dict[_Server, list[int]]:
        """Returns the keys of each server: the next usable one on a key's route. A key that has a reply may have no
        further server. Raises StoreError for a key that has neither."""
        shares: dict[_Server, list[int]] = {}
        for index in indices:
            server = next((server for server in routes[index] if server.is_usable(is_write)), None)
            if server is not None:
                shares.setdefault(server, []).append(index)
            elif index not in replied:
                self._refuse(is_write)
        return shares

    def _route_of(self, key: BlockHash) -> Iterator[_Server]:
        """Returns the servers in the order in which they are tried for the block."""
        return iter(sorted(self._servers, key=lambda server: server.score(key), reverse=True))

    def _refuse(self, is_write: bool) -> NoReturn:
        """Raises the reason why no server is usable."""
        if not self._servers:
            raise StoreError("the store is closed")
        for server in self._servers:
            server.check(is_write)
        raise StoreUnavailableError("no Redis server has answered")  # one has become available meanwhile

    def _name_of(self, key: BlockHash) -> bytes:
        return self._prefix + key.hex().encode()


def _reply_reader(exchange: Exchange) -> Callable[[int], object]:
    return lambda _: exchange.reply()


def _prefix_of(namespace: str) -> bytes:
    return f"baton:{namespace}:".encode()


def check_servers(options: RedisOptions) -> None:
    """Raises ConfigError unless every server answers."""
    for node in _checked_nodes(options):
        client = _create_client(node, options)
        try:
            client.ping()
        except redis.RedisError as error:
            raise _unusable(node.name, error) from error
        finally:
            client.close()


def _create_client(node: RedisNode, options: RedisOptions) -> redis.Redis:
    timeout_s = _silence_s(options)  # of a connect, and of each reply when logging in
    tls = {"ssl": True, "ssl_ca_certs": options.tls_ca_file or None} if node.tls else {}
    return redis.Redis(
        host=node.host,
        port=node.port,
        db=node.db,
        username=node.username,
        password=node.password,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_read_size=1 << 18,
        retry=Retry(NoBackoff(), 0),  # the pool replaces connections that a restart broke; the breakers do the rest
        protocol=2,
        **tls,
    )


def _silence_s(options: RedisOptions) -> float:
    """Seconds without a sign of life after which a server hangs: so few that a lookup opens its breaker before the
    request goes on and saves."""
    return min(options.timeout_s, max(_MIN_SILENCE_S, options.lookup_timeout_s / 2))


def _checked_nodes(options: RedisOptions) -> list[RedisNode]:
    """Returns the servers. Raises ConfigError for invalid options."""
    nodes = parse_nodes(options.url)
    _check_tls(nodes, options.tls_ca_file)
    return nodes


def _check_tls(nodes: list[RedisNode], ca_file: str) -> None:
    """Raises ConfigError unless `ca_file` is empty, or has certificates and there is a server to verify."""
    if not ca_file:
        return
    if not any(node.tls for node in nodes):
        raise ConfigError(
            "tls_ca_file: no url begins with rediss://, so nothing would be encrypted", param="tls_ca_file"
        )
    try:
        ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"tls_ca_file: cannot read certificates from {ca_file}: {error}", param="tls_ca_file"
        ) from error


def _unusable(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"url: cannot use Redis at {name}: {_one_line(error)}", param="url")


_REFUSALS = ("MISCONF ", "NOREPLICAS ", "BUSY ")  # prefixes of errors that the client has no classes for


def _is_refusal(error: Exception) -> bool:
    """Whether the server rejects all operations of this kind for now: it is full, read-only, or cannot persist."""
    return isinstance(error, (OutOfMemoryError, redis.ReadOnlyError)) or (
        isinstance(error, redis.ResponseError) and str(error).startswith(_REFUSALS)
    )


def _is_setting_error(error: Exception) -> bool:
    """Whether retrying is useless: the login, the permissions, the database or TLS is wrong."""
    if isinstance(error, (redis.AuthenticationError, AuthorizationError)):
        return True
    if isinstance(error, redis.ResponseError):
        return not _is_refusal(error)
    cause = error.__context__  # the error that the client has turned into a ConnectionError
    return isinstance(cause, ssl.SSLError) and not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
