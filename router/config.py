"""Settings of the router."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from common.rpc.tls import ClusterTlsConfig
from router.admission.config import AdmissionConfig
from router.discovery.config import DiscoveryConfig
from router.discovery.dns import PREFIX, parse_dns
from router.dispatching.config import SurvivalConfig
from router.placing.policy_spec import POLICY_NAMES, parse_policy
from router.pods.config import HealthConfig
from router.security.config import LimitsConfig, SecurityConfig

RemotePrefill = Literal["auto", "prefer", "always", "never"]
KVFailurePolicy = Literal["recompute", "fail"]
LogLevel = Literal["debug", "info", "warning", "error"]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one router needs."""

    EVERYDAY: ClassVar[frozenset[str]] = frozenset(
        {
            "host",
            "port",
            "grpc_port",
            "prefill",
            "decode",
            "model",
            "served_model_name",
            "generation_config",
            "prefill_policy",
            "decode_policy",
            "remote_prefill",
            "kv_failure_policy",
            "request_timeout_s",
            "max_body_bytes",
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

    host: Annotated[str, Meta(description="Address to listen on, HTTP and gRPC.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0 takes a free one.")] = 8000
    grpc_port: Annotated[int, Meta(ge=0, le=65535, description="Port of the public gRPC API; 0 takes a free one.")] = (
        9000
    )
    prefill: Annotated[
        list[str], Meta(description="host:port or dns:NAME:PORT of the prefill pods; none: decode pods prefill.")
    ] = []
    decode: Annotated[list[str], Meta(description="host:port or dns:NAME:PORT of the decode pods.")] = []
    model: Annotated[
        str, Meta(description="Directory or hub id whose tokenizer and chat template are used; empty: the demo model.")
    ] = ""
    revision: Annotated[str | None, Meta(description="Hub revision.")] = None
    served_model_name: Annotated[
        str | None, Meta(description="Name that clients use; default: last part of the model's path or id.")
    ] = None
    generation_config: Annotated[
        str,
        Meta(
            description="Sampling defaults: auto, generation_config.json in the model's directory; none, those of "
            "OpenAI's API; or the directory of another generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, int | float],
        Meta(description="Sampling defaults by their names in generation_config.json, which they win over."),
    ] = {}
    prefill_policy: Annotated[
        str,
        Meta(description=f"How a prefill pod is chosen: {', '.join(POLICY_NAMES)}, or several with weights (a:2,b:1)."),
    ] = "kv_aware"
    decode_policy: Annotated[str, Meta(description="How a decode pod is chosen; the same names.")] = "kv_aware"
    remote_prefill: Annotated[
        RemotePrefill,
        Meta(
            description="Prefill on prefill pods: auto, where that gives the first token sooner or keeps the "
            "decode pods' target_itl_ms; prefer, if one is ready; always, and refuse requests while none is; "
            "never."
        ),
    ] = "auto"
    min_remote_prefill_tokens: Annotated[
        int,
        Meta(ge=0, description="With auto, prompts of which fewer tokens are to be computed stay on the decode pod."),
    ] = 0
    max_index_blocks: Annotated[
        int,
        Meta(ge=0, description="Most cached blocks of all pods that are remembered, about 200 bytes each."),
    ] = 2_000_000
    kv_failure_policy: Annotated[
        KVFailurePolicy,
        Meta(
            description="What becomes of a request whose KV does not come from its prefill pod, unless the request "
            "says so itself: recompute it on the decode pod; fail, with 503."
        ),
    ] = "recompute"
    request_timeout_s: Annotated[float, Meta(gt=0, description="Seconds until a request is ended as overdue.")] = 600.0
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest HTTP body and gRPC message.")] = 8 * 2**20
    admission: AdmissionConfig = AdmissionConfig()
    max_choices: Annotated[int, Meta(ge=1, description="Most generations of one HTTP request: prompts times n.")] = 128
    survival: SurvivalConfig = SurvivalConfig()
    shutdown_grace_s: Annotated[float, Meta(ge=0, description="Seconds that running requests get on SIGTERM.")] = 30.0
    log_level: Annotated[LogLevel, Meta(description="Least severe log level shown.")] = "info"
    security: SecurityConfig = SecurityConfig()
    limits: LimitsConfig = LimitsConfig()
    tls: ClusterTlsConfig = ClusterTlsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    pod_health: HealthConfig = HealthConfig()

    @property
    def may_have_prefill_pods(self) -> bool:
        """Whether there are any, or some may join."""
        return bool(self.prefill or self.discovery.registry)

    @property
    def max_client_body_bytes(self) -> int:
        """Most bytes held of the unfinished HTTP request bodies of one client."""
        limits = self.limits
        share = max(limits.max_unfinished_body_bytes // 4, self.max_body_bytes)
        return limits.max_unfinished_body_bytes_per_client or share

    def __post_init__(self) -> None:
        for setting in ("max_unfinished_body_bytes", "max_unfinished_body_bytes_per_client"):
            limit = getattr(self.limits, setting)
            if limit is not None and limit < self.max_body_bytes:
                option = f"--{setting.replace('_', '-')}"
                raise ValueError(f"{option}: must be at least max_body_bytes, {self.max_body_bytes}, got {limit}")
        for setting in ("prefill", "decode"):
            for address in getattr(self, setting):
                _check_address(setting, address)
        for setting in ("prefill_policy", "decode_policy"):
            _check_policy(setting, getattr(self, setting))
        if self.remote_prefill == "always" and not self.may_have_prefill_pods:
            raise ValueError("--remote-prefill always needs prefill pods: name them with --prefill")
        if twice := set(self.prefill) & set(self.decode):
            raise ValueError(f"--prefill and --decode: {', '.join(sorted(twice))} cannot be both")


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


def _check_policy(setting: str, text: str) -> None:
    try:
        parse_policy(text)
    except ValueError as error:
        raise ValueError(f"--{setting.replace('_', '-')}: {error}") from error
