"""Pods and two routers, started with the commands of `baton up` but nobody's supervision.

The second router is the peer: it serves the same pods, and tests let it die.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import yaml

from common.engine.config import CacheConfig, EngineConfig
from common.pb import pods_pb2, pods_pb2_grpc
from deploy.cluster_config import LOOPBACK, ClusterConfig
from deploy.cluster_plan import plan_cluster, write_private
from deploy.pod_process import PodSpec
from deploy.ports import pick_ports
from deploy.scratch import scratch_directory
from tests.e2e.faults.network import Loopback, Namespaces, Network, namespaces
from tests.e2e.faults.server_process import ServerProcess

START_DEADLINE_S = 120.0
SETTLE_DEADLINE_S = 60.0
CALL_DEADLINE_S = 30.0
NUM_BLOCKS = 512  # of a pod
ROUTER, PEER = "router", "peer"
_CLOCK_HOOK = Path(__file__).with_name("clock_hook")
Settings = dict[str, dict[str, Any]]  # sections of a --config file
# A pod that hangs again and again, here by intent, is ejected for 3 s at most.
ROUTER_SETTINGS = {"remote_prefill": "prefer", "eject_base_s": 0.05}
# Few tokens per step and few requests at once, so that every stage lasts and queues form. A pod that was killed writes
# no more, and one that hung goes on before the quarantine of what it might write to has ended.
SETTINGS: Settings = {
    "prefill": {"max_num_batched_tokens": 32, "max_num_seqs": 2, "handoff_quarantine_s": 5},
    "decode": {"max_num_batched_tokens": 32, "max_num_seqs": 2},
    "router": ROUTER_SETTINGS,
}


class Size(NamedTuple):
    """How many pods."""

    num_prefill: int
    num_decode: int


class Fleet:
    """All processes of one cluster."""

    def __init__(
        self,
        connector: str,
        directory: Path,
        size: Size,
        settings: Settings,
        network: Network,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        """`directory` is empty, and the fleet's own; `num_blocks` are those of a pod."""
        self.connector = connector
        self._network = network
        settings_file = directory / "settings.yaml"
        settings_file.write_text(yaml.safe_dump(settings))
        engine = EngineConfig(cache=CacheConfig(num_blocks=num_blocks))
        self.blocks = directory / "blocks"  # of the shared-storage connector
        config = ClusterConfig(
            prefill=size.num_prefill,
            decode=size.num_decode,
            connector=connector,
            connector_path=str(self.blocks) if connector == "shared-storage" else "",
            engine=engine,
        )
        ports = pick_ports(LOOPBACK, 4)
        plan = plan_cluster(config, ports[0], ports[1], directory, settings_file)
        for file, text in plan.files.items():
            write_private(file, text.replace(LOOPBACK, network.host("redis")))
        hosts = {spec.address: f"{network.host(spec.name)}:{spec.address.rpartition(':')[2]}" for spec in plan.pods}

        def server(spec: PodSpec) -> ServerProcess:
            places = {LOOPBACK: network.host(spec.name), **hosts}
            command = tuple(places.get(item, item) for item in spec.command)
            placed = spec._replace(command=command, address=places.get(spec.address, spec.address))
            log = directory / f"{spec.name}.log"
            clock = directory / f"{spec.name}.clock"
            clock.write_text("0")
            return ServerProcess(_with_clock(placed, clock), log, within=network.within(spec.name), clock=clock)

        self.pods = [server(spec) for spec in plan.pods]
        self.router = server(_router(plan.router, ROUTER, ports[:2], ports[:2]))
        self.peer = server(_router(plan.router, PEER, ports[:2], ports[2:]))
        self._stores = [server(store.spec) for store in plan.stores]
        self.redis_url = plan.stores[0].url if plan.stores else ""  # of the redis connector
        host = network.host(ROUTER)
        self._http = {ROUTER: f"{host}:{ports[0]}", PEER: f"{host}:{ports[2]}"}
        self._grpc = {ROUTER: f"{host}:{ports[1]}", PEER: f"{host}:{ports[3]}"}
        network.expose([*hosts.values(), *self._http.values(), *self._grpc.values()])

    @property
    def servers(self) -> list[ServerProcess]:
        """Routers, pods, then the stores: the order in which they end."""
        return [self.router, self.peer, *self.pods, *self._stores]

    def server(self, name: str) -> ServerProcess:
        """The pod or router of that name."""
        return next(server for server in self.servers if server.name == name)

    def start(self) -> None:
        """Returns when all are on their way; those that run already are left alone, those that are stopped go on."""
        for server in reversed(self.servers):
            if server.is_running:
                server.send(signal.SIGCONT)
            else:
                server.start()

    def stop(self) -> None:
        """Asks all to end, and checks that they do and leave no process behind."""
        for server in self.servers:
            assert server.stop() == 0, f"{server.name} ended badly:\n{server.output}"

    def close(self) -> None:
        """Leaves nothing behind. Idempotent."""
        for server in self.servers:
            server.close()

    def http(self, router: ServerProcess) -> tuple[str, str | None]:
        """URL of a router, and the Unix socket through which it is reached, if it is."""
        address = self._http[router.name]
        target = self._network.reach(address)
        return f"http://{address}", target.removeprefix("unix:") if target.startswith("unix:") else None

    def target(self, server: ServerProcess) -> str:
        """Where a gRPC client in the test reaches a router or pod."""
        return self._network.reach(self._grpc.get(server.name, server.address))

    def wait_ready(self) -> None:
        """Returns when both routers would send requests to every pod."""
        for router in (self.router, self.peer):
            eventually(partial(self._reaches_all, router), START_DEADLINE_S, partial(self._unready, router))

    def settle(self) -> None:
        """Returns when everything is ready again and nothing is under way."""
        self.wait_ready()
        self.check_integrity()
        for router in (self.router, self.peer):
            eventually(partial(self._serves_none, router), SETTLE_DEADLINE_S, lambda: "a router has requests under way")

    def check_integrity(self) -> None:
        """Returns when every pod says that it is sound and holds nothing for anybody."""
        for pod in self.pods:
            eventually(partial(self._is_idle, pod), SETTLE_DEADLINE_S, lambda: f"a pod is not idle\n{self.output}")

    def cut(self, one: str, other: str) -> None:
        """Nothing that one of these pods sends arrives at the other. Only of a fleet whose pods are separate."""
        assert isinstance(self._network, Namespaces)
        self._network.cut(one, other)

    def mend(self, one: str, other: str) -> None:
        """Undoes `cut`."""
        assert isinstance(self._network, Namespaces)
        self._network.mend(one, other)

    def metric(self, router: ServerProcess, name: str) -> float:
        """Sum over all labels; NaN while the router cannot be reached."""
        url, socket = self.http(router)
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=socket)) as client:
                lines = client.get(f"{url}/metrics").text.splitlines()
        except httpx.TransportError:
            return float("nan")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def _reaches_all(self, router: ServerProcess) -> bool:
        return self.metric(router, "baton_router_pod_ready") == len(self.pods)

    def _unready(self, router: ServerProcess) -> str:
        return f"{router.name} does not reach every pod\n{self.output}"

    def _serves_none(self, router: ServerProcess) -> bool:
        return self.metric(router, "baton_router_num_requests_inflight") == 0

    def _is_idle(self, pod: ServerProcess) -> bool:
        with grpc.insecure_channel(self.target(pod)) as channel:
            report = pods_pb2_grpc.PodStub(channel).CheckIntegrity(
                pods_pb2.CheckIntegrityRequest(), timeout=CALL_DEADLINE_S, wait_for_ready=True
            )
        assert not report.violations, f"{pod.name}: {list(report.violations)}"
        return bool(report.num_requests == report.num_blocks_in_use == report.num_transfers == 0)

    @property
    def output(self) -> str:
        """The last that every server said, for the message of a failure."""
        return "\n".join(f"--- {server.name}\n{server.output[-4000:]}" for server in self.servers)


@contextlib.contextmanager
def running_fleet(
    connector: str,
    size: Size,
    *,
    settings: Settings = SETTINGS,
    num_blocks: int = NUM_BLOCKS,
    separate: bool = False,
) -> Iterator[Fleet]:
    """A fleet that is ready; ended afterwards, and checked that it ends well if the test did.

    Separate: each pod in a network namespace of its own.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        names = [*(f"prefill-{index}" for index in range(size.num_prefill))]
        names += [f"decode-{index}" for index in range(size.num_decode)]
        network = stack.enter_context(namespaces(names, directory)) if separate else Loopback()
        yield from _run(Fleet(connector, directory, size, settings, network, num_blocks))


def _run(fleet: Fleet) -> Iterator[Fleet]:
    try:
        fleet.start()
        fleet.wait_ready()
        yield fleet
        fleet.start()
        fleet.wait_ready()
        fleet.stop()
    finally:
        fleet.close()


def eventually(condition: Callable[[], bool], deadline_s: float, problem: Callable[[], str]) -> None:
    """Returns once the condition holds; says what the problem is if it does not within the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"after {deadline_s:g} s: {problem()}"
        time.sleep(0.02)


def _router(spec: PodSpec, name: str, planned: list[int], ports: list[int]) -> PodSpec:
    """The planned router under another name, at other ports."""
    changed = dict(zip(map(str, planned), map(str, ports), strict=True))
    return spec._replace(name=name, command=tuple(changed.get(item, item) for item in spec.command))


def _with_clock(spec: PodSpec, clock: Path) -> PodSpec:
    """The server with a wall clock that is ahead by what the file says, in seconds."""
    path = os.pathsep.join([str(_CLOCK_HOOK), spec.env["PYTHONPATH"]])
    return spec._replace(env={**spec.env, "PYTHONPATH": path, "BATON_TEST_CLOCK": str(clock)})
