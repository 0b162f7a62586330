"""Settings that every pod has. Each role adds its own."""

from __future__ import annotations

import uuid
from pathlib import PurePath
from typing import Annotated, ClassVar, Self

import msgspec
from msgspec import Meta

from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from common.engine.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    GrammarConfig,
    KVConnectorConfig,
    ModelConfig,
    NodeTlsConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from common.observability.logging import LogFormat, LogLevel
from common.observability.tracing.config import TracingConfig
from common.pod.announce import AnnounceConfig
from common.rpc.tls import ClusterTlsConfig

ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]  # in a directory of `lora_modules`
CONNECTOR_FACTORY = "kv_store.registry:create_connector"

Port = Annotated[int, Meta(ge=0, le=65535)]


class PodConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other settings."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {
        "Process": ("host", "port", "pod_id", "metrics_port", "drain_timeout_s", "log_level", "log_format"),
        "Model": ("served_model_name",),
        "KV connector": ("connector", "connector_path", "connector_options"),
        "LoRA adapters": ("lora_modules", "lora_grace_s"),
    }
    EVERYDAY: ClassVar[frozenset[str]] = frozenset(
        {
            "host",
            "port",
            "served_model_name",
            "connector",
            "connector_path",
            "connector_options",
            "metrics_port",
            "drain_timeout_s",
            "log_level",
            "cluster_ca",
            "cluster_cert",
            "cluster_key",
            "model",
            "dtype",
            "quantization",
            "device",
            "max_model_len",
            "kv_cache_memory",
            "max_num_batched_tokens",
            "target_itl_ms",
            "max_num_seqs",
            "speculative",
            "lora_modules",
            "registry",
            "advertise",
        }
    )

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="gRPC port; 0: a free one.")] = 0
    pod_id: Annotated[str, Meta(description="Name of the pod in logs and records; default: a random one.")] = ""
    served_model_name: Annotated[
        str, Meta(description="Name of the model in the API; default: that of its directory.")
    ] = ""
    connector: Annotated[
        str | None, Meta(description="How KV travels between pods; none: the pod takes no part in handoffs.")
    ] = "shared-storage"
    connector_path: Annotated[str, Meta(description="Directory of the shared-storage connector.")] = ""
    connector_options: Annotated[
        dict[str, str | int | float | bool], Meta(description="Further options of the connector.")
    ] = {}
    metrics_port: Annotated[
        Port | None, Meta(description="HTTP port of the Prometheus metrics; 0: a free one; none: no metrics.")
    ] = None
    drain_timeout_s: Annotated[
        float, Meta(ge=0, description="Seconds that running requests have to finish after SIGTERM.")
    ] = 30.0
    log_level: Annotated[LogLevel, Meta(description="Least severe level that is logged.")] = "info"
    log_format: Annotated[LogFormat, Meta(description="console: lines for people; json: one object per line.")] = (
        "console"
    )
    lora_modules: Annotated[
        dict[str, str],
        Meta(
            description="LoRA adapters that are loaded before the pod is ready and stay, as name=directory or name=hub "
            "id."
        ),
    ] = {}
    lora_grace_s: Annotated[
        float,
        Meta(gt=0, description="Seconds for which an adapter that was unloaded stays for requests that are under way."),
    ] = 60.0
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    grammar: GrammarConfig = GrammarConfig()
    adapters: AdapterConfig = AdapterConfig()
    announcing: AnnounceConfig = AnnounceConfig()
    tls: ClusterTlsConfig = ClusterTlsConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        if self.parallel.nnodes > 1 and not self.tls.cluster_ca:
            raise ValueError("--cluster-ca: required with --nnodes, as nodes know each other by certificates")
        if self.announcing.registry:
            self.announcing.address(self.host, self.port or 1)

    @property
    def max_open(self) -> int:
        """Most requests open at once: what the engine queues and runs."""
        return self.scheduler.max_num_waiting + self.scheduler.max_num_seqs

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        if self.served_model_name:
            return self.served_model_name
        return PurePath(self.model.model).name if self.model.model else DEMO_MODEL_NAME

    def named(self, role: str) -> Self:
        """These settings with a pod id."""
        return self if self.pod_id else msgspec.structs.replace(self, pod_id=f"{role}-{uuid.uuid4().hex[:8]}")

    def engine_config(self) -> EngineConfig:
        """Settings of the pod's engine."""
        model = self.model
        if not model.model:
            model = msgspec.structs.replace(model, model=str(demo_model_path()))
        return EngineConfig(
            model=model,
            cache=self.cache,
            scheduler=self.scheduler,
            parallel=self.parallel,
            speculation=self.speculation,
            grammar=self.grammar,
            adapters=self.adapters,
            connector=self._connector_config(),
            tls=self._node_tls(),
        )

    def _node_tls(self) -> NodeTlsConfig | None:
        tls = self.tls
        if not tls.cluster_ca:
            return None
        return NodeTlsConfig(
            authority=tls.cluster_ca,
            certificate=tls.cluster_cert,
            key=tls.cluster_key,
            server_name=tls.cluster_tls_name,
        )

    def _connector_config(self) -> KVConnectorConfig | None:
        if not self.connector:
            return None
        options = dict(self.connector_options)
        if self.connector_path:
            options["path"] = self.connector_path
        return KVConnectorConfig(factory=CONNECTOR_FACTORY, name=self.connector, options=options)
