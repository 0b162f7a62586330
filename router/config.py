"""Settings of the router."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from common.observability.logging import LogFormat, LogLevel
from common.rpc.tls import ClusterTlsConfig
from router.discovery.config import DiscoveryConfig
from router.discovery.dns import PREFIX, parse_dns
from router.gateway.config import GatewayConfig
from router.pods.config import HealthConfig
from router.security.config import LimitsConfig, SecurityConfig
from router.serving.config import ServingConfig


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other settings."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Addresses": ("host", "port", "grpc_port"),
        "Pods": ("prefill", "decode"),
        "Process": ("workers", "shutdown_grace_s", "log_level", "log_format"),
    }
    EVERYDAY: ClassVar[frozenset[str]] = frozenset(
        {
            "host",
            "port",
            "grpc_port",
            "prefill",
            "decode",
            "model",
            "served_model_name",
            "models",
            "models_file",
            "tool_parser",
            "prefill_policy",
            "decode_policy",
            "remote_prefill",
            "request_timeout_s",
            "max_inflight",
            "max_queued",
            "shutdown_grace_s",
            "log_level",
            "api_keys_file",
            "tls_cert",
            "tls_key",
            "cluster_ca",
            "cluster_cert",
            "cluster_key",
            "registry",
        }
    )

    host: Annotated[str, Meta(description="Address to listen on, for HTTP and gRPC.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0: a free one.")] = 8000
    grpc_port: Annotated[int, Meta(ge=0, le=65535, description="Port of the public gRPC API; 0: a free one.")] = 9000
    prefill: Annotated[
        list[str],
        Meta(description="Prefill pods, as host:port or dns:NAME:PORT; none: decode pods compute all prompts."),
    ] = []
    decode: Annotated[list[str], Meta(description="Decode pods, as host:port or dns:NAME:PORT.")] = []
    discovery: DiscoveryConfig = DiscoveryConfig()
    serving: ServingConfig = ServingConfig()
    limits: LimitsConfig = LimitsConfig()
    pod_health: HealthConfig = HealthConfig()
    security: SecurityConfig = SecurityConfig()
    tls: ClusterTlsConfig = ClusterTlsConfig()
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Processes that serve the same ports, one per core that the router may use. Limits of the "
            "router as a whole are divided among them, and quotas of keys are shared.",
        ),
    ] = 1
    gateway: GatewayConfig = GatewayConfig()
    shutdown_grace_s: Annotated[
        float, Meta(ge=0, description="Seconds that running requests have to finish after SIGTERM.")
    ] = 30.0
    log_level: Annotated[LogLevel, Meta(description="Least severe level that is logged.")] = "info"
    log_format: Annotated[LogFormat, Meta(description="console: lines for people; json: one object per line.")] = (
        "console"
    )

    @property
    def may_have_prefill_pods(self) -> bool:
        """Whether there are any, or some may join."""
        return bool(self.prefill or self.discovery.registry)

    @property
    def max_client_body_bytes(self) -> int:
        """Most bytes of one client's HTTP request bodies that are unfinished or wait to be tokenised."""
        limits = self.limits
        share = max(limits.max_unfinished_body_bytes // 4, self.serving.max_body_bytes)
        return limits.max_unfinished_body_bytes_per_client or share

    def __post_init__(self) -> None:
        least = self.serving.max_body_bytes
        for setting in ("max_unfinished_body_bytes", "max_unfinished_body_bytes_per_client"):
            limit = getattr(self.limits, setting)
            if limit is not None and limit < least:
                option = f"--{setting.replace('_', '-')}"
                raise ValueError(f"{option}: must be at least max_body_bytes, {least}, got {limit}")
        for setting in ("prefill", "decode"):
            for address in getattr(self, setting):
                _check_address(setting, address)
        if self.serving.routing.remote_prefill == "always" and not self.may_have_prefill_pods:
            raise ValueError("--remote-prefill always needs prefill pods: name them with --prefill")
        if self.workers > 1:
            _check_shares(self)
        if twice := set(self.prefill) & set(self.decode):
            raise ValueError(f"--prefill and --decode: {', '.join(sorted(twice))} cannot be both")


def _check_shares(config: RouterConfig) -> None:
    """Raises ValueError for a limit of the router that is too small to be divided among its workers."""
    workers, limits, body = config.workers, config.limits, config.serving.max_body_bytes
    per_client = limits.max_unfinished_body_bytes_per_client
    for option, limit, least in (
        ("--max-inflight", config.serving.admission.max_inflight, 1),
        ("--max-connections", limits.max_connections, 1),
        ("--max-unfinished-body-bytes", limits.max_unfinished_body_bytes, body),
        ("--max-unfinished-body-bytes-per-client", per_client, body),
    ):
        if limit is not None and limit < workers * least:
            raise ValueError(f"{option}: --workers {workers} divides it, so it must be at least {workers * least}")


def _check_address(setting: str, address: str) -> None:
    if address.startswith(PREFIX):
        try:
            parse_dns(address)
        except ValueError as error:
            raise ValueError(f"--{setting}: {error}") from error
        return
    host, separator, port = address.rpartition(":")
    if not (host and separator and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"--{setting}: expected host:port, got {address!r}")
