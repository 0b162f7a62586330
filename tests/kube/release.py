"""A release of the chart, run by `podman kube play`; probes and controllers are played by the test."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.compose.engine import Engine
from tests.compose.traffic import Front, wait
from tests.deploy.chart import Manifest, Rendered
from tests.deploy.probes import passes, port_number
from tests.kube.manifests import claims, dns_names, pod_manifests

NETWORK = "baton-kube"


@dataclass(frozen=True)
class Pod:
    """One played pod."""

    name: str
    id: str
    container_id: str
    address: str
    template: Manifest  # as the chart renders it, with probes and ports
    file: Path  # what was played

    @property
    def container(self) -> Manifest:
        (container,) = self.template["spec"]["containers"]
        return dict(container)

    def endpoint(self, port: str) -> str:
        """Address and port, by the port's name."""
        return f"{self.address}:{port_number(self.container, port)}"

    @property
    def is_ready(self) -> bool:
        """Whether its probes pass: the one for its start, if it has one, then the one for readiness."""
        probes = [name for name in ("startupProbe", "readinessProbe") if name in self.container]
        return all(passes(self.container, name, self.address) for name in probes)


class Release:
    """All pods of one release."""

    def __init__(self, engine: Engine, rendered: Rendered, directory: Path) -> None:
        self._engine = engine
        self._rendered = rendered
        self._directory = directory
        self._numbers = itertools.count()
        self.pods: list[Pod] = []

    def install(self) -> None:
        """Plays everything, in the order of the manifests, and returns when all pods are ready."""
        self._engine.client("network", "create", NETWORK)
        if owned := claims(self._rendered):
            self._play(self._directory / "claims.yaml", owned)
        for workload in self._rendered.of_kind("Deployment"):
            for _ in range(workload["spec"]["replicas"]):
                self.start(workload["metadata"]["name"])
        self.wait_ready(self.pods)

    def uninstall(self) -> None:
        """Takes all down, also what `kube down` leaves: the volumes of pods and claims, and the network."""
        for file in sorted(self._directory.glob("*.yaml")):
            self._engine.client("kube", "down", str(file))
        self._remove_volumes()
        self._engine.client("network", "rm", NETWORK)

    def start(self, workload_name: str) -> Pod:
        """Plays one more pod of a Deployment, as its controller would."""
        workload = self._rendered.named("Deployment", workload_name)
        name = f"{workload_name}-{next(self._numbers)}"
        file = self._directory / f"{name}.yaml"
        aliases = [f"alias={alias}" for alias in dns_names(self._rendered, workload)]
        printed = self._play(file, pod_manifests(self._rendered, workload, name), aliases)
        (pod_id,) = re.findall(r"^Pod:\n([0-9a-f]{64})$", printed, re.MULTILINE)
        template = workload["spec"]["template"]
        container_id, address = self._inspect(pod_id, template["spec"]["containers"][0]["name"])
        pod = Pod(name, pod_id, container_id, address, template, file)
        self.pods.append(pod)
        return pod

    def delete(self, pod: Pod, *, at_once: bool = False) -> int:
        """Ends a pod, in its grace period or at once, and removes it. Returns its container's exit code."""
        grace_s = 0 if at_once else pod.template["spec"]["terminationGracePeriodSeconds"]
        self._engine.client("pod", "stop", "--time", str(grace_s), pod.id)
        code = int(self._engine.client("inspect", "--format", "{{.State.ExitCode}}", pod.container_id))
        self._engine.client("kube", "down", str(pod.file))
        pod.file.unlink()
        self.pods.remove(pod)
        self._remove_volumes(f"{pod.name}-")
        return code

    def wait_ready(self, pods: Sequence[Pod]) -> None:
        """Returns once the probes of the pods pass."""
        for pod in pods:
            wait(lambda each=pod: each.is_ready, f"the probes of {pod.name} pass", self.logs)

    def of(self, component: str) -> list[Pod]:
        """The pods of a component."""
        label = "app.kubernetes.io/component"
        return [pod for pod in self.pods if pod.template["metadata"]["labels"][label] == component]

    @property
    def front(self) -> Front:
        """Where the router serves."""
        (router,) = self.of("router")
        return Front(f"http://{router.endpoint('http')}", router.endpoint("grpc"))

    def pid(self, pod: Pod) -> int:
        """Process id, on this machine, of the container's first process; 0 while there is none."""
        return int(self._engine.client("inspect", "--format", "{{.State.Pid}}", pod.container_id))

    def logs(self) -> str:
        """The last lines of all pods."""
        tails = [self._engine.client("logs", "--tail", "20", pod.container_id, check=False) for pod in self.pods]
        return "\n".join(f"{pod.name}:\n{tail}" for pod, tail in zip(self.pods, tails, strict=True))

    def remains(self) -> Iterator[str]:
        """Containers, pods, volumes, Secrets and networks that are there."""
        for kind in ("container", "pod", "volume", "secret", "network"):
            yield from (f"{kind} {name}" for name in self._names(kind) if name != "podman")

    def _remove_volumes(self, prefix: str = "") -> None:
        """Removes volumes whose names start so."""
        for name in self._names("volume"):
            if name.startswith(prefix):
                self._engine.client("volume", "rm", name)

    def _names(self, kind: str) -> list[str]:
        every = ["--all"] if kind == "container" else []
        field = "Names" if kind == "container" else "Name"
        return self._engine.client(kind, "ls", *every, "--format", f"{{{{.{field}}}}}").split()

    def _play(self, file: Path, manifests: Sequence[Manifest], options: Sequence[str] = ()) -> str:
        file.write_text(yaml.safe_dump_all(manifests), encoding="utf-8")
        network = ":".join([NETWORK, ",".join(options)]).rstrip(":")
        return self._engine.client("kube", "play", "--network", network, str(file))

    def _inspect(self, pod_id: str, container_name: str) -> tuple[str, str]:
        """Id of the container, and the pod's address, which its infra container has."""
        listed = self._engine.client(
            "ps", "--all", "--no-trunc", "--filter", f"pod={pod_id}", "--format", "{{.ID}} {{.Names}}"
        )
        ids = {name: container_id for container_id, name in (line.split() for line in listed.splitlines())}
        (container_id,) = (each for name, each in ids.items() if name.endswith(f"-{container_name}"))
        (infra_id,) = (each for name, each in ids.items() if name.endswith("-infra"))
        template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return container_id, self._engine.client("inspect", "--format", template, infra_id).strip()
