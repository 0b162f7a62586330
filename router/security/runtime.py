"""The security of a running router, put together."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import ssl

import grpc

from common.rpc.tls import CertificateFiles, Identity, load_certificate
from common.watched_files import WatchedFiles
from router.metrics import SecurityMetrics
from router.security.access import AccessControl
from router.security.config import SecurityConfig
from router.security.http_guard import OPEN_PATHS
from router.security.key_source import load_keys
from router.security.usage import Usage

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 2.0


class Security:
    """Reads keys, and reads them again while `run` is under way."""

    def __init__(self, config: SecurityConfig, host: str, metrics: SecurityMetrics, usage: Usage | None = None) -> None:
        """`usage`: where quotas are counted; None: in this process. Raises ConfigError."""
        self._config = config
        keys = load_keys(config.api_keys_file, os.environ)
        self.metrics = metrics
        self.access = AccessControl(keys, self.metrics, usage)
        self._watched = [WatchedFiles([config.api_keys_file], self._reload_keys)] if config.api_keys_file else []
        self.http_tls: ssl.SSLContext | None = None  # None: plain text
        self.grpc_tls: grpc.ServerCredentials | None = None
        if config.tls_cert:
            self._certificate = CertificateFiles(
                config.tls_cert, config.tls_key, certificate_option="--tls-cert", key_option="--tls-key"
            )
            self.grpc_tls = Identity(self._certificate).server_credentials()
            self.http_tls = _tls_context(self._certificate)
            self._watched.append(WatchedFiles([config.tls_cert, config.tls_key], self._reload_certificate))
        if keys is None and not _is_loopback(host):
            logger.warning("no API keys are configured: any client that reaches %s is served", host or "this machine")

    @property
    def open_paths(self) -> frozenset[str]:
        """HTTP paths that need no key."""
        return OPEN_PATHS if self._config.metrics_need_key else OPEN_PATHS | {"/metrics"}

    def check(self, *, force: bool = False) -> None:
        """Read again what has changed, or everything."""
        for files in self._watched:
            files.check(force=force)

    def reload(self) -> None:
        """Read everything again, now."""
        self.check(force=True)

    async def run(self) -> None:
        """Follow changes, for ever. Cancel to end."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self.check()

    def _reload_keys(self) -> None:
        keys = load_keys(self._config.api_keys_file, os.environ)
        assert keys is not None  # it is None only without a file of keys
        self.access.set_keys(keys)

    def _reload_certificate(self) -> None:
        assert self.http_tls is not None
        _tls_context(self._certificate)  # raises before anything is changed
        load_certificate(self.http_tls, self._certificate)


def _tls_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, files)
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
