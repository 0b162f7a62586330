from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import redis

from common.errors import ConfigError, StoreError, StoreUnavailableError
from common.types import BlockHash
from kv_store.guard import Backoff
from kv_store.redis_store import (
    RedisOptions,
    RedisStore,
    _create_client,
    _Server,
    check_servers,
    parse_nodes,
)
from tests.redis_server import RedisServer, running_redis
from tests.tls_front import Authority, create_authority, tls_front

FRAME_BYTES = 100_000
DEADLINE_S = 60.0
HANGS = 2.0  # lookup_timeout_s of stores whose servers stop: in half of it a hung one is noticed
SOON = Backoff(base_s=0.01, max_s=0.01)
NEVER = Backoff(base_s=3600.0, max_s=3600.0)
PASSWORD = "s3cret-@:/word"  # what a URL must escape
QUOTED_PASSWORD = "s3cret-%40%3A%2Fword"


def key(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def frame(index: int) -> memoryview:
    return memoryview(bytes([index % 256]) * FRAME_BYTES)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def open_store() -> Iterator:
    stores = []

    def make(url: str, namespace: str = "model", *, backoff: Backoff = SOON, **options: float | str) -> RedisStore:
        patient = {"lookup_timeout_s": 2 * DEADLINE_S}  # a server that waits for a core does not hang
        stores.append(RedisStore(RedisOptions(url=url, **(patient | options)), backoff=backoff))
        stores[-1].open(namespace, FRAME_BYTES)
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def read(store: RedisStore, index: int) -> bytes:
    buffer = bytearray(FRAME_BYTES)
    assert store.read_into([key(index)], [memoryview(buffer)]) == [FRAME_BYTES]
    return bytes(buffer)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of the states of servers."""
    return [record.getMessage() for record in caplog.records if record.name == "kv_store.guard"]


def is_usable(store: RedisStore) -> bool:
    """No breaker of its servers is open."""
    return all(server.is_usable(is_write=True) for server in store._servers)


class Sent:
    """The names of the commands that were sent, one for each batch: of operations, and of background probes."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.probes: list[str] = []
        self.probe_bytes: list[int] = []  # that probes would write

    def note(self, commands: Sequence[tuple[bytes | memoryview, ...]]) -> None:
        name, key = commands[0][:2]
        (self.probes if key == b"baton:probe" else self.operations).append(bytes(name).decode())
        if key == b"baton:probe" and name == b"SET":
            self.probe_bytes.append(len(commands[0][2]))

    def clear(self) -> None:
        self.operations.clear()
        self.probes.clear()


@pytest.fixture
def sent(monkeypatch) -> Sent:
    sent = Sent()
    send = _Server.send
    monkeypatch.setattr(
        _Server, "send", lambda server, commands, *how: sent.note(commands) or send(server, commands, *how)
    )
    return sent


def is_refused(store: RedisStore) -> bool:
    """Whether a write fails without being sent, or with what opens the breaker."""
    try:
        store.write([key(99)], [frame(99)])
    except StoreUnavailableError:
        return True
    return False


def fill(store: RedisStore) -> None:
    for index in range(40):
        store.write([key(index)], [frame(index)])


def test_a_block_is_a_string_that_expires_unless_it_is_used(server, open_store):
    store = open_store(server.url, ttl_s=1000)
    store.write([key(0xAB)], [frame(1)])
    name = f"baton:model:{0xAB:032x}"
    with redis.Redis.from_url(server.url) as client:
        assert client.keys() == [name.encode()]
        assert client.get(name) == frame(1)
        assert 900 < client.ttl(name) <= 1000
        client.expire(name, 10)
        assert store.touch([key(0xAB)]) == [True]
        assert client.ttl(name) > 900
        client.expire(name, 10)
        assert read(store, 0xAB) == frame(1)
        assert client.ttl(name) > 900


def test_what_does_not_fit_is_left_out_and_the_size_told(server, open_store):
    store = open_store(server.url)
    store.write([key(1)], [frame(1)])
    small, large = bytearray(10), bytearray(FRAME_BYTES + 10)
    assert store.read_into([key(1)], [memoryview(small)]) == [FRAME_BYTES]
    assert store.read_into([key(1)], [memoryview(large)]) == [FRAME_BYTES]
    assert small == b"\1" * 10
    assert large == b"\1" * FRAME_BYTES + bytes(10)


def test_a_missing_block(server, open_store):
    store = open_store(server.url)
    assert store.touch([key(1)]) == [False]
    assert store.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))]) == [None]
    store.discard(key(1))


def attempts(store: RedisStore) -> list[Callable[[], object]]:
    """One of each operation that raises what fails."""
    return [
        lambda: store.touch([key(1)]),
        lambda: store.write([key(1)], [frame(1)]),
        lambda: store.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))]),
    ]


def test_a_server_that_dies_fails_transfers_until_it_is_back_empty(server, open_store, caplog):
    store = open_store(server.url)
    store.write([key(1)], [frame(1)])
    server.kill()
    for attempt in attempts(store):
        with pytest.raises(StoreUnavailableError, match=server.address) as caught:
            attempt()
        assert "\n" not in caught.value.message
    store.discard(key(1))
    assert server.address in caplog.text
    server.start()
    wait_until(lambda: is_usable(store))
    assert store.touch([key(1)]) == [False]
    store.write([key(1)], [frame(1)])
    assert read(store, 1) == frame(1)


@pytest.mark.parametrize("first", range(3), ids=["touch", "write", "read"])
def test_of_a_hung_server_one_operation_takes_the_time_out(server, open_store, sent, caplog, first):
    store = open_store(server.url, backoff=NEVER, lookup_timeout_s=HANGS)
    store.write([key(1)], [frame(1)])
    sent.clear()
    with server.hung():
        for _ in range(5):
            for attempt in attempts(store)[first:] + attempts(store)[:first]:
                with pytest.raises(StoreUnavailableError, match=f"{server.address}/0 is unavailable: "):
                    attempt()
        store.discard(key(1))
    assert len(sent.operations) == 1
    (line,) = logged(caplog)
    assert f"Redis at {server.address}/0 is unavailable, requests proceed without it: " in line


def test_idle_connections_to_a_server_that_failed_are_closed(server, open_store):
    """They may be as broken as the one that failed, and each would cost an operation its time-out."""
    store = open_store(server.url, backoff=NEVER, lookup_timeout_s=HANGS)
    (only,) = store._servers
    with only.send([], 1.0), only.send([], 1.0):
        pass
    pool = only._client.connection_pool
    assert [connection._sock is None for connection in pool._available_connections] == [False, False]
    with server.hung(), pytest.raises(StoreUnavailableError):
        store.touch([key(1)])
    assert [connection._sock is None for connection in pool._available_connections] == [True, True]


def test_a_probe_writes_as_much_as_a_block(open_store, sent):
    """A server that is almost full has room for less."""
    with running_redis(maxmemory="1", maxmemory_policy="noeviction") as server:
        open_store(server.url)
        wait_until(lambda: sent.probes.count("SET") >= 2)
    assert set(sent.probe_bytes) == {FRAME_BYTES}


def test_a_hung_server_is_probed_and_used_again_when_it_goes_on(server, open_store, sent):
    store = open_store(server.url, lookup_timeout_s=HANGS)
    store.write([key(1)], [frame(1)])
    sent.clear()
    with server.hung():
        with pytest.raises(StoreUnavailableError):
            store.touch([key(1)])
        wait_until(lambda: len(sent.probes) >= 2)
        with pytest.raises(StoreUnavailableError):
            store.write([key(2)], [frame(2)])
        assert sent.operations == ["EXPIRE"]
    wait_until(lambda: is_usable(store))
    assert read(store, 1) == frame(1)
    store.write([key(2)], [frame(2)])
    assert read(store, 2) == frame(2)


def test_threads_at_work_when_a_server_hangs_fail_once_each(server, open_store, sent):
    """Each thread takes the time-out of one operation at most, all at the same time."""
    store = open_store(server.url, backoff=NEVER, lookup_timeout_s=HANGS)
    stop = threading.Event()
    num_refused = 0

    def work() -> None:
        nonlocal num_refused
        while not stop.is_set():
            try:
                store.touch([key(1)])
            except StoreUnavailableError:
                num_refused += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(sent.operations) > 20)
    with server.hung():
        num_sent = len(sent.operations)
        wait_until(lambda: num_refused > 1000)
        assert len(sent.operations) <= num_sent + len(threads)
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)


def test_a_restart_between_two_transfers_is_not_noticed(server, open_store):
    store = open_store(server.url)
    store.write([key(1)], [frame(1)])
    server.kill()
    server.start()
    store.write([key(2)], [frame(2)])
    assert read(store, 2) == frame(2)


def test_a_full_server_that_evicts_nothing_is_read_and_not_written(open_store, sent, caplog):
    with running_redis(maxmemory="3mb", maxmemory_policy="noeviction") as server:
        store = open_store(server.url)
        with pytest.raises(StoreUnavailableError, match=r"rejects writes: .*maxmemory"):
            fill(store)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "2mb")  # else a closed connection may make room for a block
        sent.clear()
        wait_until(lambda: is_refused(store) and sent.probes.count("SET") >= 2)
        sent.operations.clear()
        for _ in range(5):
            with pytest.raises(StoreUnavailableError, match="maxmemory"):
                store.write([key(99)], [frame(99)])
            assert read(store, 0) == frame(0)
            assert store.touch([key(0), key(99)]) == [True, False]
        assert "SET" not in sent.operations, "no frame is sent to be refused"
        store.discard(key(0))
        assert store.touch([key(0)]) == [False]
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
            wait_until(lambda: is_usable(store))
            assert client.keys() == [], "a probe leaves nothing behind"
        store.write([key(99)], [frame(99)])
        assert read(store, 99) == frame(99)
        begin, *_, end = logged(caplog)
        assert f"{server.address}/0 rejects writes, its blocks can still be read" in begin
        assert f"{server.address}/0 accepts writes again" in end


def test_a_read_only_replica_is_not_used(server, open_store):
    """Reads extend the time to live, so it refuses these as well."""
    store = open_store(server.url)
    store.write([key(1)], [frame(1)])
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        for attempt in attempts(store):
            with pytest.raises(StoreUnavailableError, match="read only replica"):
                attempt()
        client.execute_command("REPLICAOF", "NO", "ONE")
    wait_until(lambda: is_usable(store))
    assert read(store, 1) == frame(1)


@pytest.mark.parametrize(
    ("error", "reads", "writes"),
    [
        (redis.TimeoutError("Timeout reading from socket"), False, False),
        (redis.ConnectionError("reset"), False, False),
        (ConnectionResetError("reset"), False, False),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), False, False),
        (redis.ReadOnlyError("You can't write against a read only replica."), True, False),
        (redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True, False),
        (redis.ResponseError("MISCONF Redis is configured to save RDB snapshots, but"), True, False),
        (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), True, False),
        (redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), True, True),
    ],
)
def test_what_a_failed_write_says_of_its_server(server, open_store, monkeypatch, error, reads, writes):
    store = open_store(server.url, backoff=NEVER)
    store.write([key(1)], [frame(1)])
    with monkeypatch.context() as patch:
        patch.setattr(_Server, "send", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(StoreError, match="Redis at"):
            store.write([key(2)], [frame(2)])
    if reads:
        assert read(store, 1) == frame(1)
    else:
        with pytest.raises(StoreUnavailableError):
            read(store, 1)
    with contextlib.nullcontext() if writes else pytest.raises(StoreUnavailableError):
        store.write([key(2)], [frame(2)])


def test_a_full_server_that_evicts_goes_on(open_store):
    with running_redis(maxmemory="3mb", maxmemory_policy="allkeys-lru") as server:
        store = open_store(server.url)
        fill(store)
        assert read(store, 39) == frame(39)
        assert not all(store.touch([key(index) for index in range(40)]))


def test_password(open_store, caplog):
    caplog.set_level(logging.DEBUG)
    with running_redis(requirepass=PASSWORD) as server:
        url = f"redis://:{QUOTED_PASSWORD}@{server.address}"
        store = open_store(url)
        store.write([key(1)], [frame(1)])
        assert read(store, 1) == frame(1)
        server.kill()
        with pytest.raises(StoreError) as caught:
            store.touch([key(1)])
        store.discard(key(1))
    for text in (caught.value.message, repr(store._servers[0]._client), repr(parse_nodes(url)), caplog.text):
        assert PASSWORD not in text
        assert QUOTED_PASSWORD not in text


@pytest.mark.parametrize("login", ["", ":wrong-s3cret@", "somebody:wrong-s3cret@"])
def test_a_refused_login_is_named_and_the_password_is_not(open_store, login):
    with running_redis(requirepass=PASSWORD) as server:
        check_refused(open_store, f"redis://{login}{server.address}/0", says=server.address)


@pytest.mark.parametrize("state", ["dead", "hung"])
def test_a_store_opens_while_its_server_is_down_and_uses_it_later(server, open_store, caplog, state):
    server.kill() if state == "dead" else None
    with server.hung() if state == "hung" else contextlib.nullcontext():
        store = open_store(server.url, lookup_timeout_s=HANGS)
        for attempt in attempts(store):
            with pytest.raises(StoreUnavailableError, match=server.address):
                attempt()
        (line,) = (
            record.getMessage() for record in caplog.records if "is unavailable, requests" in record.getMessage()
        )
        assert server.address in line
    if state == "dead":
        server.start()
    wait_until(lambda: is_usable(store))
    store.write([key(1)], [frame(1)])
    assert read(store, 1) == frame(1)


def test_a_store_opens_while_its_server_is_full(open_store):
    with running_redis(maxmemory="1", maxmemory_policy="noeviction") as server:
        store = open_store(server.url, backoff=NEVER)
        assert store.touch([key(1)]) == [False]
        with pytest.raises(StoreUnavailableError, match="rejects writes"):
            store.write([key(1)], [frame(1)])


def test_rights_that_the_pods_lack_are_named(open_store):
    with running_redis() as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "baton", "on", ">s3cret", "~baton:*", "+expire", "+getex")
        check_refused(open_store, f"redis://baton:s3cret@{server.address}", says="set")
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "baton", "+set", "+unlink")
        store = open_store(f"redis://baton:s3cret@{server.address}")
        store.write([key(1)], [frame(1)])
        assert read(store, 1) == frame(1)
        store.discard(key(1))
        assert store.touch([key(1)]) == [False]


def test_a_database_that_the_server_does_not_have(server, open_store):
    check_refused(open_store, f"redis://{server.address}/99", says="99")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "http://localhost",
        "redis://",
        "redis://:s3cret@",
        "redis://u:s3cret@host:port",
        "redis://u:s3cret@host:70000",
        "redis://u:s3cret@[host",
        "redis://u:s3cret@host/db",
        "redis://host/-1",
        "redis://host?socket_timeout=0",
        "redis://u:s3cret@host,",
        "redis://u:s3cret@host,redis://HOST:6379/0",
    ],
)
def test_a_bad_url(open_store, url):
    check_refused(open_store, url)


def check_refused(open_store, url: str, says: str = "", param: str = "url", **options: float | str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, **options)
    assert caught.value.param == param
    assert param in caught.value.message
    assert says in caught.value.message
    assert "s3cret" not in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("url", ["redis://localhost", "rediss://localhost"])
@pytest.mark.parametrize("ca_file", ["/does/not/exist", __file__])
def test_a_bad_tls_ca_file(open_store, url, ca_file):
    check_refused(open_store, url, param="tls_ca_file", tls_ca_file=ca_file)


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return create_authority(tmp_path_factory.mktemp("authority") / "ours")


def test_tls(server, open_store, authority):
    with tls_front(authority, server.port) as port:
        store = open_store(f"rediss://localhost:{port}", tls_ca_file=str(authority.ca_file))
        store.write([key(1), key(2)], [frame(1), frame(2)])
        assert read(store, 1) == frame(1)
        assert store.touch([key(2), key(3)]) == [True, False]
        assert open_store(server.url).touch([key(2), key(3)]) == [True, False]


def test_a_server_that_cannot_prove_who_it_is_is_refused(server, open_store, authority, tmp_path):
    others = create_authority(tmp_path / "others")
    with tls_front(authority, server.port) as port:
        for host, ca_file in [("localhost", ""), ("localhost", others.ca_file), ("127.0.0.1", authority.ca_file)]:
            check_refused(open_store, f"rediss://{host}:{port}", says="certificate", tls_ca_file=str(ca_file))


def test_replies_that_nobody_waited_for_reach_nobody_else(server, open_store):
    store = open_store(server.url)
    store.write([key(1), key(2)], [frame(1), frame(2)])
    with redis.Redis.from_url(server.url) as client:
        client.delete(f"baton:model:{1:032x}")
        client.lpush(f"baton:model:{1:032x}", b"no string")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        store.read_into([key(1), key(2)], [memoryview(bytearray(FRAME_BYTES)), memoryview(bytearray(FRAME_BYTES))])
    assert read(store, 2) == frame(2)


@pytest.fixture
def servers() -> Iterator[list[RedisServer]]:
    with running_redis() as one, running_redis() as two, running_redis() as three:
        yield [one, two, three]


def test_several_servers_share_the_blocks_and_all_pods_agree_where(servers, open_store):
    urls = [server.url for server in servers]
    store, other = open_store(",".join(urls)), open_store(", ".join(reversed(urls)))
    keys = [BlockHash(hashlib.sha256(bytes([index])).digest()[:16]) for index in range(90)]
    store.write(keys, [frame(index) for index in range(90)])
    for url in urls:
        with redis.Redis.from_url(url) as client:
            assert 15 <= client.dbsize() <= 45
    assert other.touch(keys) == [True] * 90
    buffers = [memoryview(bytearray(FRAME_BYTES)) for _ in keys]
    assert other.read_into(keys, buffers) == [FRAME_BYTES] * 90
    assert buffers == [frame(index) for index in range(90)]

    fewer = open_store(",".join(urls[:2]))
    with redis.Redis.from_url(urls[2]) as client:
        gone = client.dbsize()
    assert fewer.touch(keys).count(False) == gone  # those of the third, and no others, would move


@pytest.fixture
def two_servers() -> Iterator[list[RedisServer]]:
    with running_redis() as one, running_redis() as two:
        yield [one, two]


@pytest.fixture
def open_pair(two_servers, open_store) -> Callable[..., RedisStore]:
    """Opens stores on both."""
    return lambda **how: open_store(",".join(server.url for server in two_servers), **how)


@pytest.fixture
def pair(open_pair) -> RedisStore:
    return open_pair()


MANY = [BlockHash(hashlib.sha256(bytes([index])).digest()[:16]) for index in range(40)]


def write_many(store: RedisStore) -> None:
    store.write(MANY, [frame(index) for index in range(len(MANY))])


def read_many(store: RedisStore) -> list[int | None]:
    """First bytes of the blocks."""
    buffers = [memoryview(bytearray(FRAME_BYTES)) for _ in MANY]
    sizes = store.read_into(MANY, buffers)
    assert set(sizes) <= {FRAME_BYTES, None}
    return [None if size is None else buffer[0] for size, buffer in zip(sizes, buffers, strict=True)]


def num_blocks_on(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as client:
        return int(client.dbsize())


@pytest.mark.parametrize("first", ["write", "touch", "read", "discard"])
def test_a_server_that_dies_costs_its_blocks_and_no_more(two_servers, pair, first):
    write_many(pair)
    lost, kept = map(num_blocks_on, two_servers)
    two_servers[0].kill()
    if first == "touch":
        assert pair.touch(MANY).count(False) == lost
    elif first == "read":
        assert read_many(pair).count(None) == lost
    elif first == "discard":
        for key in MANY:
            pair.discard(key)
        assert num_blocks_on(two_servers[1]) == 0
    write_many(pair)
    assert pair.touch(MANY) == [True] * len(MANY)
    assert read_many(pair) == list(range(len(MANY)))
    assert num_blocks_on(two_servers[1]) == lost + kept


def test_a_server_that_hangs_costs_its_blocks_and_no_more(two_servers, open_pair, sent, caplog):
    pair = open_pair(lookup_timeout_s=2 * HANGS)
    write_many(pair)
    lost, kept = map(num_blocks_on, two_servers)
    sent.clear()
    with two_servers[0].hung():
        assert read_many(pair).count(None) == lost
        assert sent.operations == ["GETEX"] * 3, "both, and the second for the blocks of the first"
        write_many(pair)
        assert read_many(pair) == list(range(len(MANY)))
        assert sent.operations[3:] == ["SET", "GETEX"], "only the second"
        assert num_blocks_on(two_servers[1]) == lost + kept
    wait_until(lambda: is_usable(pair))
    write_many(pair)
    assert num_blocks_on(two_servers[0]) == lost
    gone, back = logged(caplog)
    assert f"{two_servers[0].address}/0 is unavailable" in gone
    assert f"{two_servers[0].address}/0 is available again" in back


def test_a_server_that_is_back_gets_its_blocks_back(two_servers, pair):
    two_servers[0].kill()
    for _ in range(3):
        write_many(pair)
    two_servers[0].start()
    wait_until(lambda: is_usable(pair))
    write_many(pair)
    assert 5 < num_blocks_on(two_servers[0]) < 35
    assert read_many(pair) == list(range(len(MANY)))


def test_without_any_server_it_fails_until_one_is_back(two_servers, pair):
    for server in two_servers:
        server.kill()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="is unavailable"):
            write_many(pair)
    pair.discard(key(1))
    for server in two_servers:
        server.start()
    wait_until(lambda: is_usable(pair))
    write_many(pair)
    assert read_many(pair) == list(range(len(MANY)))


def test_the_other_server_takes_the_blocks_of_a_full_one(two_servers, open_pair):
    """What the full one holds is still read there, and pods that have not written to it find what others moved."""
    writer, reader = open_pair(), open_pair()
    old, new = MANY[:20], MANY[20:]
    writer.write(old, [frame(index) for index in range(20)])
    held = num_blocks_on(two_servers[0])
    with redis.Redis.from_url(two_servers[0].url) as client:
        client.config_set("maxmemory", 1)
        writer.write(new, [frame(index) for index in range(20, 40)])
        assert num_blocks_on(two_servers[0]) == held
        assert num_blocks_on(two_servers[1]) == len(MANY) - held
        assert writer.touch(MANY) == [True] * len(MANY)
        assert read_many(writer) == list(range(len(MANY)))
        assert read_many(reader) == list(range(len(MANY)))
        for each in MANY:
            reader.discard(each)
        assert num_blocks_on(two_servers[0]) == num_blocks_on(two_servers[1]) == 0
        client.config_set("maxmemory", 0)
    wait_until(lambda: is_usable(writer))
    write_many(writer)
    assert num_blocks_on(two_servers[0]) > 5


def test_of_a_server_that_fills_up_within_a_batch_only_the_rest_moves(two_servers, pair):
    with redis.Redis.from_url(two_servers[0].url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 4 * FRAME_BYTES)
    write_many(pair)
    assert 0 < num_blocks_on(two_servers[0]) < 8
    assert num_blocks_on(two_servers[0]) + num_blocks_on(two_servers[1]) == len(MANY)
    assert read_many(pair) == list(range(len(MANY)))


def test_a_lookup_of_what_is_on_no_server_asks_each_once(pair, sent):
    sent.clear()
    assert pair.touch(MANY) == [False] * len(MANY)
    assert sent.operations == ["EXPIRE", "EXPIRE"]


def test_a_pod_starts_with_one_of_its_servers_down(two_servers, open_pair, caplog):
    two_servers[0].kill()
    pair = open_pair()
    write_many(pair)
    assert read_many(pair) == list(range(len(MANY)))
    (line,) = logged(caplog)
    assert two_servers[0].address in line


def test_a_call_that_has_taken_its_time_asks_no_other_server(two_servers, pair, monkeypatch):
    two_servers[0].kill()
    monkeypatch.setattr(pair, "_clock", lambda: 0.0 if pair._servers[0].is_usable(is_write=True) else 60.0)
    with pytest.raises(StoreError, match=two_servers[0].address):
        write_many(pair)


def test_closed_it_fails_transfers(server, open_store, caplog):
    store = open_store(server.url)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.touch([key(1)])
    with pytest.raises(StoreError, match="closed"):
        store.write([key(1)], [frame(1)])
    store.discard(key(1))
    assert "closed" in caplog.text


@pytest.mark.parametrize(
    ("timeout_s", "lookup_timeout_s", "expected"),
    [(30.0, 1.0, 0.5), (30.0, 0.1, 0.5), (30.0, 8.0, 4.0), (0.2, 1.0, 0.2)],
)
def test_neither_a_connect_nor_a_call_waits_for_ever(timeout_s, lookup_timeout_s, expected):
    options = RedisOptions(timeout_s=timeout_s, lookup_timeout_s=lookup_timeout_s)
    settings = _create_client(parse_nodes("redis://127.0.0.1")[0], options).connection_pool.connection_kwargs
    assert settings["socket_timeout"] == settings["socket_connect_timeout"] == expected


def test_of_several_hung_servers_each_is_waited_for_half_as_long(servers, open_store, monkeypatch):
    store = open_store(",".join(server.url for server in servers), backoff=NEVER, lookup_timeout_s=1.0)
    waits = []
    send = _Server.send
    monkeypatch.setattr(
        _Server,
        "send",
        lambda server, commands, silence_s: waits.append(silence_s) or send(server, commands, silence_s),
    )
    with contextlib.ExitStack() as hung:
        for server in servers:
            hung.enter_context(server.hung())
        with pytest.raises(StoreUnavailableError):
            store.touch(MANY)
    assert waits == [0.5, 0.25, 0.125]


@contextlib.contextmanager
def slow_link(port: int, pause_s: float) -> Iterator[int]:
    """A port that leads to `port` of this machine, 16 KiB after each pause."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 14):
                time.sleep(pause_s)
                target.sendall(piece)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                sockets.extend([near, far])
                for ends in ((near, far), (far, near)):
                    start(pump, *ends)

    def start(target: Callable[..., None], *arguments: socket.socket) -> None:
        threads.append(threading.Thread(target=target, args=arguments))
        threads[-1].start()

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = [listener]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # of what it accepts
        start(accept)
        try:
            yield listener.getsockname()[1]
        finally:
            for each in sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(DEADLINE_S)
            for each in sockets:
                each.close()


def test_a_block_passes_a_slow_link_in_more_time_than_a_server_may_be_silent(server, open_store):
    written = memoryview(bytes([1]) * 8 * FRAME_BYTES)
    loaded = memoryview(bytearray(len(written)))
    with slow_link(server.port, pause_s=0.03) as port:
        store = open_store(f"redis://127.0.0.1:{port}", backoff=NEVER, lookup_timeout_s=2.0)
        began = time.monotonic()
        store.write([key(1)], [written])
        assert time.monotonic() - began > 1.0
        assert store.read_into([key(1)], [loaded]) == [len(written)]
    assert loaded == written


def test_each_server_is_checked_and_the_one_that_fails_named_with_the_reason(server):
    check_servers(RedisOptions(url=server.url))
    with pytest.raises(ConfigError, match=r"cannot use Redis at 127\.0\.0\.1:1/0: .*[Cc]onnection refused") as caught:
        check_servers(RedisOptions(url=f"{server.url},redis://127.0.0.1:1"))
    assert caught.value.param == "url"
