"""Pods and two routers, started with the commands of `baton up` but nobody's supervision.

The second router is the peer: it serves the same pods, and tests let it die.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import yaml

from common.engine.config import CacheConfig, EngineConfig
from common.pb import pods_pb2, pods_pb2_grpc
from deploy.local_cluster import LOOPBACK, ClusterConfig, plan_cluster, write_private
from deploy.pod_process import PodSpec
from deploy.ports import pick_ports
from tests.e2e.faults.server_process import ServerProcess

START_DEADLINE_S = 120.0
SETTLE_DEADLINE_S = 60.0
CALL_DEADLINE_S = 30.0
NUM_BLOCKS = 512  # of a pod
ROUTER, PEER = "router", "peer"
_CLOCK_HOOK = Path(__file__).with_name("clock_hook")
# Few tokens per step and few requests at once, so that every stage lasts and queues form. A pod that was killed writes
# no more, and one that hung goes on before the quarantine of what it might write to has ended.
SETTINGS = {
    "prefill": {"max_num_batched_tokens": 32, "max_num_seqs": 3},
    "decode": {"max_num_batched_tokens": 32, "max_num_seqs": 3, "handoff_quarantine_s": 5},
    "router": {"remote_prefill": "prefer"},
}


class Fleet:
    """All processes of one cluster."""

    def __init__(self, connector: str, directory: Path, *, num_prefill: int = 2, num_decode: int = 2) -> None:
        """`directory` is empty, and the fleet's own."""
        self.connector = connector
        settings = directory / "settings.yaml"
        settings.write_text(yaml.safe_dump(SETTINGS))
        engine = EngineConfig(cache=CacheConfig(num_blocks=NUM_BLOCKS))
        config = ClusterConfig(prefill=num_prefill, decode=num_decode, connector=connector, engine=engine)
        ports = pick_ports(LOOPBACK, 4)
        plan = plan_cluster(config, ports[0], ports[1], directory, settings)
        for file, text in plan.files.items():
            write_private(file, text)

        def server(spec: PodSpec) -> ServerProcess:
            return ServerProcess(_with_clock_hook(spec), directory / f"{spec.name}.log")

        self.pods = [server(spec) for spec in plan.pods]
        self.router = server(_router(plan.router, ROUTER, ports[:2], ports[:2]))
        self.peer = server(_router(plan.router, PEER, ports[:2], ports[2:]))
        self._stores = [server(store.spec) for store in plan.stores]
        self._http = {ROUTER: f"http://{LOOPBACK}:{ports[0]}", PEER: f"http://{LOOPBACK}:{ports[2]}"}
        self._grpc = {ROUTER: f"{LOOPBACK}:{ports[1]}", PEER: f"{LOOPBACK}:{ports[3]}"}

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

    def url(self, router: ServerProcess) -> str:
        """HTTP address of a router."""
        return self._http[router.name]

    def target(self, router: ServerProcess) -> str:
        """gRPC address of a router."""
        return self._grpc[router.name]

    def wait_ready(self) -> None:
        """Returns when both routers would send requests to every pod."""
        for router in (self.router, self.peer):
            eventually(
                lambda router=router: self.metric(router, "baton_pod_ready") == len(self.pods),
                START_DEADLINE_S,
                lambda router=router: f"{router.name} does not reach every pod\n{self.output}",
            )

    def check_integrity(self) -> None:
        """Returns when every pod says that it is sound and holds nothing for anybody."""
        for pod in self.pods:
            eventually(lambda pod=pod: _is_idle(pod), SETTLE_DEADLINE_S, lambda pod=pod: f"{pod.name} is not idle")

    def metric(self, router: ServerProcess, name: str) -> float:
        """Sum over all labels; NaN while the router cannot be reached."""
        try:
            lines = httpx.get(f"{self.url(router)}/metrics", trust_env=False).text.splitlines()
        except httpx.TransportError:
            return float("nan")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    @property
    def output(self) -> str:
        """The last that every server said, for the message of a failure."""
        return "\n".join(f"--- {server.name}\n{server.output[-4000:]}" for server in self.servers)


@contextlib.contextmanager
def running_fleet(connector: str, directory: Path) -> Iterator[Fleet]:
    """A fleet that is ready; ended afterwards, and checked that it ends well if the test did."""
    fleet = Fleet(connector, directory)
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


def _is_idle(pod: ServerProcess) -> bool:
    with grpc.insecure_channel(pod.address) as channel:
        report = pods_pb2_grpc.PodStub(channel).CheckIntegrity(
            pods_pb2.CheckIntegrityRequest(), timeout=CALL_DEADLINE_S, wait_for_ready=True
        )
    assert not report.violations, f"{pod.name}: {list(report.violations)}"
    return bool(report.num_requests == report.num_blocks_in_use == report.num_transfers == 0)


def _router(spec: PodSpec, name: str, planned: list[int], ports: list[int]) -> PodSpec:
    """The planned router under another name, at other ports."""
    changed = dict(zip(map(str, planned), map(str, ports), strict=True))
    return spec._replace(name=name, command=tuple(changed.get(item, item) for item in spec.command))


def _with_clock_hook(spec: PodSpec) -> PodSpec:
    path = os.pathsep.join([str(_CLOCK_HOOK), spec.env["PYTHONPATH"]])
    return spec._replace(env={**spec.env, "PYTHONPATH": path})
