"""A whole cluster on this machine: `baton up`.

1. Check the settings, fetch the model, pick ports for the pods, make the directory through which they share KV blocks.
2. Start what stores the blocks, if it is a server, then all pods and the router at once, each a process of its own; say
   when each is ready.
3. Print a request that works, and stay in the foreground, or in the background with --detach (`deploy.detached`). A pod
   that dies is started again.
4. At the first SIGINT, SIGTERM or SIGHUP end the router, then the pods, then the store; at the second kill them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import __version__
from common.config import load_yaml
from deploy.cluster_config import ClusterCommand, ClusterConfig
from deploy.cluster_plan import (
    base_url,
    curl_line,
    joined,
    make_mtls,
    operator_environment,
    plan_cluster,
    prometheus_targets,
    public_ports,
    reachable,
    write_private,
)
from deploy.cluster_record import ClusterRecord
from deploy.cluster_state import StateError
from deploy.model_download import fetch_models
from deploy.pod_process import PodProcess, PodSpec, PodStartError
from deploy.probes import RouterProbe, first_model, grpc_probe
from deploy.redis_server import redis_probe
from deploy.scratch import scratch_directory
from deploy.terminal import Terminal
from router.security.key_source import ENVIRONMENT
from router.security.keys import generate_key

STOP_MARGIN_S = 3.0  # for what a process does after its own grace period


def run_cluster(
    command: ClusterCommand,
    terminal: Terminal,
    record: ClusterRecord | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Runs the cluster until a signal. Returns the exit code; raises ConfigError."""
    env = {**os.environ, **fetch_models(command.model_sources, terminal)}
    try:
        with scratch_directory() as scratch:
            cluster = LocalCluster(command, terminal, scratch, env, record)
            return asyncio.run(cluster.run(on_ready or _say_how_to_stop(terminal)))
    except PodStartError as error:
        terminal.warn(f"baton: error: {error.message}")
        return 1


def _say_how_to_stop(terminal: Terminal) -> Callable[[], None]:
    return lambda: terminal.say(terminal.dim("Stop with Ctrl-C."))


class LocalCluster:
    """Owns the processes of one cluster, and hears what happens to them."""

    def __init__(
        self,
        command: ClusterCommand,
        terminal: Terminal,
        scratch: Path,
        env: Mapping[str, str],
        record: ClusterRecord | None,
    ) -> None:
        """`env` is the environment of the processes. Raises ConfigError if a port is taken."""
        config = command.config
        self._config = config
        self._terminal = terminal
        self._record = record
        self._stop_asked = asyncio.Event()
        port, grpc_port = public_ports(config)
        self._url = base_url(reachable(config.host), port)
        grpc_address = joined(reachable(config.host), grpc_port)
        self._port = port
        plan = plan_cluster(
            config, port, grpc_port, scratch, command.config_file, command.passed, env, command.parallel
        )
        for file, text in plan.files.items():
            write_private(file, text)
        self._targets_file = scratch / "prometheus-targets.json"
        write_private(self._targets_file, prometheus_targets(plan, joined(reachable(config.host), port)))
        self._stores = [PodProcess(redis.spec, redis_probe(redis), self) for redis in plan.stores]
        tls = make_mtls(scratch) if config.mtls else None
        self._pods = [PodProcess(spec, grpc_probe(spec.address, tls), self) for spec in plan.pods]
        names = {spec.address: spec.name for spec in plan.pods}
        key = generate_key()
        router = plan.router
        if has_api_keys(command, env):
            router = router._replace(env={**router.env, **operator_environment(env, key)})
        self._router = PodProcess(router, RouterProbe(reachable(config.host), port, names, key), self)
        self._processes = {each.spec.name: each for each in (*self._stores, *self._pods, self._router)}
        self._note(lambda record: record.planned(plan, self._url, grpc_address, _stop_s(config)))

    async def run(self, on_ready: Callable[[], None]) -> int:
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
                on_ready()
                await self._first_of(*supervisors)
        finally:
            self._note(lambda record: record.stopping())
            await self._stop()
            await asyncio.gather(*supervisors, return_exceptions=True)
        self._terminal.say("Stopped.")
        return 0

    def pod_line(self, name: str, line: str) -> None:
        """See PodObserver."""
        self._terminal.pod_line(name, line)

    def pod_ready(self, spec: PodSpec, seconds: float, *, again: bool) -> None:
        """See PodObserver."""
        self._terminal.pod_ready(spec, seconds, again=again)
        self._note(lambda record: record.pod_ready(spec.name, self._processes[spec.name].pid))

    def pod_died(self, spec: PodSpec, exit_code: int, delay_s: float) -> None:
        """See PodObserver."""
        self._terminal.pod_died(spec, exit_code, delay_s)
        self._note(lambda record: record.pod_died(spec.name))

    def _note(self, what: Callable[[ClusterRecord], None]) -> None:
        """Keeps the record of a cluster in the background true; one that cannot be written ends no cluster."""
        if self._record is None:
            return
        try:
            what(self._record)
        except StateError as error:
            self._terminal.warn(f"{error.message}; `baton status` may be out of date")

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
        each, model = "", f"model {config.engine.model.model or 'the demo model'}"
        if config.models:
            each, model = " each", f"models {', '.join(config.models)}"
        if not config.decode:
            topology = f"{config.prefill} prefill{each}, for embeddings and the like"
        elif config.prefill:
            topology = f"{config.prefill} prefill + {config.decode} decode{each}, connector {config.connector}"
        else:
            topology = f"{config.decode} decode{each}, colocated"
        self._terminal.say(f"{self._terminal.bold(f'Baton {__version__}')}: {topology}, {model}")

    async def _say_ready(self, seconds: float) -> None:
        model = await first_model(reachable(self._config.host), self._port)
        self._note(lambda record: record.ready(", ".join(self._config.models) or model or ""))
        self._terminal.say(f"\nReady in {seconds:.1f} s. Try:\n")
        self._terminal.say(f"  {curl_line(self._url, model, generates=self._config.decode > 0)}\n")
        self._terminal.say(f"Metrics at {self._url}/metrics, all targets for Prometheus in {self._targets_file}\n")


async def _all_ready(processes: Iterable[PodProcess]) -> None:
    for process in processes:
        await process.ready.wait()


def _stop_s(config: ClusterConfig) -> float:
    """Within which the cluster ends: the router, then the pods, then the store."""
    return 3 * (config.stop_grace_s + STOP_MARGIN_S)


def has_api_keys(command: ClusterCommand, env: Mapping[str, str]) -> bool:
    """Whether the router has API keys, from wherever."""
    file = load_yaml(command.config_file).section("router") if command.config_file else {}
    as_option = any(word.startswith("--api-keys-file=") for word in command.passed["router"])
    return bool(as_option or file.get("api_keys_file") or env.get(ENVIRONMENT, "").strip())
