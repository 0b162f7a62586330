"""The launcher's record of its cluster in the background, for `baton status`, `logs`, `down` and clients."""

from __future__ import annotations

import os
import socket
import time

from deploy.cluster_plan import ClusterPlan
from deploy.cluster_state import Claim, ClusterState, PodPhase, PodState, start_time_of


class ClusterRecord:
    """Keeps the state of a claimed cluster. Methods raise StateError if it cannot be written."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._state = initial_state(claim.name, os.getpid())
        claim.save(self._state)

    def planned(self, plan: ClusterPlan, url: str, grpc_address: str, stop_s: float) -> None:
        """It is known what will be started."""
        state = self._state
        state.url, state.grpc_address, state.stop_s = url, grpc_address, stop_s
        state.store = plan.shared_store
        for spec in (*(redis.spec for redis in plan.stores), *plan.pods, plan.router):
            address = url if spec is plan.router else spec.address
            state.pods.append(
                PodState(
                    spec.name,
                    spec.role,
                    address,
                    plan.metrics_ports.get(spec.name),
                    since=time.time(),
                    model=spec.model,
                )
            )
        self._claim.save(state)

    def pod_ready(self, name: str, pid: int | None) -> None:
        """A process serves."""
        self._turn(name, "ready", pid)

    def pod_died(self, name: str) -> None:
        """A process ended, and will be started again."""
        self._turn(name, "restarting", None).restarts += 1
        self._claim.save(self._state)

    def ready(self, model: str) -> None:
        """All of them serve."""
        self._state.phase = "ready"
        self._state.model = model
        self._claim.save(self._state)

    def stopping(self) -> None:
        """The cluster ends."""
        self._state.phase = "stopping"
        self._claim.save(self._state)

    def _turn(self, name: str, phase: PodPhase, pid: int | None) -> PodState:
        (pod,) = (pod for pod in self._state.pods if pod.name == name)
        pod.phase, pod.pid, pod.since = phase, pid, time.time()
        self._claim.save(self._state)
        return pod


def initial_state(name: str, pid: int) -> ClusterState:
    """The state of a cluster whose launcher was just started."""
    return ClusterState(name, pid, start_time_of(pid), socket.gethostname(), started_at=time.time(), pods=[])
