"""The registry on a Redis server. Three keys and a channel per namespace, all on one slot of a Redis cluster:

    baton:{pods:<namespace>}:records   hash, address -> record
    baton:{pods:<namespace>}:leases    sorted set, address -> end of its lease, in milliseconds of the server's clock
    baton:{pods:<namespace>}:epoch     random text; if it differs or is missing, the server has lost its data
    baton:{pods:<namespace>}:changes   published to when a record is new or withdrawn

Leases run by the server's clock alone. Writes are scripts, so they are atomic.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from common.errors import ConfigError, UnavailableError
from common.registry.record import PodRecord

if TYPE_CHECKING:
    import redis.asyncio

_SOCKET_TIMEOUT_S = 5.0  # of one connect, send or receive

_ANNOUNCE = """
local time = redis.call('TIME')
local now, lease = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[3])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. now)) do
  redis.call('ZREM', KEYS[2], gone)
  redis.call('HDEL', KEYS[1], gone)
end
local is_change = redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + lease, ARGV[1])
redis.call('SET', KEYS[3], ARGV[4], 'NX')
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < lease then redis.call('PEXPIRE', key, lease) end
end
if is_change then redis.call('PUBLISH', ARGV[5], '') end
"""

_WITHDRAW = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('PUBLISH', ARGV[3], '')
end
"""

_READ = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local addresses = redis.call('ZRANGEBYSCORE', KEYS[2], now, '+inf')
local found = {redis.call('GET', KEYS[3]) or ''}
for _, address in ipairs(addresses) do
  local record = redis.call('HGET', KEYS[1], address)
  if record then
    found[#found + 1] = address
    found[#found + 1] = record
  end
end
return found
"""


class Reading(NamedTuple):
    """The contents of the registry."""

    epoch: bytes  # unchanged as long as no data was lost
    records: dict[bytes, bytes]  # by address, as they were stored


class Changes:
    """A subscription to changes."""

    def __init__(self, registry: RedisRegistry, subscription: redis.asyncio.client.PubSub) -> None:
        self._registry = registry
        self._subscription = subscription

    async def wait(self, timeout_s: float) -> None:
        """Returns on a change, or after `timeout_s` seconds. Raises UnavailableError."""
        with self._registry.errors():
            await self._subscription.get_message(ignore_subscribe_messages=True, timeout=timeout_s)


class RedisRegistry:
    """One client. Its calls raise UnavailableError if the server does not answer, or sent an invalid reply."""

    def __init__(self, url: str, namespace: str) -> None:
        """Raises ConfigError, which does not quote the URL, as it may have a password."""
        self._client = _client_of(url)
        self.name = f"Redis at {urlsplit(url).hostname}"
        prefix = f"baton:{{pods:{namespace}}}:"
        self._keys = [f"{prefix}{name}" for name in ("records", "leases", "epoch")]
        self._channel = f"{prefix}changes"

    async def announce(self, record: PodRecord) -> None:
        """Stores the record, or renews its lease."""
        lease_ms = max(1, round(record.lease_s * 1000))
        arguments = (record.address, record.encode(), lease_ms, secrets.token_hex(8), self._channel)
        await self._run(_ANNOUNCE, *arguments)

    async def withdraw(self, record: PodRecord) -> None:
        """Removes the record, unless another incarnation has replaced it."""
        await self._run(_WITHDRAW, record.address, record.encode(), self._channel)

    async def read(self) -> Reading:
        """Returns all records with a valid lease."""
        answer = await self._run(_READ)
        if not (isinstance(answer, list) and answer and all(isinstance(each, bytes) for each in answer)):
            raise UnavailableError(f"{self.name} sent an invalid reply")
        epoch, *rest = answer
        return Reading(epoch, dict(zip(rest[::2], rest[1::2], strict=True)))

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[Changes]:
        """Subscribes to changes."""
        async with self._client.pubsub() as subscription:
            with self.errors():
                await subscription.subscribe(self._channel)
            yield Changes(self, subscription)

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._client.aclose()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of the server into UnavailableError."""
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UnavailableError(f"{self.name}: {reason}") from error

    async def _run(self, script: str, *arguments: str | bytes | int) -> Any:
        with self.errors():
            return await self._client.eval(script, len(self._keys), *self._keys, *arguments)


def _client_of(url: str) -> redis.asyncio.Redis:
    try:
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise ConfigError("--registry: needs Redis: pip install 'baton-llm[redis]'", param="registry") from error
    try:
        if urlsplit(url).scheme not in ("redis", "rediss") or not urlsplit(url).hostname:
            raise ValueError("not a Redis URL")
        return redis.asyncio.Redis.from_url(
            url,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # the callers try again
            protocol=2,
        )
    except (ValueError, TypeError):  # whose text may have the password
        message = "--registry: expected redis://[user:password@]host[:port][/db]"
        raise ConfigError(message, param="registry") from None
