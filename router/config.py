"""Settings of the router."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from common.observability.logging import LogFormat, LogLevel
from common.rpc.tls import ClusterTlsConfig
from router.admission.config import AdmissionConfig
from router.discovery.config import DiscoveryConfig
from router.discovery.dns import PREFIX, parse_dns
from router.dispatching.config import SurvivalConfig
from router.placing.config import RoutingConfig
from router.pods.config import HealthConfig
from router.requests.bounds import MAX_MODEL_CHARS
from router.requests.request import KVFailurePolicy
from router.security.config import LimitsConfig, SecurityConfig
from router.tracing.config import RouterTracingConfig


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other settings."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Addresses": ("host", "port", "grpc_port"),
        "Pods": ("prefill", "decode"),
        "Model": (
            "model",
            "revision",
            "served_model_name",
            "models",
            "models_file",
            "generation_config",
            "override_generation_config",
        ),
        "Answers": ("tool_parser", "reasoning_parser"),
        "Routing": ("kv_failure_policy",),
        "Limits on requests": ("request_timeout_s", "max_body_bytes", "max_choices"),
        "Process": ("workers", "page", "max_timelines", "access_log", "shutdown_grace_s", "log_level", "log_format"),
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
    model: Annotated[
        str,
        Meta(
            description="Directory or hub id of the model, for its tokenizer and chat template; empty: the demo model."
        ),
    ] = ""
    revision: Annotated[str | None, Meta(description="Revision on the hub.")] = None
    served_model_name: Annotated[
        list[str],
        Meta(
            description="Names of the model in the API, the first of which is in answers; default: the last part of "
            "its path, or its hub id."
        ),
    ] = []
    models: Annotated[
        dict[str, str],
        Meta(
            description="Several models, as name=directory or name=hub id; names of the same one are its aliases. A "
            "pod belongs to the model that its own --served-model-name names."
        ),
    ] = {}
    models_file: Annotated[
        str,
        Meta(
            description="YAML file of several models, as name: directory or name: hub id. It is read again when it "
            "changes, so that models are added and removed while the router runs."
        ),
    ] = ""
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
    tool_parser: Annotated[
        str,
        Meta(
            description="How tool calls are found in answers: auto, by the chat template; none; hermes, llama3_json, "
            "mistral, pythonic; or one that a package adds."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="How reasoning is told from the rest of an answer: auto, by the chat template; none; "
            "deepseek_r1, mistral, qwen3."
        ),
    ] = "auto"
    routing: RoutingConfig = RoutingConfig()
    kv_failure_policy: Annotated[
        KVFailurePolicy,
        Meta(
            description="What happens if the KV of a prompt does not arrive, unless the request has its own policy. "
            "recompute: the decode pod computes the prompt; fail: the request ends with 503."
        ),
    ] = "recompute"
    request_timeout_s: Annotated[float, Meta(gt=0, description="Seconds after which a request ends with 504.")] = 600.0
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest HTTP request body and gRPC message.")] = 8 * 2**20
    max_choices: Annotated[int, Meta(ge=1, description="Most generations of one HTTP request: prompts times n.")] = 128
    limits: LimitsConfig = LimitsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    survival: SurvivalConfig = SurvivalConfig()
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
    page: Annotated[
        bool,
        Meta(description="Serve the web page at /: a playground, the cluster live, the last requests."),
    ] = True
    tracing: RouterTracingConfig = RouterTracingConfig()
    max_timelines: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="Requests whose timelines are kept for /v1/requests, the last ones; about 3 KB each. 0: none.",
        ),
    ] = 1000
    shutdown_grace_s: Annotated[
        float, Meta(ge=0, description="Seconds that running requests have to finish after SIGTERM.")
    ] = 30.0
    access_log: Annotated[
        bool,
        Meta(description="Log a line for each request that has ended, at level info; probes and scrapes have none."),
    ] = True
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
        share = max(limits.max_unfinished_body_bytes // 4, self.max_body_bytes)
        return limits.max_unfinished_body_bytes_per_client or share

    def __post_init__(self) -> None:
        for setting in ("max_unfinished_body_bytes", "max_unfinished_body_bytes_per_client"):
            limit = getattr(self.limits, setting)
            if limit is not None and limit < self.max_body_bytes:
                option = f"--{setting.replace('_', '-')}"
                raise ValueError(f"{option}: must be at least max_body_bytes, {self.max_body_bytes}, got {limit}")
        _check_models(self)
        for setting in ("prefill", "decode"):
            for address in getattr(self, setting):
                _check_address(setting, address)
        if self.routing.remote_prefill == "always" and not self.may_have_prefill_pods:
            raise ValueError("--remote-prefill always needs prefill pods: name them with --prefill")
        if self.workers > 1:
            _check_shares(self)
        if twice := set(self.prefill) & set(self.decode):
            raise ValueError(f"--prefill and --decode: {', '.join(sorted(twice))} cannot be both")


def _check_shares(config: RouterConfig) -> None:
    """Raises ValueError for a limit of the router that is too small to be divided among its workers."""
    workers, limits, body = config.workers, config.limits, config.max_body_bytes
    per_client = limits.max_unfinished_body_bytes_per_client
    for option, limit, least in (
        ("--max-inflight", config.admission.max_inflight, 1),
        ("--max-connections", limits.max_connections, 1),
        ("--max-unfinished-body-bytes", limits.max_unfinished_body_bytes, body),
        ("--max-unfinished-body-bytes-per-client", per_client, body),
    ):
        if limit is not None and limit < workers * least:
            raise ValueError(f"{option}: --workers {workers} divides it, so it must be at least {workers * least}")


def _check_models(config: RouterConfig) -> None:
    several = [setting for setting in ("models_file", "models") if getattr(config, setting)]
    others = [setting for setting in ("model", "revision", "served_model_name") if getattr(config, setting)]
    if several and (exclusive := [*several, *others])[1:]:
        first, second, *_ = [f"--{setting.replace('_', '-')}" for setting in exclusive]
        raise ValueError(f"{first} and {second} exclude each other")
    for setting in ("served_model_name", "models"):
        names: Collection[str] = getattr(config, setting)
        if len(names) != len(set(names)) or not all(map(is_model_name, names)):
            problem = f"names must differ and have 1 to {MAX_MODEL_CHARS} characters"
            raise ValueError(f"--{setting.replace('_', '-')}: {problem}")


def is_model_name(name: str) -> bool:
    """Whether a model may have this name."""
    return 0 < len(name) <= MAX_MODEL_CHARS


def names_by_location(models: Mapping[str, str]) -> dict[str, list[str]]:
    """Turns name -> location around: several names of one location are aliases."""
    names: dict[str, list[str]] = {}
    for name, location in models.items():
        names.setdefault(location, []).append(name)
    return names


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
