"""Addresses, credentials and metadata of a client's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from baton.attempts import Attempts
from baton.requests import Request
from common.errors import ConfigError
from common.rpc.channel import CHANNEL_OPTIONS

Metadata = tuple[tuple[str, str | bytes], ...]

if TYPE_CHECKING:
    from common.pb.admin_pb2_grpc import AdminAsyncStub, AdminStub
    from common.pb.inference_pb2_grpc import InferenceAsyncStub, InferenceStub

    _Reply = TypeVar("_Reply")
    Method = Callable[[InferenceStub], grpc.UnaryUnaryMultiCallable[Any, _Reply]]
    AsyncMethod = Callable[[InferenceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Any, _Reply]]
    AdminMethod = Callable[[AdminStub], grpc.UnaryUnaryMultiCallable[Any, _Reply]]
    AsyncAdminMethod = Callable[[AdminAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Any, _Reply]]
    CallAt = Callable[[str], grpc.UnaryUnaryMultiCallable[Any, _Reply]]
    AsyncCallAt = Callable[[str], grpc.aio.UnaryUnaryMultiCallable[Any, _Reply]]
    Stub = InferenceStub
    AsyncStub = InferenceAsyncStub


class Connection:
    """The settings of a client."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str,
        tls: bool,
        tls_ca: str,
        timeout_s: float,
        max_attempts: int,
    ) -> None:
        """Raises ConfigError."""
        self.addresses = [address] if isinstance(address, str) else list(address)
        if not self.addresses:
            raise ConfigError("address: at least one is required", param="address")
        for each in self.addresses:
            if "://" in each or ":" not in each:
                raise ConfigError(f"address: must be host:port of a router's gRPC port, got {each!r}", param="address")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s: must be positive, got {timeout_s}", param="timeout_s")
        if max_attempts < 1:
            raise ConfigError(f"max_attempts: must be at least 1, got {max_attempts}", param="max_attempts")
        self.timeout_s = timeout_s
        self.metadata: Metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.credentials = _credentials(tls_ca) if tls or tls_ca else None
        self._max_attempts = max_attempts

    def attempts(self, timeout_s: float | None = None, address: str | None = None) -> Attempts:
        """Starts the attempts of one call, at `address` or at any router."""
        addresses = self.addresses if address is None else [address]
        return Attempts(addresses, self._max_attempts, self.timeout_s if timeout_s is None else timeout_s)

    def metadata_of(self, request: Request) -> Metadata:
        """Returns the metadata of a generation request."""
        session_id = request.get("session_id", "")
        return (*self.metadata, ("x-session-id", session_id)) if session_id else self.metadata

    def open(self, address: str) -> grpc.Channel:
        """Opens a channel, which connects on its first call."""
        if self.credentials is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, self.credentials, options=CHANNEL_OPTIONS)

    def open_async(self, address: str) -> grpc.aio.Channel:
        """Opens a channel for asyncio."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, self.credentials, options=CHANNEL_OPTIONS)


def _credentials(tls_ca: str) -> grpc.ChannelCredentials:
    try:
        authorities = Path(tls_ca).read_bytes() if tls_ca else None
    except OSError as error:
        raise ConfigError(f"tls_ca: cannot read {tls_ca}: {error.strerror}", param="tls_ca") from error
    return grpc.ssl_channel_credentials(authorities)
