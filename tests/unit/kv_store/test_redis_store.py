from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import redis

from common.errors import ConfigError, StoreError
from common.types import BlockHash
from kv_store.redis_store import RedisOptions, RedisStore, _FrameReader, parse_nodes
from tests.redis_server import RedisServer, running_redis
from tests.tls_front import Authority, create_authority, tls_front

FRAME_BYTES = 100_000
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

    def make(url: str, namespace: str = "model", **options: float | str) -> RedisStore:
        stores.append(RedisStore(RedisOptions(url=url, **options)))
        stores[-1].open(namespace, FRAME_BYTES)
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def read(store: RedisStore, index: int) -> bytes:
    buffer = bytearray(FRAME_BYTES)
    assert store.read_into([key(index)], [memoryview(buffer)]) == [FRAME_BYTES]
    return bytes(buffer)


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


def test_a_server_that_dies_fails_transfers_until_it_is_back_empty(server, open_store, caplog):
    store = open_store(server.url)
    store.write([key(1)], [frame(1)])
    server.kill()
    for attempt in (
        lambda: store.touch([key(1)]),
        lambda: store.write([key(1)], [frame(1)]),
        lambda: store.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))]),
    ):
        with pytest.raises(StoreError, match=server.address) as caught:
            attempt()
        assert "\n" not in caught.value.message
    store.discard(key(1))
    assert server.address in caplog.text
    server.start()
    assert store.touch([key(1)]) == [False]
    store.write([key(1)], [frame(1)])
    assert read(store, 1) == frame(1)


def test_a_restart_between_two_transfers_is_not_noticed(server, open_store):
    store = open_store(server.url)
    store.write([key(1)], [frame(1)])
    server.kill()
    server.start()
    store.write([key(2)], [frame(2)])
    assert read(store, 2) == frame(2)


def test_a_full_server_that_evicts_nothing_is_a_store_error(open_store):
    with running_redis(maxmemory="3mb", maxmemory_policy="noeviction") as server:
        store = open_store(server.url)
        with pytest.raises(StoreError, match="maxmemory"):
            fill(store)
        assert read(store, 0) == frame(0)


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
    for text in (caught.value.message, repr(store._servers[0].client), repr(parse_nodes(url)), caplog.text):
        assert PASSWORD not in text
        assert QUOTED_PASSWORD not in text


@pytest.mark.parametrize("login", ["", ":wrong-s3cret@", "somebody:wrong-s3cret@"])
def test_a_refused_login_is_named_and_the_password_is_not(open_store, login):
    with running_redis(requirepass=PASSWORD) as server:
        check_refused(open_store, f"redis://{login}{server.address}/0", says=server.address)


def test_an_unreachable_server_is_named(server, open_store):
    server.kill()
    check_refused(open_store, server.url, says=server.address)


def test_a_database_that_the_server_does_not_have(server, open_store):
    check_refused(open_store, f"redis://{server.address}/99", says="99")


def test_tls_to_a_server_that_speaks_none(server, open_store):
    check_refused(open_store, f"rediss://{server.address}", says=server.address, timeout_s=0.5)


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


def test_a_hung_server_is_a_store_error(server, open_store):
    store, impatient = open_store(server.url), open_store(server.url, timeout_s=0.5)
    store.write([key(1)], [frame(1)])
    with server.hung():
        with pytest.raises(StoreError, match=server.address):
            impatient.touch([key(1)])
        with pytest.raises(StoreError, match=server.address):
            impatient.read_into([key(1)], [memoryview(bytearray(FRAME_BYTES))])
    assert store.touch([key(1)]) == [True]
    assert read(store, 1) == frame(1)


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


class Clock:
    """Stands still until the test moves it on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def two_servers() -> Iterator[list[RedisServer]]:
    with running_redis() as one, running_redis() as two:
        yield [one, two]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pair(two_servers, clock) -> Iterator[RedisStore]:
    """A store on both."""
    store = RedisStore(RedisOptions(url=",".join(server.url for server in two_servers)), clock=clock)
    store.open("model", FRAME_BYTES)
    with contextlib.closing(store):
        yield store


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


def test_a_server_that_is_back_is_used_after_the_cool_down(two_servers, pair, clock, caplog):
    caplog.set_level(logging.INFO, logger="kv_store.redis_store")
    two_servers[0].kill()
    for _ in range(3):
        write_many(pair)
        clock.now_s += 6  # each time it is tried again
    two_servers[0].start()
    clock.now_s -= 2
    write_many(pair)
    assert num_blocks_on(two_servers[0]) == 0
    clock.now_s += 2
    write_many(pair)
    assert 5 < num_blocks_on(two_servers[0]) < 35
    assert read_many(pair) == list(range(len(MANY)))
    gone, back = (record.getMessage() for record in caplog.records)
    assert f"{two_servers[0].address}/0 is put aside" in gone
    assert f"{two_servers[0].address}/0 answers again" in back


def test_one_call_tries_again_and_the_others_go_on_without(pair, clock, monkeypatch):
    server = pair._servers[0]
    server.note_failure(redis.TimeoutError("hung"))
    assert server.is_aside
    clock.now_s += 6
    seen_by_others = []
    send = server.send
    monkeypatch.setattr(server, "send", lambda commands: (seen_by_others.append(server.is_aside), send(commands))[1])
    write_many(pair)
    assert seen_by_others == [True]
    assert not server.is_aside


def test_without_any_server_it_fails_until_one_is_back(two_servers, pair):
    for server in two_servers:
        server.kill()
    for _ in range(2):
        with pytest.raises(StoreError, match="failed"):
            write_many(pair)
    pair.discard(key(1))
    for server in two_servers:
        server.start()
    write_many(pair)
    assert read_many(pair) == list(range(len(MANY)))


def test_a_server_that_refuses_is_not_put_aside(two_servers, pair):
    with redis.Redis.from_url(two_servers[0].url) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreError, match=two_servers[0].address):
            write_many(pair)
        client.config_set("maxmemory", 0)
    write_many(pair)
    assert num_blocks_on(two_servers[0]) > 5


def test_a_call_that_has_taken_its_time_asks_no_other_server(two_servers, pair, clock, monkeypatch):
    two_servers[0].kill()
    times = itertools.count(0, 60)
    monkeypatch.setattr(pair, "_clock", lambda: next(times))
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


class DrippingSocket:
    """Gives a few bytes at a time, then the end."""

    def __init__(self, received: bytes, step: int) -> None:
        self._left = received
        self._step = step

    def recv(self, size: int) -> bytes:
        taken, self._left = self._left[: min(size, self._step)], self._left[min(size, self._step) :]
        return taken

    def recv_into(self, buffer: memoryview) -> int:
        taken = self.recv(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken)


def frame_reader(received: bytes, step: int) -> _FrameReader:
    return _FrameReader(SimpleNamespace(_sock=DrippingSocket(received, step)))


@pytest.mark.parametrize("step", [1, 2, 3, 7, 32, 33, 1000])
@pytest.mark.parametrize("room", [0, 1, 40, 100])
def test_frames_are_read_however_they_arrive(step, room):
    strings = [b"", b"a", b"\r\n" * 20, bytes(range(100)), None, b"$5\r\n"]
    encoded = (b"$-1\r\n" if text is None else b"$%d\r\n%b\r\n" % (len(text), text) for text in strings)
    reader = frame_reader(b"".join(encoded), step)
    for text in strings:
        buffer = bytearray(b"x" * room)
        assert reader.read_into(memoryview(buffer)) == (None if text is None else len(text))
        assert buffer == ((text or b"")[:room]).ljust(room, b"x")


@pytest.mark.parametrize(
    ("received", "error"),
    [
        (b"-ERR no\r\n", redis.ResponseError),
        (b"-LOADING Redis is loading\r\n", redis.BusyLoadingError),
        (b"+OK\r\n", redis.InvalidResponse),
        (b"$-2\r\n", redis.InvalidResponse),
        (b"$ 1\r\n", redis.InvalidResponse),
        (b"$" + b"9" * 10000, redis.InvalidResponse),
        (b"$4\r\nabc", redis.ConnectionError),
        (b"$3\r\nabc", redis.ConnectionError),
        (b"$3", redis.ConnectionError),
        (b"", redis.ConnectionError),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_what_is_no_frame_is_an_error(received, error, step):
    reader = frame_reader(received, step)
    with pytest.raises(error):
        reader.read_into(memoryview(bytearray(10)))
