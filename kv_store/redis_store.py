"""A store on Redis servers: one string per block, with a time to live.

    baton:<namespace>:<hash in hex> -> frame

How much is kept is the server's `maxmemory`; it should evict what is least recently used (`allkeys-lru`). Over several
servers the blocks are spread by rendezvous hashing: each block lives on the server whose name scores highest together
with its hash. So all pods agree, whatever the order in which they name the servers, and with one server more or less
only the blocks move that it gains or takes along.

A server that does not answer is put aside for a while, and its blocks go to the servers that score next. Each pod does
so by itself; where two disagree for a moment, a block is not found and is computed again.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import redis
import xxhash
from msgspec import Meta
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import ConfigError, StoreError
from common.types import BlockHash
from kv_store.base import Buffer, StoreConnectorOptions

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_DEFAULT_PORT = 6379
_SOCKET_TIMEOUT_S = 5.0  # of one connect, send or receive; a hung server must not hold a thread for a whole timeout_s
_COOL_DOWN_S = 5.0  # between two attempts at a server that does not answer, while there are others


class RedisOptions(StoreConnectorOptions, frozen=True, kw_only=True):
    """Options of the redis connector."""

    url: Annotated[
        str,
        Meta(
            description="redis://[user:password@]host[:port][/db], rediss:// with TLS; several, separated by commas, "
            "share the blocks."
        ),
    ] = "redis://127.0.0.1:6379/0"
    ttl_s: Annotated[
        int, Meta(ge=1, le=10**9, description="Seconds after its last use at which the server forgets a block.")
    ] = 3600
    tls_ca_file: Annotated[
        str,
        Meta(description="PEM file of the authorities that may have signed a rediss:// server; default: the system's."),
    ] = ""


@dataclass(frozen=True, slots=True)
class RedisNode:
    """Where one server is and who we are to it."""

    host: str
    port: int
    db: int
    username: str | None
    password: str | None = field(repr=False)
    tls: bool

    @property
    def name(self) -> str:
        """For messages and for hashing: no secret, and the same for all pods."""
        return f"{self.host}:{self.port}/{self.db}"


def parse_nodes(urls: str) -> list[RedisNode]:
    """The servers in an option `url`. Raises ConfigError, which repeats nothing that may be a password."""
    nodes = []
    for index, url in enumerate(urls.split(","), 1):
        try:
            nodes.append(_node_of(urlsplit(url.strip())))
        except ValueError:  # whose text may have the password
            message = f"url: number {index} is not redis://[user:password@]host[:port][/db]"
            raise ConfigError(message, param="url") from None
    if len({node.name for node in nodes}) < len(nodes):
        raise ConfigError("url: names the same server twice", param="url")
    return nodes


def _node_of(url: SplitResult) -> RedisNode:
    if url.scheme not in ("redis", "rediss") or not url.hostname or url.query or url.fragment:
        raise ValueError("not a Redis URL")
    return RedisNode(
        host=url.hostname,
        port=url.port or _DEFAULT_PORT,
        db=int(url.path.removeprefix("/") or 0),
        username=unquote(url.username) if url.username else None,
        password=unquote(url.password) if url.password else None,
        tls=url.scheme == "rediss",
    )


_Command = tuple[bytes | memoryview, ...]


class _Server:
    """A client of one server. Threads take connections of its pool."""

    def __init__(self, node: RedisNode, options: RedisOptions, clock: Callable[[], float]) -> None:
        timeout_s = min(_SOCKET_TIMEOUT_S, options.timeout_s)
        tls = {"ssl": True, "ssl_ca_certs": options.tls_ca_file or None} if node.tls else {}
        self.name = node.name
        self.client = redis.Redis(
            host=node.host,
            port=node.port,
            db=node.db,
            username=node.username,
            password=node.password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=1 << 18,
            retry=Retry(NoBackoff(), 0),  # the pool replaces connections that a restart broke; more is not for us
            protocol=2,
            **tls,
        )
        self._seed = xxhash.xxh3_64_intdigest(node.name.encode())
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._retry_at: float | None = None  # by the clock; None: it answers

    def score(self, key: BlockHash) -> int:
        """The server with the highest score has the block."""
        return xxhash.xxh3_64_intdigest(key, self._seed)

    @property
    def is_aside(self) -> bool:
        """It did not answer, and it is not yet time to try again."""
        with self._lock:
            return self._retry_at is not None and self._clock() < self._retry_at

    def note_attempt(self) -> None:
        """Keep others from waiting for a server that may still not answer."""
        with self._lock:
            if self._retry_at is not None:
                self._retry_at = self._clock() + _COOL_DOWN_S

    def note_failure(self, error: Exception) -> None:
        """Put it aside."""
        with self._lock:
            was_aside, self._retry_at = self._retry_at is not None, self._clock() + _COOL_DOWN_S
        if not was_aside:
            logger.warning("Redis at %s is put aside, others take its blocks: %s", self.name, _one_line(error))

    def note_answer(self) -> None:
        """It is as good as the others."""
        with self._lock:
            was_aside, self._retry_at = self._retry_at is not None, None
        if was_aside:
            logger.warning("Redis at %s answers again and gets its blocks back", self.name)

    @contextmanager
    def send(self, commands: Sequence[_Command]) -> Iterator[redis.Connection]:
        """Send commands without waiting in between; inside, all their replies are to be read from the connection."""
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            # Not through a pipeline of the client, which copies each frame three times.
            connection.send_packed_command(list(_pack(commands)))
            yield connection
        except BaseException:
            connection.disconnect()  # nobody else may get what is still under way on it
            raise
        finally:
            pool.release(connection)


def _pack(commands: Sequence[_Command]) -> Iterator[bytes | memoryview]:
    """Commands as Redis reads them, in pieces of which the frames are some, uncopied."""
    text = b""
    for command in commands:
        text += b"*%d\r\n" % len(command)
        for word in command:
            text += b"$%d\r\n" % len(word)
            if isinstance(word, memoryview):
                yield text
                yield word
                text = b"\r\n"
            else:
                text += word + b"\r\n"
    yield text


class _FrameReader:
    """Reads replies that are strings from a connection straight into buffers, where hiredis would copy them twice."""

    _LOOK_AHEAD = 32  # bytes read to find the length; what they have of a frame is copied
    _MAX_LINE = 1 << 12  # bytes of an error

    def __init__(self, connection: redis.Connection) -> None:
        self._socket: socket.socket = connection._sock  # noqa: SLF001 - the client offers no other way to a string
        self._ahead = b""  # received and not yet taken

    def read_into(self, buffer: Buffer) -> int | None:
        """Copy the next reply into `buffer`, what does not fit left out. Its size in bytes, None if there is none."""
        line = self._take_line()
        if line.startswith(b"-"):
            is_loading = line.startswith(b"-LOADING ")
            raise (redis.BusyLoadingError if is_loading else redis.ResponseError)(line[1:].decode(errors="replace"))
        if not re.fullmatch(rb"\$(-1|\d+)", line):
            raise redis.InvalidResponse(f"not the length of a string: {line!r}")
        if (size := int(line[1:])) < 0:
            return None
        fitting = buffer[:size]
        self._take_into(fitting)
        left_out = size - len(fitting)
        while left_out:
            left_out -= self._take_into(memoryview(bytearray(min(left_out, 1 << 16))))
        self._take_into(memoryview(bytearray(2)))  # the end of the line
        return size

    def _take_line(self) -> bytes:
        while b"\r\n" not in self._ahead:
            if len(self._ahead) > self._MAX_LINE:
                raise redis.InvalidResponse("a line without an end")
            self._look_ahead()
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        return line

    def _take_into(self, buffer: memoryview) -> int:
        """Fill `buffer`, whose size it returns."""
        if len(buffer) <= self._LOOK_AHEAD:  # with it may come the next length
            while len(self._ahead) < len(buffer):
                self._look_ahead()
        filled = min(len(buffer), len(self._ahead))
        buffer[:filled], self._ahead = self._ahead[:filled], self._ahead[filled:]
        while filled < len(buffer):
            filled += self._received(self._socket.recv_into(buffer[filled:]))
        return filled

    def _look_ahead(self) -> None:
        received = self._socket.recv(self._LOOK_AHEAD)
        self._received(len(received))
        self._ahead += received

    @staticmethod
    def _received(num_bytes: int) -> int:
        if not num_bytes:
            raise redis.ConnectionError("the server closed the connection")
        return num_bytes


class RedisStore:
    """A BlockStore on one or more Redis servers."""

    def __init__(self, options: RedisOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock  # seconds
        self._ttl_s = b"%d" % options.ttl_s
        self._prefix = b""
        self._servers: list[_Server] = []

    def open(self, namespace: str, frame_bytes: int) -> None:
        """See BlockStore."""
        nodes = parse_nodes(self._options.url)
        _check_tls(nodes, self._options.tls_ca_file)
        self._prefix = _prefix_of(namespace)
        self._servers = [_Server(node, self._options, self._clock) for node in nodes]
        for server in self._servers:
            try:
                server.client.ping()
            except redis.RedisError as error:
                self.close()
                raise ConfigError(f"url: cannot use Redis at {server.name}: {_one_line(error)}", param="url") from error

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockStore."""
        commands = [(b"EXPIRE", self._name_of(key), self._ttl_s) for key in keys]
        return self._ask(keys, commands, lambda connection: lambda _: connection.read_response() == 1)

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore."""
        named = zip(map(self._name_of, keys), frames, strict=True)
        commands = [(b"SET", name, frame, b"EX", self._ttl_s) for name, frame in named]
        self._ask(keys, commands, lambda connection: lambda _: connection.read_response())

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore."""

        def reader(connection: redis.Connection) -> Callable[[int], int | None]:
            frames = _FrameReader(connection)
            return lambda index: frames.read_into(buffers[index])

        commands = [(b"GETEX", self._name_of(key), b"EX", self._ttl_s) for key in keys]
        return self._ask(keys, commands, reader)

    def discard(self, key: BlockHash) -> None:
        """See BlockStore."""
        try:
            self._ask([key], [(b"UNLINK", self._name_of(key))], lambda connection: lambda _: connection.read_response())
        except StoreError as error:
            logger.warning("cannot delete a corrupt block: %s", error)

    def close(self) -> None:
        """See BlockStore."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.client.close()

    def _ask(
        self,
        keys: Sequence[BlockHash],
        commands: Sequence[_Command],
        reader: Callable[[redis.Connection], Callable[[int], _T]],
    ) -> list[_T]:
        """Send each key's command to the server that has it, and what a server leaves unanswered to the next. `reader`
        makes of a connection what takes the next reply from it, given the key's index."""
        taken: dict[int, _T] = {}
        failed: set[_Server] = set()
        give_up_at = self._clock() + self._options.timeout_s
        while left := [index for index in range(len(keys)) if index not in taken]:
            servers = self._servers_but(failed)
            shares: dict[_Server, list[int]] = {}
            for index in left:
                shares.setdefault(_home_of(keys[index], servers), []).append(index)
            for server, indices in shares.items():
                server.note_attempt()
                try:
                    with server.send([commands[index] for index in indices]) as connection:
                        take = reader(connection)
                        for index in indices:
                            taken[index] = take(index)
                except (redis.RedisError, OSError) as error:  # some of the socket's own come through
                    failed.add(server)
                    if not self._can_do_without(server, error, failed) or self._clock() >= give_up_at:
                        raise StoreError(f"Redis at {server.name} failed: {_one_line(error)}") from error
                else:
                    server.note_answer()
        return [taken[index] for index in range(len(keys))]

    def _servers_but(self, failed: set[_Server]) -> list[_Server]:
        """The others that may answer; if all are aside, all others. Raises StoreError if there are none."""
        others = [server for server in self._servers if server not in failed]
        if not others:
            raise StoreError("the store is closed")  # else the last one's failure was raised
        return [server for server in others if not server.is_aside] or others

    def _can_do_without(self, server: _Server, error: Exception, failed: set[_Server]) -> bool:
        """Put a server aside that does not answer; whether another one is left to ask. A refusal is an answer: other
        pods get the same, or go on finding blocks there."""
        if isinstance(error, redis.ResponseError) or len(self._servers) < 2:
            return False
        server.note_failure(error)
        return any(other not in failed and not other.is_aside for other in self._servers)

    def _name_of(self, key: BlockHash) -> bytes:
        return self._prefix + key.hex().encode()


def _home_of(key: BlockHash, servers: Sequence[_Server]) -> _Server:
    return max(servers, key=lambda server: server.score(key))


def _prefix_of(namespace: str) -> bytes:
    return f"baton:{namespace}:".encode()


def _check_tls(nodes: list[RedisNode], ca_file: str) -> None:
    """Raises ConfigError unless `ca_file` is empty, or has certificates and something to verify."""
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
