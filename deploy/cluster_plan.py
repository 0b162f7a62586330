"""The plan of a local cluster: commands, ports and environment of every process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from common.config import to_arguments
from common.cores import num_usable_cores
from common.engine.config import ParallelConfig
from common.errors import ConfigError
from common.rpc.tls import ClusterTls, ClusterTlsConfig, cluster_tls
from deploy.cluster_config import LOOPBACK, POD_ROLES, ClusterConfig, ClusterModel
from deploy.cluster_state import StoreState
from deploy.own_code import importable
from deploy.pod_process import PodSpec
from deploy.ports import check_free, pick_ports
from deploy.redis_server import RedisPlan, plan_redis
from kv_store.registry import BELOW, joining_kind, kind_of
from router.security.key_source import ENVIRONMENT
from router.security.keys import digest_of

EXAMPLE_PROMPT = "The capital of France is"
_NOTHING_PASSED: Mapping[str, Sequence[str]] = {}
_AS_ALL: Mapping[str, ParallelConfig] = {}


class ClusterPlan(msgspec.Struct, frozen=True):
    """The processes of a cluster."""

    pods: list[PodSpec]
    router: PodSpec
    stores: list[RedisPlan]  # to be ready before the pods are started
    files: dict[Path, str]  # texts to be written before anything is started, for this user's eyes only
    shared_store: StoreState | None  # through which pods share blocks; None: they do not
    metrics_ports: dict[str, int]  # by pod, of those that have one


def prometheus_targets(plan: ClusterPlan, router: str) -> str:
    """The processes that have metrics, in the format of Prometheus' file_sd. `router`: host:port of its HTTP API."""
    groups = [{"targets": [router], "labels": {"job": "baton-router"}}]
    for role in POD_ROLES:
        ports = [plan.metrics_ports.get(pod.name) for pod in plan.pods if pod.role == role]
        targets = [joined(LOOPBACK, port) for port in ports if port is not None]
        if targets:
            groups.append({"targets": targets, "labels": {"job": f"baton-{role}"}})
    return json.dumps(groups, indent=2) + "\n"


class _ConnectorPlan(NamedTuple):
    """The connection between the pods."""

    pod_options: list[str]
    stores: list[RedisPlan]
    files: dict[Path, str]
    shared_store: StoreState | None


_NO_CONNECTOR = _ConnectorPlan(["--connector", "none"], [], {}, None)
_TIER_OPTIONS = {"host_bytes", "offload", "store"}  # by which pods keep blocks, whether or not they hand any over


def plan_cluster(
    config: ClusterConfig,
    port: int,
    grpc_port: int,
    scratch: Path,
    config_file: Path | None = None,
    passed: Mapping[str, Sequence[str]] = _NOTHING_PASSED,
    base_env: Mapping[str, str] = os.environ,
    parallel: Mapping[str, ParallelConfig] = _AS_ALL,
) -> ClusterPlan:
    """Commands, ports and environment of every process. Raises ConfigError for a connector that cannot join them.

    By role: `passed` are further options of the processes, which win over those of the cluster; `parallel` is what pods
    have if it is not the cluster's.
    """
    planned = _planned_pods(config)
    if not planned:
        raise ConfigError.of("decode", "0, and --prefill 0 as well: there would be no pod")
    env = pod_environment(base_env, sum(parallel.get(pod.role, config.engine.parallel).world_size for pod in planned))
    redis_port, *ports = pick_ports(LOOPBACK, 1 + len(planned))
    hands_over = config.prefill > 0 and config.decode > 0
    needs_connector = bool(hands_over or _TIER_OPTIONS & config.connector_options.keys())
    connector = _plan_connector(config, redis_port, scratch, env) if needs_connector else _NO_CONNECTOR
    common = ["--log-level", config.log_level, "--log-format", config.log_format]
    if config_file is not None:
        common += ["--config", str(config_file)]
    engine_options = to_arguments(config.engine)
    pod_options = [f"--drain-timeout-s={config.stop_grace_s}", *connector.pod_options]
    for name, path in config.lora_modules.items():
        pod_options += ["--lora-modules", f"{name}={path}"]
    metrics_ports = _metrics_ports(config, [pod.name for pod in planned])
    pods: list[PodSpec] = []
    for pod, pod_port in zip(planned, ports, strict=True):
        own = _own_options(pod, pod_port, metrics_ports.get(pod.name), config, scratch)
        of_role = passed.get(pod.role, ())
        options = [*own, *_without(engine_options, of_role), *pod_options, *of_role, *common]
        spec = _spec(pod.name, pod.role, f"{LOOPBACK}:{pod_port}", options, env)
        pods.append(spec._replace(model=pod.model.name) if config.models else spec)
    router_options = _router_options(config, port, grpc_port, pods, scratch)
    router_address = f"{base_url(reachable(config.host), port)} grpc :{grpc_port}"
    router = _spec("router", "router", router_address, [*router_options, *passed.get("router", ()), *common], env)
    return ClusterPlan(pods, router, connector.stores, connector.files, connector.shared_store, metrics_ports)


def _without(options: Sequence[str], others: Sequence[str]) -> list[str]:
    """Returns the options that `others` do not have."""
    names = {word.partition("=")[0] for word in others}
    return [word for word in options if word.partition("=")[0] not in names]


class _PlannedPod(NamedTuple):
    """A pod without its addresses."""

    name: str
    role: str
    model: ClusterModel


def _planned_pods(config: ClusterConfig) -> list[_PlannedPod]:
    """The pods, numbered within their roles."""
    planned: list[_PlannedPod] = []
    for role, num_pods in (("prefill", config.prefill), ("decode", config.decode)):
        models = [model for model in config.cluster_models for _ in range(num_pods)]
        planned += [_PlannedPod(f"{role}-{number}", role, model) for number, model in enumerate(models)]
    return planned


def _own_options(
    pod: _PlannedPod, port: int, metrics_port: int | None, config: ClusterConfig, scratch: Path
) -> list[str]:
    """Returns the options that the pod does not share with others."""
    options = ["--pod-id", pod.name, "--host", LOOPBACK, "--port", str(port)]
    if metrics_port is not None:
        options += ["--metrics-port", str(metrics_port)]
    if config.mtls:
        options += to_arguments(_mtls_of(scratch, pod.role))
    if config.models:
        options += ["--model", pod.model.location]
    if pod.model.name:
        options += ["--served-model-name", pod.model.name]
    return options


def _router_options(
    config: ClusterConfig, port: int, grpc_port: int, pods: Sequence[PodSpec], scratch: Path
) -> list[str]:
    options = ["--host", config.host, "--port", str(port), "--grpc-port", str(grpc_port)]
    for pod in pods:
        options += [f"--{pod.role}", pod.address]
    model = config.engine.model
    if model.model:
        options += ["--model", model.model]
    if model.revision:
        options += ["--revision", model.revision]
    if config.served_model_name:
        options += ["--served-model-name", config.served_model_name]
    for name, location in config.models.items():
        options += ["--models", f"{name}={location}"]
    if config.generation_config != "auto":
        options += ["--generation-config", config.generation_config]
    for name, value in config.override_generation_config.items():
        options += ["--override-generation-config", f"{name}={value}"]
    options.append(f"--shutdown-grace-s={config.stop_grace_s}")
    if config.router_workers > 1:
        options += ["--workers", str(config.router_workers)]
    if config.mtls:
        options += to_arguments(_mtls_of(scratch, "router"))
    return options


def _metrics_ports(config: ClusterConfig, pods: Sequence[str]) -> dict[str, int]:
    """Ports by pod; empty if there are to be none. Raises ConfigError if one is taken."""
    first = config.metrics_port
    if first is None:
        return {}
    if first == 0:
        return dict(zip(pods, pick_ports(LOOPBACK, len(pods)), strict=True))
    if first + len(pods) > 65536:
        raise ConfigError(f"--metrics-port: {len(pods)} pods need a port each from {first} on", param="metrics_port")
    ports = {pod: first + index for index, pod in enumerate(pods)}
    for port in ports.values():
        check_free(LOOPBACK, port, "--metrics-port")
    return ports


def _plan_connector(config: ClusterConfig, redis_port: int, scratch: Path, env: Mapping[str, str]) -> _ConnectorPlan:
    """How prefill and decode pods are joined. Raises ConfigError."""
    kind = joining_kind(config.connector)
    kind.check_installed()
    pod_options = ["--connector", config.connector]
    options = dict(config.connector_options)
    stores: list[RedisPlan] = []
    files: dict[Path, str] = {}
    below = "" if kind.is_store else str(options.get("store", ""))  # which keeps blocks beside a direct connector
    for prefix, each in (("", kind), *([(BELOW, kind_of(below))] if below else [])):
        if each.redis_option and not options.get(prefix + each.redis_option):
            redis = plan_redis(redis_port, config.redis_memory, scratch, env)
            options[prefix + each.redis_option] = redis.url
            stores.append(redis)
            files[redis.settings_file] = redis.settings
        if prefix and each.directory_option:
            options.setdefault(prefix + each.directory_option, str(scratch))
    if options:  # in a file, because any user of the machine can see command lines
        pod_settings = scratch / "pods.yaml"
        files[pod_settings] = yaml.safe_dump({role: {"connector_options": options} for role in POD_ROLES})
        pod_options += ["--config", str(pod_settings)]
    path = config.connector_path or str(options.get("path", ""))
    if kind.directory_option:
        path = path or str(scratch)
    shared_store = StoreState(config.connector, path, options)
    return _ConnectorPlan([*pod_options, *(["--connector-path", path] if path else [])], stores, files, shared_store)


def _mtls_of(scratch: Path, role: str) -> ClusterTlsConfig:
    """Returns the paths at which `make_mtls` puts the certificate of a role."""
    directory = scratch / "certificates"
    return ClusterTlsConfig(
        cluster_ca=str(directory / "ca.pem"),
        cluster_cert=str(directory / f"{role}.pem"),
        cluster_key=str(directory / f"{role}.key"),
    )


def make_mtls(scratch: Path) -> ClusterTls | None:
    """Makes the certificates of all roles; returns the router's, for probes. Raises ConfigError."""
    try:
        from deploy.certificates import make_certificates
    except ModuleNotFoundError as error:
        raise ConfigError(f"--mtls: needs {error.name}: pip install 'baton-llm[certs]'", param="mtls") from error
    make_certificates(scratch / "certificates")
    return cluster_tls(_mtls_of(scratch, "router"))


def write_private(file: Path, text: str) -> None:
    """A new file that only this user can read."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)


def _spec(name: str, role: str, address: str, options: Sequence[str], env: Mapping[str, str]) -> PodSpec:
    return PodSpec(name, role, (sys.executable, "-m", "cli.main", "serve", role, *options), env, address)


def pod_environment(base: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """`base` with the cores shared out among the ranks of all pods, unless it says otherwise, and this code
    importable."""
    threads = base.get("OMP_NUM_THREADS", "") or str(max(1, num_usable_cores() // num_ranks))
    env = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return env | importable(base)


def operator_environment(env: Mapping[str, str], key: str) -> dict[str, str]:
    """Returns variables that make `key` an operator's, for the environment of a router that has API keys."""
    listed = env.get(ENVIRONMENT, "").strip()
    own = f"baton-up-probe:sha256:{digest_of(key).hex()}:operator"
    return {ENVIRONMENT: f"{listed},{own}" if listed else own}


def curl_line(url: str, model: str | None, *, generates: bool = True) -> str:
    """A request to paste into a shell, for a completion or an embedding. `model`: None if the router wants an API
    key."""
    asked = {"prompt": EXAMPLE_PROMPT, "max_tokens": 16, "temperature": 0} if generates else {"input": EXAMPLE_PROMPT}
    body = json.dumps({**({"model": model} if model else {}), **asked})
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if model is None else ""
    path = "/v1/completions" if generates else "/v1/embeddings"
    return f"curl -s {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'"


def base_url(host: str, port: int) -> str:
    """The router's HTTP address."""
    return f"http://{joined(host, port)}"


def joined(host: str, port: int) -> str:
    """host:port, or [host]:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Returns the address of a server that listens on `host`."""
    return {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host)  # noqa: S104


def public_ports(config: ClusterConfig) -> tuple[int, int]:
    """HTTP and gRPC port of the router. Raises ConfigError if one is taken."""
    if config.port and config.port == config.grpc_port:
        raise ConfigError("--grpc-port: must differ from --port", param="grpc_port")
    free = iter(pick_ports(config.host, 2))
    for port, option in ((config.port, "--port"), (config.grpc_port, "--grpc-port")):
        if port:
            check_free(config.host, port, option)
    return config.port or next(free), config.grpc_port or next(free)
