"""A whole cluster on this machine: `baton up`.

1. Check the settings, pick ports for the pods, make the directory through which they share KV blocks.
2. Start what stores the blocks, if it is a server, then all pods and the router at once, each a process of its own; say
   when each is ready.
3. Print a request that works, and stay in the foreground. A pod that dies is started again.
4. At the first SIGINT, SIGTERM or SIGHUP end the router, then the pods, then the store; at the second kill them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import yaml
from msgspec import Meta

from common import __version__
from common.config import Section, build, create_parser, load_yaml, to_arguments
from common.engine.config import EngineConfig
from common.errors import ConfigError
from common.observability.logging import LogLevel
from common.rpc.tls import ClusterTls, ClusterTlsConfig, cluster_tls
from deploy.pod_process import PodProcess, PodSpec, PodStartError
from deploy.ports import check_free, pick_ports
from deploy.probes import RouterProbe, first_model, grpc_probe
from deploy.redis_server import MIN_MEMORY_BYTES, RedisPlan, plan_redis, redis_probe
from deploy.scratch import scratch_directory
from deploy.terminal import Terminal
from kv_store.nixl.installed import check_installed
from kv_store.registry import CONNECTOR_NAMES
from router.security.key_source import ENVIRONMENT
from router.security.keys import digest_of, generate_key

POD_ROLES = ("prefill", "decode")
SECTIONS = ("cluster", *POD_ROLES, "router")
CONNECTORS = tuple(name for name in CONNECTOR_NAMES if name != "memory")  # those that join processes
_CLUSTER_TLS_SETTINGS = dict.fromkeys(("cluster_ca", "cluster_cert", "cluster_key", "cluster_tls_name"), "mtls")
# What `baton up` decides for its processes, and the setting of `cluster` that says so, if one does.
_POD_SETTINGS = {
    "host": "",
    "port": "",
    "pod_id": "",
    "connector": "connector",
    "connector_path": "connector_path",
    "drain_timeout_s": "stop_grace_s",
    "log_level": "log_level",
    **_CLUSTER_TLS_SETTINGS,
}
_ROUTER_SETTINGS = {
    "host": "host",
    "port": "port",
    "grpc_port": "grpc_port",
    "prefill": "prefill",
    "decode": "decode",
    "shutdown_grace_s": "stop_grace_s",
    "log_level": "log_level",
    "tls_cert": "",
    "tls_key": "",
    **_CLUSTER_TLS_SETTINGS,
}
_DECIDED_SETTINGS = {"prefill": _POD_SETTINGS, "decode": _POD_SETTINGS, "router": _ROUTER_SETTINGS}
LOOPBACK = "127.0.0.1"  # where the pods listen; only the router is reachable from elsewhere
STOP_MARGIN_S = 3.0  # for what a process does after its own grace period
EXAMPLE_PROMPT = "The capital of France is"

Port = Annotated[int, Meta(ge=0, le=65535)]
PodCount = Annotated[int, Meta(le=64)]
ConnectorOptions = dict[str, str | int | float | bool]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cluster: what `baton up` starts."""

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
            "served_model_name",
            "mtls",
            "log_level",
            "model",
            "dtype",
            "device",
            "max_model_len",
            "kv_cache_memory",
            "max_num_batched_tokens",
            "target_itl_ms",
            "max_num_seqs",
        }
    )

    prefill: Annotated[
        PodCount, Meta(ge=0, description="Number of prefill pods; 0: decode pods compute all prompts.")
    ] = 1
    decode: Annotated[PodCount, Meta(ge=1, description="Number of decode pods.")] = 1
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
    tool_parser: Annotated[
        str,
        Meta(description="How the router finds tool calls in answers: auto, by the chat template; none; or a name."),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(description="How the router tells reasoning from answers: auto, by the chat template; none; or a name."),
    ] = "auto"
    mtls: Annotated[
        bool,
        Meta(description="Use mutual TLS between router and pods, with certificates made for this cluster."),
    ] = False
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds within which every pod must be ready, downloads included.")
    ] = 900.0
    stop_grace_s: Annotated[
        float, Meta(ge=0, description="Seconds that the router, then the pods, have to finish before they are killed.")
    ] = 10.0
    log_level: Annotated[LogLevel, Meta(description="Least severe level that pods and router log.")] = "warning"
    engine: EngineConfig = EngineConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a local cluster until a signal. Returns the exit code; raises ConfigError."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = create_parser(
        ClusterConfig,
        arguments,
        prog="baton up",
        description="Starts prefill pods, decode pods and a router on this machine. Settings of the model and the "
        "engine apply to every pod; sections of the --config file set them, and all other settings, per role.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with the sections {', '.join(SECTIONS)}, all optional."
    )
    args = parser.parse_args(arguments)
    document = load_yaml(args.config) if args.config else None
    if document is not None:
        document.check_names(SECTIONS)
        _check_sections(document)
    config = build(ClusterConfig, args, document.section("cluster") if document is not None else None)
    terminal = Terminal()
    try:
        with scratch_directory() as scratch:
            config_file = Path(args.config).resolve() if args.config else None
            return asyncio.run(LocalCluster(config, terminal, scratch, config_file).run())
    except PodStartError as error:
        terminal.warn(f"baton: error: {error.message}")
        return 1


def _check_sections(document: Section) -> None:
    """Raises ConfigError for a setting of one process that `baton up` would silently overrule."""
    for role, decided in _DECIDED_SETTINGS.items():
        section = document.section(role)
        for setting in section.keys() & decided.keys():
            advice = f"use cluster.{decided[setting]}" if decided[setting] else "leave it out"
            raise ConfigError(
                f"{section.name_of(setting)}: `baton up` decides this for every process; {advice}", param=setting
            )


class LocalCluster:
    """Owns the processes of one cluster."""

    def __init__(
        self, config: ClusterConfig, terminal: Terminal, scratch: Path, config_file: Path | None = None
    ) -> None:
        """Raises ConfigError if a port is taken."""
        self._config = config
        self._terminal = terminal
        self._stop_asked = asyncio.Event()
        port, grpc_port = _public_ports(config)
        self._probe_host = _reachable(config.host)
        self._port = port
        plan = plan_cluster(config, port, grpc_port, scratch, config_file)
        for file, text in plan.files.items():
            write_private(file, text)
        self._stores = [PodProcess(redis.spec, redis_probe(redis), terminal) for redis in plan.stores]
        tls = _make_mtls(scratch) if config.mtls else None
        self._pods = [PodProcess(spec, grpc_probe(spec.address, tls), terminal) for spec in plan.pods]
        names = {spec.address: spec.name for spec in plan.pods}
        key = generate_key()
        env = {**plan.router.env, **operator_environment(config_file, os.environ, key)}
        router = plan.router._replace(env=env)
        self._router = PodProcess(router, RouterProbe(self._probe_host, port, names, key), terminal)

    async def run(self) -> int:
        """Starts everything and waits for a signal. Returns 0; raises ConfigError or PodStartError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        self._announce()
        started = time.monotonic()
        supervisors: list[asyncio.Task[None]] = []
        try:
            for processes in (self._stores, [*self._pods, self._router]):  # a pod refuses a store that is not there
                if not self._stop_asked.is_set():
                    supervisors += [asyncio.create_task(each.supervise(), name=each.spec.name) for each in processes]
                    await self._until_ready(processes, supervisors)
            if not self._stop_asked.is_set():
                await self._say_ready(time.monotonic() - started)
                await self._first_of(*supervisors)
        finally:
            await self._stop()
            await asyncio.gather(*supervisors, return_exceptions=True)
        self._terminal.say("Stopped.")
        return 0

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            for process in (self._router, *self._pods, *self._stores):
                process.kill()
            return
        self._terminal.say(f"\nStopping. {self._terminal.dim('Once more to kill.')}")
        self._stop_asked.set()

    async def _until_ready(self, processes: Sequence[PodProcess], supervisors: Iterable[asyncio.Task[None]]) -> None:
        """Returns when all of `processes` are ready or a stop was asked for; raises what a supervisor raised."""
        timeout_s = self._config.start_timeout_s
        all_ready = asyncio.create_task(_all_ready(processes))
        try:
            async with asyncio.timeout(timeout_s):
                await self._first_of(all_ready, *supervisors)
        except TimeoutError:
            late = ", ".join(process.spec.name for process in processes if not process.ready.is_set())
            raise PodStartError(f"not ready within {timeout_s:g} s: {late}") from None
        finally:
            all_ready.cancel()

    async def _first_of(self, *awaited: asyncio.Future[Any]) -> None:
        """Waits for the first of `awaited` or a stop; raises what the finished ones raised."""
        stop = asyncio.create_task(self._stop_asked.wait())
        try:
            done, _ = await asyncio.wait([*awaited, stop], return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        finally:
            stop.cancel()

    async def _stop(self) -> None:
        """The router first: while it ends, its streams still have their pods, and these their store."""
        grace_s = self._config.stop_grace_s + STOP_MARGIN_S
        await self._router.stop(grace_s)
        for processes in (self._pods, self._stores):
            await asyncio.gather(*(process.stop(grace_s) for process in processes))

    def _announce(self) -> None:
        config = self._config
        model = config.engine.model.model or "the demo model"
        if config.prefill:
            topology = f"{config.prefill} prefill + {config.decode} decode, connector {config.connector}"
        else:
            topology = f"{config.decode} decode, colocated"
        self._terminal.say(f"{self._terminal.bold(f'Baton {__version__}')}: {topology}, model {model}")

    async def _say_ready(self, seconds: float) -> None:
        say, host = self._terminal.say, self._probe_host
        model = await first_model(host, self._port)
        say(f"\nReady in {seconds:.1f} s. Try:\n")
        say(f"  {curl_line(base_url(host, self._port), model)}\n")
        say(self._terminal.dim("Stop with Ctrl-C."))


class ClusterPlan(msgspec.Struct, frozen=True):
    """The processes of a cluster."""

    pods: list[PodSpec]
    router: PodSpec
    stores: list[RedisPlan]  # to be ready before the pods are started
    files: dict[Path, str]  # texts to be written before anything is started, for this user's eyes only


class _ConnectorPlan(NamedTuple):
    """What joins the pods."""

    pod_options: list[str]
    stores: list[RedisPlan]
    files: dict[Path, str]


_NO_CONNECTOR = _ConnectorPlan(["--connector", "none"], [], {})
_TIER_OPTIONS = {"host_bytes", "offload", "store"}  # by which pods keep blocks, whether or not they hand any over


def plan_cluster(
    config: ClusterConfig, port: int, grpc_port: int, scratch: Path, config_file: Path | None
) -> ClusterPlan:
    """Commands, ports and environment of every process. Raises ConfigError for a connector that cannot join them."""
    env = pod_environment(os.environ, config.prefill + config.decode)
    redis_port, *ports = pick_ports(LOOPBACK, 1 + config.prefill + config.decode)
    needs_connector = bool(config.prefill or _TIER_OPTIONS & config.connector_options.keys())
    connector = _plan_connector(config, redis_port, scratch, env) if needs_connector else _NO_CONNECTOR
    common = ["--log-level", config.log_level]
    if config.served_model_name:
        common += ["--served-model-name", config.served_model_name]
    if config_file is not None:
        common += ["--config", str(config_file)]
    pod_options = [f"--drain-timeout-s={config.stop_grace_s}", *to_arguments(config.engine), *connector.pod_options]
    names = [("prefill", index) for index in range(config.prefill)]
    names += [("decode", index) for index in range(config.decode)]
    pods: list[PodSpec] = []
    for (role, index), pod_port in zip(names, ports, strict=True):
        name = f"{role}-{index}"
        own = ["--pod-id", name, "--host", LOOPBACK, "--port", str(pod_port)]
        if config.mtls:
            own += to_arguments(_mtls_of(scratch, role))
        pods.append(_spec(name, role, f"{LOOPBACK}:{pod_port}", [*own, *pod_options, *common], env))
    router_options = ["--host", config.host, "--port", str(port), "--grpc-port", str(grpc_port)]
    for pod in pods:
        router_options += [f"--{pod.role}", pod.address]
    model = config.engine.model
    if model.model:
        router_options += ["--model", model.model]
    if model.revision:
        router_options += ["--revision", model.revision]
    if config.generation_config != "auto":
        router_options += ["--generation-config", config.generation_config]
    for name, value in config.override_generation_config.items():
        router_options += ["--override-generation-config", f"{name}={value}"]
    for option, name in (("--tool-parser", config.tool_parser), ("--reasoning-parser", config.reasoning_parser)):
        if name != "auto":
            router_options += [option, name]
    router_options.append(f"--shutdown-grace-s={config.stop_grace_s}")
    if config.mtls:
        router_options += to_arguments(_mtls_of(scratch, "router"))
    router_address = f"{base_url(_reachable(config.host), port)} grpc :{grpc_port}"
    router = _spec("router", "router", router_address, [*router_options, *common], env)
    return ClusterPlan(pods, router, connector.stores, connector.files)


def _plan_connector(config: ClusterConfig, redis_port: int, scratch: Path, env: Mapping[str, str]) -> _ConnectorPlan:
    """How prefill and decode pods are joined. Raises ConfigError."""
    if config.connector not in CONNECTORS:
        raise ConfigError(
            f"--connector: {config.connector!r} cannot join processes; known are {', '.join(CONNECTORS)}",
            param="connector",
        )
    if config.connector == "nixl":
        check_installed()
    pod_options = ["--connector", config.connector]
    options = dict(config.connector_options)
    stores: list[RedisPlan] = []
    files: dict[Path, str] = {}
    store = options.get("store") if config.connector == "nixl" else None  # which keeps blocks beside it
    url = "store.url" if store == "redis" else "url"
    if "redis" in (config.connector, store) and not options.get(url):
        redis = plan_redis(redis_port, config.redis_memory, scratch, env)
        options[url] = redis.url
        stores.append(redis)
        files[redis.settings_file] = redis.settings
    if store == "shared-storage":
        options.setdefault("store.path", str(scratch))
    if options:  # in a file, because any user of the machine can see command lines
        pod_settings = scratch / "pods.yaml"
        files[pod_settings] = yaml.safe_dump({role: {"connector_options": options} for role in POD_ROLES})
        pod_options += ["--config", str(pod_settings)]
    path = config.connector_path or str(options.get("path", ""))
    if config.connector == "shared-storage":
        path = path or str(scratch)
    return _ConnectorPlan([*pod_options, *(["--connector-path", path] if path else [])], stores, files)


def _mtls_of(scratch: Path, role: str) -> ClusterTlsConfig:
    """Where `_make_mtls` puts the certificate of a role."""
    directory = scratch / "certificates"
    return ClusterTlsConfig(
        cluster_ca=str(directory / "ca.pem"),
        cluster_cert=str(directory / f"{role}.pem"),
        cluster_key=str(directory / f"{role}.key"),
    )


def _make_mtls(scratch: Path) -> ClusterTls | None:
    """Makes the certificates of all roles; returns the router's, for probes. Raises ConfigError."""
    try:
        from deploy.certificates import make_certificates
    except ModuleNotFoundError as error:
        raise ConfigError(f"--mtls: needs {error.name}: pip install 'baton-llm[certs]'", param="mtls") from error
    make_certificates(scratch / "certificates")
    return cluster_tls(_mtls_of(scratch, "router"))


async def _all_ready(processes: Iterable[PodProcess]) -> None:
    for process in processes:
        await process.ready.wait()


def write_private(file: Path, text: str) -> None:
    """A new file that only this user can read."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)


def _spec(name: str, role: str, address: str, options: Sequence[str], env: Mapping[str, str]) -> PodSpec:
    return PodSpec(name, role, (sys.executable, "-m", "cli.main", "serve", role, *options), env, address)


# A step has hundreds of parallel regions, and waking a thread that sleeps takes longer than most of them: threads that
# wait for the next one spin for some milliseconds before they sleep. On cores of their own that halves a step's time.
_BRIEF_SPIN = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "100000"}


def pod_environment(base: Mapping[str, str], num_engines: int) -> dict[str, str]:
    """`base` with the cores shared out among the engines, unless it says otherwise, and this code importable."""
    num_cores = len(os.sched_getaffinity(0))
    threads = base.get("OMP_NUM_THREADS", "") or str(max(1, num_cores // num_engines))
    env = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if threads.isdecimal() and int(threads) * num_engines <= num_cores:  # else they would spin on each other's cores
        env |= _BRIEF_SPIN
    env |= base
    env["PYTHONSAFEPATH"] = "1"  # a package `common` in the working directory is not ours
    root = str(Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, base.get("PYTHONPATH", "")]))
    return env


def operator_environment(config_file: Path | None, env: Mapping[str, str], key: str) -> dict[str, str]:
    """What makes `key` an operator's, to be added to the router's environment; empty if the router has no API keys."""
    listed = env.get(ENVIRONMENT, "").strip()
    in_file = config_file is not None and bool(load_yaml(str(config_file)).section("router").get("api_keys_file"))
    if not listed and not in_file:
        return {}
    own = f"baton-up-probe:sha256:{digest_of(key).hex()}:operator"
    return {ENVIRONMENT: f"{listed},{own}" if listed else own}


def curl_line(url: str, model: str | None) -> str:
    """A completion request to paste into a shell. `model`: None if the router wants an API key."""
    named = {"model": model} if model else {}
    body = json.dumps({**named, "prompt": EXAMPLE_PROMPT, "max_tokens": 16, "temperature": 0})
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if model is None else ""
    return f"curl -s {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def base_url(host: str, port: int) -> str:
    """The router's HTTP address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reachable(host: str) -> str:
    """Where to reach a server that listens on `host`."""
    return {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host)  # noqa: S104


def _public_ports(config: ClusterConfig) -> tuple[int, int]:
    """HTTP and gRPC port of the router. Raises ConfigError if one is taken."""
    if config.port and config.port == config.grpc_port:
        raise ConfigError("--grpc-port: must differ from --port", param="grpc_port")
    free = iter(pick_ports(config.host, 2))
    for port, option in ((config.port, "--port"), (config.grpc_port, "--grpc-port")):
        if port:
            check_free(config.host, port, option)
    return config.port or next(free), config.grpc_port or next(free)
