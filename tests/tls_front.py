"""TLS in front of a server that speaks none: ends the encryption and passes the bytes on."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """A certificate authority of our own and a server's certificate for `localhost` that it signed."""

    ca_file: Path
    certificate_file: Path
    key_file: Path


def create_authority(directory: Path) -> Authority:
    directory.mkdir()
    ca_key, ca, key, request, certificate, extensions = (
        directory / name for name in ("ca.key", "ca.pem", "server.key", "server.csr", "server.pem", "extensions")
    )
    extensions.write_text("subjectAltName=DNS:localhost\n")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=Test authority")
    _openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=localhost")
    signing = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions]
    _openssl("x509", "-req", "-in", request, *signing, "-out", certificate)
    return Authority(ca, certificate, key)


@contextlib.contextmanager
def tls_front(authority: Authority, port: int) -> Iterator[int]:
    """A port where TLS is spoken for the server at `port` of this machine."""
    # A process, because a connection that is cut in asyncio leaves warnings behind.
    command = [sys.executable, __file__, authority.certificate_file, authority.key_file, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def _serve(certificate_file: str, key_file: str, port: str) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", int(port))
        await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    server = await asyncio.start_server(connect, "127.0.0.1", 0, ssl=context)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while received := await reader.read(1 << 16):
            writer.write(received)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
