"""A channel over TLS."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.tls import TlsStream, client_context, server_context
from common.errors import ConfigError
from tests.unit.common.engine.executor.multiproc.nodes_rig import tls_of

SIZES = [1, 100, 2**14, 2**16 + 1, 2**18, 3 * 2**20 + 7] * 5
DEADLINE_S = 60.0


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel, Channel]]:
    config = tls_of(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname(), DEADLINE_S)
        accepted, _ = server.accept()
    accepted.settimeout(DEADLINE_S)
    found: list[Channel] = []
    accepting = threading.Thread(target=lambda: found.append(Channel(TlsStream(accepted, server_context(config)))))
    accepting.start()
    client = Channel(TlsStream(raw, client_context(config), "127.0.0.1"))
    accepting.join()
    yield client, found[0]
    for end in (client, found[0]):
        end.close()


def messages(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(size) for size in SIZES]


def test_both_ends_send_while_they_receive(ends: tuple[Channel, Channel]) -> None:
    received: dict[int, list[bytearray]] = {}

    def receive(number: int) -> None:
        received[number] = [ends[number].receive() for _ in SIZES]

    def send(number: int) -> None:
        for message in messages(number):
            ends[number].send(message)

    threads = [threading.Thread(target=run, args=(number,)) for run in (receive, send) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert received == {0: messages(1), 1: messages(0)}


def test_what_comes_in_one_packet_is_noticed(ends: tuple[Channel, Channel]) -> None:
    client, server = ends
    client.send(b"one")
    assert server.receive() == b"one"
    client.send(b"two")
    client.send(b"three")
    client.shut_down()
    found = [server.receive()]
    while server.has_buffered:
        found.append(server.receive())
    assert (found == [b"two", b"three"]) or server.receive() == b"three"
    with pytest.raises(EOFError):
        server.receive()


def test_nothing_comes_that_is_no_message(ends: tuple[Channel, Channel]) -> None:
    for end in ends:
        assert not end.has_buffered
        assert select.select([end], [], [], 0)[0] == []


def test_an_end_that_takes_nothing_is_an_error_in_time(ends: tuple[Channel, Channel]) -> None:
    client, _ = ends
    client.limit_sends(0.2)
    with pytest.raises(TimeoutError):
        client.send(bytes(2**26))


def test_an_end_that_says_nothing_is_an_error_in_time(ends: tuple[Channel, Channel]) -> None:
    client, _ = ends
    client.limit_receives(0.2)
    with pytest.raises(TimeoutError):
        client.receive()


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    config = tls_of(tmp_path)
    (tmp_path / "decode.pem").write_text("none")
    with pytest.raises(ConfigError, match=r"--cluster-cert: .* cannot be used"):
        server_context(config)
