"""What is sent to a Redis server, what is read of its replies, and how long it is waited for."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import redis

from kv_store import redis_exchange
from kv_store.redis_exchange import Activity, Exchange, FrameReader

SILENCE_S = 0.04
TICK_S = SILENCE_S / 4


class Clock:
    """Goes on by a tick each time it is read, and then does what a test has planned for the first 30 ticks."""

    def __init__(self, at_each_tick: Callable[[float], object] = lambda _: None) -> None:
        self.now = 0.0
        self.num_ticks = 0
        self._at_each_tick = at_each_tick

    def __call__(self) -> float:
        self.now += TICK_S
        self.num_ticks += 1
        if self.num_ticks <= NUM_PLANNED:
            self._at_each_tick(self.now)
        return self.now


NUM_PLANNED = 30
SOON = 10  # ticks


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


def exchange_over(
    ours: socket.socket, clock: Clock, activity: Activity | None = None, timeout_s: float = 100
) -> Exchange:
    pool = SimpleNamespace(get_connection=lambda: SimpleNamespace(_sock=ours))
    return Exchange(pool, activity or Activity(), silence_s=SILENCE_S, timeout_s=timeout_s, clock=clock)


def test_a_server_that_is_silent_is_not_waited_for(pair):
    clock = Clock()
    exchange = exchange_over(pair[0], clock)
    exchange.send([(b"GETEX", b"key")])
    with pytest.raises(redis.TimeoutError, match="does not answer"):
        exchange.recv(1)
    assert clock.num_ticks < 2 * SOON


def test_it_is_waited_for_while_it_is_heard_on_another_connection(pair):
    activity = Activity()
    clock = Clock(lambda now: setattr(activity, "heard_at", now))
    exchange = exchange_over(pair[0], clock, activity)
    with pytest.raises(redis.TimeoutError, match="does not answer"):
        exchange.recv(1)
    assert NUM_PLANNED < clock.num_ticks < NUM_PLANNED + SOON


def test_a_connection_that_is_lost_is_not_waited_for_however_busy_others_are(pair):
    activity = Activity(heard_at=math.inf)
    exchange = exchange_over(pair[0], clock := Clock(), activity)
    with pytest.raises(redis.TimeoutError, match="does not answer"):
        exchange.recv(1)
    assert clock.num_ticks < 10 * SOON


def test_what_it_says_is_known_to_other_connections(pair):
    activity = Activity()
    exchange = exchange_over(pair[0], clock := Clock(), activity)
    exchange.send([(b"GETEX", b"key")])
    assert activity.heard_at == 0
    pair[1].send(b"$")
    assert exchange.recv(1) == b"$"
    assert activity.heard_at == clock.now


def test_it_is_waited_for_while_it_takes_what_was_sent(pair, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(redis_exchange, "_count_unacknowledged", lambda _: max(0, NUM_PLANNED - clock.num_ticks))
    exchange = exchange_over(pair[0], clock)
    with pytest.raises(redis.TimeoutError, match="does not answer"):
        exchange.recv(1)
    assert NUM_PLANNED < clock.num_ticks < NUM_PLANNED + SOON


def test_one_that_goes_on_for_too_long_is_given_up(pair):
    clock = Clock(lambda _: pair[1].send(b"$"))
    exchange = exchange_over(pair[0], clock, timeout_s=NUM_PLANNED / 2 * TICK_S)
    with pytest.raises(redis.TimeoutError, match="too slow"):
        FrameReader(exchange).read_into(memoryview(b""))
    assert clock.num_ticks <= NUM_PLANNED


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


def frame_reader(received: bytes, step: int) -> FrameReader:
    return FrameReader(DrippingSocket(received, step))


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
