"""TLS between the machines of an engine: both ends present a certificate that the cluster's authority has signed."""

from __future__ import annotations

import socket
import ssl
import threading

from common.engine.config import NodeTlsConfig
from common.errors import ConfigError

_READ_BYTES = 2**16
_WRITE_BYTES = 2**18


class TlsStream:
    """The part of a socket that Channel uses. One thread may send while another receives, which `ssl.SSLSocket` does
    not allow: encryption is done in memory, under a lock."""

    def __init__(self, own: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """Takes `own`, whose timeout bounds each wait of the handshake. `server_name`: this end is the client's. Raises
        OSError if the other end is not what it must be."""
        self._socket = own
        self._lock = threading.Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                own.sendall(self._outgoing.read())
                self._feed(own.recv(_READ_BYTES))
            except ssl.SSLError:
                own.sendall(self._outgoing.read())  # the reason, for the other end
                raise
            else:
                break
        own.sendall(self._outgoing.read())
        own.settimeout(None)

    @property
    def has_buffered(self) -> bool:
        """Whether something has been received that was not read."""
        with self._lock:
            return self._tls.pending() > 0 or self._incoming.pending > 0

    def sendall(self, data: bytes) -> None:
        """See socket.socket. Not called by two threads at once."""
        rest = memoryview(data)
        while rest:
            with self._lock:
                rest = rest[self._tls.write(rest[:_WRITE_BYTES]) :]
                encrypted = self._outgoing.read()
            self._socket.sendall(encrypted)

    def recv_into(self, buffer: memoryview) -> int:
        """See socket.socket. Raises ConnectionError if the other end does not speak TLS."""
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(buffer), buffer)  # type: ignore[return-value]  # a number, with a buffer
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
                except ssl.SSLError as error:
                    raise ConnectionError(str(error)) from error
            received = self._socket.recv(_READ_BYTES)
            with self._lock:
                self._feed(received)

    def fileno(self) -> int:
        """See socket.socket."""
        return self._socket.fileno()

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """See socket.socket."""
        self._socket.setsockopt(level, option, value)

    def getsockname(self) -> tuple[str, int]:
        """See socket.socket."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    def shutdown(self, how: int) -> None:
        """See socket.socket."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """See socket.socket."""
        self._socket.close()

    def _feed(self, received: bytes) -> None:
        if received:
            self._incoming.write(received)
        else:
            self._incoming.write_eof()


def server_context(config: NodeTlsConfig) -> ssl.SSLContext:
    """Returns the context of machine 0. Raises ConfigError."""
    context = _context(config, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # which the other end would take for a message that comes
    return context


def client_context(config: NodeTlsConfig) -> ssl.SSLContext:
    """Returns the context of the other machines. Raises ConfigError."""
    return _context(config, ssl.PROTOCOL_TLS_CLIENT)


def _context(config: NodeTlsConfig, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.certificate, config.key, password=b"")  # without it OpenSSL prompts for one
        context.load_verify_locations(config.authority)
    except OSError as error:
        files = f"{config.authority}, {config.certificate} and {config.key}"
        raise ConfigError(f"--cluster-cert: {files} cannot be used: {error}", param="cluster_cert") from error
    return context
