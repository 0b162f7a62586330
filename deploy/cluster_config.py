"""Settings of `baton up`: those of the cluster, and those that belong to its processes.

A setting of the router or of pods that the cluster does not have itself is passed on to the processes it belongs to.
Some the cluster decides, such as ports of pods; they are refused, with the setting to use instead if there is one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from common.config import (
    ArgumentParser,
    Section,
    add_arguments,
    build,
    create_parser,
    field_names,
    given_arguments,
    load_yaml,
)
from common.engine.config import EngineConfig, ParallelConfig, SpeculationConfig
from common.engine.quantization.registry import QUANTIZATIONS
from common.engine.speculative import DraftModelOptions
from common.errors import ConfigError
from common.observability.logging import LogFormat, LogLevel
from decode_service.config import DecodeConfig
from deploy.cluster_state import DEFAULT_NAME, NAME_PATTERN
from deploy.redis_server import MIN_MEMORY_BYTES
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from router.requests.bounds import MAX_MODEL_CHARS
from router.serving.config import is_model_name, names_by_location

POD_ROLES = ("prefill", "decode")
SECTIONS = ("cluster", *POD_ROLES, "router")
_CLUSTER_TLS_SETTINGS = dict.fromkeys(("cluster_ca", "cluster_cert", "cluster_key", "cluster_tls_name"), "mtls")
# What `baton up` decides for its processes, and the setting of `cluster` that says so, if one does.
_POD_SETTINGS = {
    "host": "",
    "port": "",
    "pod_id": "",
    "lora_modules": "lora_modules",
    "connector": "connector",
    "connector_path": "connector_path",
    "drain_timeout_s": "stop_grace_s",
    "log_level": "log_level",
    "log_format": "log_format",
    "metrics_port": "metrics_port",
    **_CLUSTER_TLS_SETTINGS,
}
_ROUTER_SETTINGS = {
    "host": "host",
    "port": "port",
    "grpc_port": "grpc_port",
    "prefill": "prefill",
    "decode": "decode",
    "models_file": "models",
    "workers": "router_workers",
    "shutdown_grace_s": "stop_grace_s",
    "log_level": "log_level",
    "log_format": "log_format",
    "tls_cert": "",
    "tls_key": "",
    **_CLUSTER_TLS_SETTINGS,
}
_DECIDED_SETTINGS = {"prefill": _POD_SETTINGS, "decode": _POD_SETTINGS, "router": _ROUTER_SETTINGS}
_PROCESSES: dict[str, type[msgspec.Struct]] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
_PASSED_EVERYDAY = frozenset({"prefill_policy", "decode_policy", "remote_prefill", "max_inflight", "api_keys_file"})
_FOREIGN_OPTIONS = {  # of other servers, which people try
    "--gpu-memory-utilization": "unknown option; --memory-fraction is the share of free memory for the KV cache",
    "--api-key": "unknown option; keys are listed in the file of --api-keys-file, see `baton keys`",
    "--daemon": "unknown option; did you mean --detach?",
}
EXAMPLES = (
    "baton up                                       # the demo model, 1 prefill and 1 decode pod",
    "baton up Qwen/Qwen3-0.6B --prefill 2 --decode 2",
    "baton up Qwen/Qwen3-0.6B --port 0 -d           # in the background; baton status, logs, down",
    "baton up --models qwen=Qwen/Qwen3-0.6B --models llama=/models/llama",
    "baton up --lora-modules polite=/models/polite  # an adapter, which requests name as their model",
    "baton up --prefill 0 --max-num-seqs 64         # colocated",
    "baton up --remote-prefill prefer --connector redis",
    "baton up --prefill-tensor-parallel-size 2      # two ranks in each prefill pod",
    "baton up --config baton.yaml                   # sections cluster, prefill, decode, router",
)
EXIT_CODES = {
    0: "stopped as asked; with --detach: the cluster is ready; with --dry-run: it could be started",
    1: "a process did not start",
    2: "a wrong option or setting; nothing was left running",
    130: "interrupted before the cluster was ready",
}

LOOPBACK = "127.0.0.1"  # where the pods listen; only the router is reachable from elsewhere

Port = Annotated[int, Meta(ge=0, le=65535)]
PodCount = Annotated[int, Meta(le=64)]
RouterWorkers = Annotated[int, Meta(le=64)]
ConnectorOptions = dict[str, str | int | float | bool]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cluster: what `baton up` starts."""

    TOPICS: ClassVar[dict[str, tuple[str, ...]]] = {
        "KV connector": ("connector", "connector_path", "connector_options", "redis_memory"),
        "Addresses": ("host", "port", "grpc_port", "metrics_port"),
        "API": ("models", "served_model_name", "generation_config", "override_generation_config"),
        "LoRA adapters": ("lora_modules",),
        "Processes": ("router_workers", "mtls", "start_timeout_s", "stop_grace_s", "log_level", "log_format"),
    }
    EVERYDAY: ClassVar[frozenset[str]] = frozenset(
        {
            "prefill",
            "decode",
            "connector",
            "connector_path",
            "connector_options",
            "host",
            "port",
            "grpc_port",
            "metrics_port",
            "models",
            "served_model_name",
            "router_workers",
            "mtls",
            "log_level",
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
        }
    )

    prefill: Annotated[
        PodCount, Meta(ge=0, description="Number of prefill pods, of each model; 0: decode pods compute all prompts.")
    ] = 1
    decode: Annotated[
        PodCount,
        Meta(
            ge=0,
            description="Number of decode pods, of each model; 0: prefill pods embed and classify, "
            "and no text is generated.",
        ),
    ] = 1
    connector: Annotated[str, Meta(min_length=1, description="How KV blocks travel from prefill to decode pods.")] = (
        "shared-storage"
    )
    connector_path: Annotated[
        str, Meta(description="Directory of the shared-storage connector; empty: a temporary one.")
    ] = ""
    connector_options: Annotated[
        ConnectorOptions, Meta(description="Further options of the connector, for all pods.")
    ] = {}
    redis_memory: Annotated[
        Annotated[int, Meta(ge=MIN_MEMORY_BYTES)] | None,
        Meta(
            description="Memory for KV blocks of the Redis server that is started for --connector redis without the "
            "option url; default: a quarter of what is free."
        ),
    ] = None
    host: Annotated[str, Meta(min_length=1, description="Address on which the router listens.")] = LOOPBACK
    port: Annotated[Port, Meta(description="HTTP port of the router; 0: a free one.")] = 8000
    grpc_port: Annotated[Port, Meta(description="gRPC port of the router; 0: a free one.")] = 9000
    metrics_port: Annotated[
        Port | None,
        Meta(
            description="HTTP port of the first pod's Prometheus metrics; the others take the next ones; 0: free ones; "
            "none: no metrics. The router has its own under /metrics."
        ),
    ] = 0
    models: Annotated[
        dict[str, str],
        Meta(
            description="Several models, as name=directory or name=hub id, each with pods of its own; names of the "
            "same one are its aliases."
        ),
    ] = {}
    served_model_name: Annotated[
        str | None, Meta(description="Name of the model in the API; default: that of its directory or hub id.")
    ] = None
    generation_config: Annotated[
        str, Meta(description="Sampling defaults: auto, the model's generation_config.json; none; or a directory.")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, int | float],
        Meta(description="Sampling defaults by their names in generation_config.json, which they win over."),
    ] = {}
    lora_modules: Annotated[
        dict[str, str],
        Meta(description="LoRA adapters that all pods load before they are ready, as name=directory or name=hub id."),
    ] = {}
    router_workers: Annotated[
        RouterWorkers,
        Meta(ge=1, description="Processes of the router, which share its ports; one per core that it may use."),
    ] = 1
    mtls: Annotated[
        bool,
        Meta(description="Use mutual TLS between router and pods, with certificates made for this cluster."),
    ] = False
    start_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Seconds within which every pod must be ready, once the model is on this machine."),
    ] = 900.0
    stop_grace_s: Annotated[
        float, Meta(ge=0, description="Seconds that the router, then the pods, have to finish before they are killed.")
    ] = 10.0
    log_level: Annotated[LogLevel, Meta(description="Least severe level that pods and router log.")] = "warning"
    log_format: Annotated[
        LogFormat, Meta(description="How they log. console: lines for people; json: one object per line.")
    ] = "console"
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        if self.engine.model.quantization is not None:  # the pods would say so, each after its start
            try:
                QUANTIZATIONS.place(self.engine.model.quantization)
            except ConfigError as error:
                raise ValueError(error.message) from error
        if not all(map(is_model_name, self.lora_modules)):
            raise ValueError(f"--lora-modules: names must have 1 to {MAX_MODEL_CHARS} characters")
        if not self.models:
            return
        if self.lora_modules:
            raise ValueError("--lora-modules and --models exclude each other: load adapters once the cluster is ready")
        if not all(map(is_model_name, self.models)):
            raise ValueError(f"--models: names must have 1 to {MAX_MODEL_CHARS} characters")
        own = self.engine.model
        exclusive = {"model": own.model, "revision": own.revision, "served-model-name": self.served_model_name}
        for setting, value in exclusive.items():
            if value:
                raise ValueError(f"--models and --{setting} exclude each other")

    @property
    def cluster_models(self) -> list[ClusterModel]:
        """The models, each of which has pods of its own."""
        if not self.models:
            return [ClusterModel(self.served_model_name or "", self.engine.model.model)]
        return [ClusterModel(names[0], location) for location, names in names_by_location(self.models).items()]


class ClusterModel(NamedTuple):
    """A model of a cluster."""

    name: str  # empty: that of its directory or hub id
    location: str  # directory or hub id; empty: the demo model


class ClusterCommand(msgspec.Struct, frozen=True):
    """The settings of a call of `baton up`."""

    config: ClusterConfig
    config_file: Path | None
    passed: dict[str, list[str]]  # role -> options of its processes alone
    parallel: dict[str, ParallelConfig]  # by role of pods
    model_sources: list[ModelSource]
    is_detached: bool
    is_dry_run: bool
    name: str
    arguments: list[str]  # all of the above, as given


class ModelSource(msgspec.Struct, frozen=True):
    """A model that processes of the cluster load."""

    model: str
    revision: str | None
    setting: str = "--model"  # that names it
    is_adapter: bool = False


def parse_cluster(argv: Sequence[str] | None) -> ClusterCommand:
    """Reads the options of `baton up` and its file. Raises ConfigError."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(arguments)
    args = parser.parse_args(arguments)
    if args.model_argument is not None:
        if args.model not in (None, args.model_argument):
            raise ConfigError(f"--model: {args.model} is not the model named first, {args.model_argument}")
        args.model = args.model_argument
    if args.name is not None and not args.detach:
        raise ConfigError("--name: needs --detach; a cluster in the foreground has no name", param="name")
    if args.name is not None and not re.fullmatch(NAME_PATTERN, args.name):
        raise ConfigError("--name: expected up to 63 letters, digits, dots, dashes or underscores", param="name")
    document = load_yaml(args.config) if args.config else Section({})
    document.check_names(SECTIONS)
    _check_sections(document)
    config = build(ClusterConfig, args, document.section("cluster"))
    return ClusterCommand(
        config=config,
        config_file=Path(args.config).resolve() if args.config else None,
        passed={role: _passed(role, args) for role in _PROCESSES},
        parallel={role: _parallel(role, args, config, document) for role in POD_ROLES},
        model_sources=_model_sources(config, document),
        is_detached=args.detach,
        is_dry_run=args.dry_run,
        name=args.name or DEFAULT_NAME,
        arguments=arguments,
    )


def _parser(arguments: Sequence[str]) -> ArgumentParser:
    parser = create_parser(
        ClusterConfig,
        arguments,
        prog="baton up",
        usage="%(prog)s [MODEL] [options]",
        description="Starts prefill pods, decode pods and a router on this machine. Settings of the model and the "
        "engine apply to every pod, those of the router to it; sections of the --config file set all per role.",
        examples=EXAMPLES,
        exit_codes=EXIT_CODES,
    )
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help="Same as --model: a directory or a hub id of a model."
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with the sections {', '.join(SECTIONS)}, all optional."
    )
    parser.add_argument(
        "-d", "--detach", action="store_true", help="Return when the cluster is ready, and leave it running."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="Print the resolved settings and the commands, and start nothing."
    )
    parser.add_argument(
        "--name",
        help=f"Name of the cluster, with --detach; one cluster has a name at a time. (default: {DEFAULT_NAME})",
    )
    _add_passed(parser, None if "--help-all" in arguments else _PASSED_EVERYDAY)
    parser.hints = _FOREIGN_OPTIONS | {
        f"--{setting.replace('_', '-')}": _advice(replacement, "--{}")
        for decided in _DECIDED_SETTINGS.values()
        for setting, replacement in decided.items()
    }
    return parser


def _add_passed(parser: ArgumentParser, shown: frozenset[str] | None) -> None:
    """One option per setting, however many roles have it."""
    added: set[str] = set()
    pods = set(field_names(PrefillConfig)) & set(field_names(DecodeConfig))
    for scope, kind, role, others in (
        ("Router: ", RouterConfig, "router", set[str]()),
        ("Pods: ", PrefillConfig, "prefill", set(field_names(PrefillConfig)) - pods),
        ("Prefill pods: ", PrefillConfig, "prefill", pods),
        ("Decode pods: ", DecodeConfig, "decode", pods),
    ):
        exclude = _not_passed(role) | added | others
        add_arguments(parser, kind, exclude=exclude, shown=shown, scope=scope)
        added |= set(field_names(kind, exclude=exclude))
    for role in POD_ROLES:
        scope = f"{role.capitalize()} pods, instead of what all have: "
        add_arguments(parser, ParallelConfig, shown=shown, scope=scope, prefix=role)


def _passed(role: str, args: argparse.Namespace) -> list[str]:
    options = given_arguments(_PROCESSES[role], args, exclude=_not_passed(role))
    return [*options, *given_arguments(ParallelConfig, args, prefix=role)] if role in POD_ROLES else options


def _parallel(role: str, args: argparse.Namespace, config: ClusterConfig, document: Section) -> ParallelConfig:
    """Returns the settings of ranks for the pods of this role, each from the first place that has it: an option of the
    role, an option of the cluster, the role's section. Raises ConfigError."""
    names = field_names(ParallelConfig)
    section = document.section(role)
    own = Section({name: section[name] for name in names if name in section}, source=section.source, path=role)
    default = ParallelConfig()
    of_all = {name: getattr(config.engine.parallel, name) for name in names}
    given = {name: value for name, value in of_all.items() if value != getattr(default, name)}
    parallel = build(ParallelConfig, args, Section(given, path="cluster").over(own), prefix=role)
    if parallel.nnodes > 1:
        raise ConfigError("--nnodes: `baton up` is for one machine; run `baton serve` on each", param="nnodes")
    return parallel


def _not_passed(role: str) -> frozenset[str]:
    return frozenset({*_DECIDED_SETTINGS[role], *field_names(ClusterConfig)})


def _model_sources(config: ClusterConfig, document: Section) -> list[ModelSource]:
    """Each model once, those that propose drafts, and adapters. That of the cluster wins over those of sections."""
    sections = [document.section(role) for role in _PROCESSES]
    named = [ModelSource(location, None) for location in names_by_location(config.models)] if config.models else []
    for section in [] if config.models else sections:
        model = config.engine.model.model or str(section.get("model") or "")
        revision = config.engine.model.revision or section.get("revision")
        named.append(ModelSource(model, None if revision is None else str(revision)))
    for section in sections:
        own = Section(
            {name: section[name] for name in ("speculative",) if name in section},
            source=section.source,
            path=section.path,
        )
        method = config.engine.speculation.method or build(SpeculationConfig, None, own).method
        options = None if method is None else method.options
        if isinstance(options, DraftModelOptions):
            named.append(ModelSource(options.model, options.revision, f"--speculative: {options.method}:model"))
    for name, path in config.lora_modules.items():
        named.append(ModelSource(path, None, f"--lora-modules: {name}", is_adapter=True))
    return [source for source in dict.fromkeys(named) if source.model]


def _check_sections(document: Section) -> None:
    """Raises ConfigError for a setting in the wrong section, and for one that `baton up` would silently overrule."""
    cluster = document.section("cluster")
    own = field_names(ClusterConfig)
    for setting in (name for name in cluster if name not in own):
        homes = [role for role, kind in _PROCESSES.items() if setting in field_names(kind, exclude=_not_passed(role))]
        if homes:
            sections = " or ".join(homes)
            raise ConfigError(f"{cluster.name_of(setting)}: belongs into the section {sections}", param=setting)
    for role, decided in _DECIDED_SETTINGS.items():
        section = document.section(role)
        for setting in section.keys() & decided.keys():
            raise ConfigError(f"{section.name_of(setting)}: {_advice(decided[setting], 'cluster.{}')}", param=setting)


def _advice(replacement: str, form: str) -> str:
    advice = (
        f"use {form.format(replacement.replace('_', '-') if '--' in form else replacement)}"
        if replacement
        else "leave it out"
    )
    return f"`baton up` decides this for every process; {advice}"
