"""Certificates of gRPC servers and clients.

Within a cluster both sides present a certificate that its authority has signed, and reject peers without one. Files
that are replaced are used from the next connection on; open connections stay open.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import grpc
import msgspec
from msgspec import Meta

from common.errors import ConfigError
from common.rpc.channel import open_blocking_channel, open_channel
from common.watched_files import WatchedFiles


class ClusterTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mutual TLS between router and pods."""

    cluster_ca: Annotated[
        str,
        Meta(description="PEM file of the authority that signs the cluster's certificates; empty: TLS is off."),
    ] = ""
    cluster_cert: Annotated[str, Meta(description="PEM file of this process's own certificate.")] = ""
    cluster_key: Annotated[str, Meta(description="PEM file of the certificate's private key.")] = ""
    cluster_tls_name: Annotated[
        str,
        Meta(
            description="Name that pods' certificates must have; empty: the host of their address. For pods whose "
            "addresses are not known in advance."
        ),
    ] = ""

    def __post_init__(self) -> None:
        files = {
            "--cluster-ca": self.cluster_ca,
            "--cluster-cert": self.cluster_cert,
            "--cluster-key": self.cluster_key,
        }
        given = [option for option, file in files.items() if file]
        missing = [option for option, file in files.items() if not file]
        if given and missing:
            raise ValueError(f"{missing[0]}: required with {given[0]}")
        if self.cluster_tls_name and not given:
            raise ValueError("--cluster-ca: required with --cluster-tls-name")


class CertificateFiles(NamedTuple):
    """The files of a certificate, and the options that name them."""

    certificate: str
    key: str
    authority: str = ""  # that must have signed peers' certificates; empty: peers need none
    certificate_option: str = "--cluster-cert"
    key_option: str = "--cluster-key"
    authority_option: str = "--cluster-ca"


class _Material(NamedTuple):
    """The contents of the files, PEM."""

    certificate: bytes
    key: bytes
    authority: bytes | None


class Identity:
    """A certificate that is reloaded when its files change. Thread-safe, as gRPC calls it from its own threads."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises ConfigError that names the setting if a file cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._material = _read(files)
        names = [name for name in (files.certificate, files.key, files.authority) if name]
        self._watched = WatchedFiles(names, self._reload)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server. Clients must present a certificate if there is an authority."""
        served = self._current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            current = self._current()
            if current is served:
                return None
            served = current
            return _server_configuration(current)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(served),
            renewed,  # type: ignore[arg-type]  # may return None, unlike in the type stubs
            require_client_authentication=served.authority is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client that presents its own certificate."""
        current = self._current()
        return grpc.ssl_channel_credentials(current.authority, current.key, current.certificate)

    def _current(self) -> _Material:
        with self._lock:
            self._watched.check()
            return self._material

    def _reload(self) -> None:
        self._material = _read(self._files)


class ClusterTls:
    """Credentials of a router or a pod for gRPC within the cluster."""

    def __init__(self, identity: Identity, server_name: str = "") -> None:
        self._identity = identity
        self._server_name = server_name

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """A ChannelOpener. Uses the certificate files as they are now."""
        return open_channel(address, self._identity.channel_credentials(), self._server_name)

    def open_blocking_channel(self, address: str) -> grpc.Channel:
        """The same for a caller without an event loop."""
        return open_blocking_channel(address, self._identity.channel_credentials(), self._server_name)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a pod's server."""
        return self._identity.server_credentials()


def cluster_tls(config: ClusterTlsConfig) -> ClusterTls | None:
    """Loads the cluster's certificates; None: TLS is off. Raises ConfigError."""
    if not config.cluster_ca:
        return None
    files = CertificateFiles(config.cluster_cert, config.cluster_key, config.cluster_ca)
    return ClusterTls(Identity(files), config.cluster_tls_name)


def load_certificate(context: ssl.SSLContext, files: CertificateFiles) -> None:
    """Loads the certificate into `context`. Raises ConfigError that names the setting if it cannot be used."""
    with _naming(files.key_option, files.key):
        Path(files.key).read_bytes()
    with _naming(files.certificate_option, files.certificate):
        context.load_cert_chain(files.certificate, files.key, password=b"")  # without it OpenSSL prompts for one


def _read(files: CertificateFiles) -> _Material:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, files)
    authority = None
    if files.authority:
        with _naming(files.authority_option, files.authority):
            context.load_verify_locations(files.authority)
            authority = Path(files.authority).read_bytes()
    return _Material(Path(files.certificate).read_bytes(), Path(files.key).read_bytes(), authority)


@contextmanager
def _naming(option: str, file: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        reason = (error.reason or "it is not PEM").lower().replace("_", " ")
        raise ConfigError(f"{option}: {file} cannot be used: {reason}", param=option) from error
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {file}: {error.strerror}", param=option) from error


def _server_configuration(material: _Material) -> grpc.ServerCertificateConfiguration:
    pairs = [(material.key, material.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=material.authority)
