"""Settings of the router's security."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:[0-9]{1,5})?|[a-z]+://\[[0-9a-f:]+\](:[0-9]{1,5})?")


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """API keys and TLS towards clients."""

    api_keys_file: Annotated[
        str,
        Meta(
            description="YAML file of API keys, see docs/security.md; reloaded when it changes and on SIGHUP. If it is "
            "empty and the environment has no BATON_API_KEYS, authentication is off."
        ),
    ] = ""
    metrics_need_key: Annotated[
        bool, Meta(description="With API keys, /metrics needs an operator's key, as it names all tenants.")
    ] = True
    allowed_origins: Annotated[
        list[str],
        Meta(
            description="Origins of web pages that may read responses (CORS), as https://chat.example.org; *: any; "
            "default: none."
        ),
    ] = []
    tls_cert: Annotated[
        str,
        Meta(description="PEM file of the certificate for clients, HTTP and gRPC; empty: TLS is off."),
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file of the certificate's private key.")] = ""

    def __post_init__(self) -> None:
        if self.tls_cert and not self.tls_key:
            raise ValueError("--tls-key: required with --tls-cert")
        if self.tls_key and not self.tls_cert:
            raise ValueError("--tls-cert: required with --tls-key")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--allowed-origins: expected scheme://host[:port] in lower case, or *, got {origin!r}"
                )


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on requests: what clients may send, and how fast."""

    DIVIDED: ClassVar[tuple[str, ...]] = (
        "max_connections",
        "max_unfinished_body_bytes",
        "max_unfinished_body_bytes_per_client",
    )

    max_connections: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Most HTTP connections at once; default: 128 fewer than the files that the process may open."),
    ] = None
    max_header_bytes: Annotated[int, Meta(ge=1024, description="Most bytes of an HTTP request before its body.")] = (
        64 * 2**10
    )
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds within which the headers must arrive once a client has connected.")
    ] = 30.0
    max_unfinished_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Most bytes of HTTP request bodies that are unfinished or not tokenised yet, of all clients.",
        ),
    ] = 256 * 2**20
    max_unfinished_body_bytes_per_client: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(description="The same for one client address; default: a quarter, or max_body_bytes if that is more."),
    ] = None
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds within which an HTTP request body or a gRPC message must end.")
    ] = 120.0
    min_body_rate: Annotated[
        float, Meta(ge=0, description="Bytes per second that a body must bring in each window of body_grace_s; 0: any.")
    ] = 1024.0
    body_grace_s: Annotated[float, Meta(gt=0, description="Seconds over which the rate of a body is measured.")] = 10.0
    send_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Seconds after which a client that does not read its HTTP response is disconnected."),
    ] = 60.0
    max_grpc_streams: Annotated[
        int, Meta(ge=1, description="Most concurrent calls on one gRPC connection; a client holds back the rest.")
    ] = 1024
