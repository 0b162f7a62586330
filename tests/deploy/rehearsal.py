"""A cluster manager in miniature: runs what the chart renders as processes of this machine, by the chart's own rules.

Each pod has an address of its own in 127.0.0.0/8, so that all keep the ports of the chart. Volumes are directories,
which replace mount paths in arguments, environment and config files. What the rules leave to time (minReadySeconds, the
preStop sleep, DNS, how often routers try a pod again) passes SPEED times as fast; grace periods do not.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.chart import NAMESPACE, ROOT, Manifest, Rendered
from tests.deploy.probes import passes, port_number
from tests.redis_server import redis_binary

SPEED = 20.0
_DNS_INTERVAL_S = 5.0 + 5.0  # the router's lookups, and the TTL of a headless service
START_DEADLINE_S = 90.0
_EXPANSION = re.compile(r"\$\((\w+)\)")
_KEPT = ("/dev/shm",)  # a mount that is there on any machine
_RECREATE = {"maxSurge": 0, "maxUnavailable": 1}  # as the strategy Recreate does with one replica
_NO_ENV: Mapping[str, str] = {}
_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(ROOT),
    "UCX_LOG_LEVEL": "fatal",
}


@dataclass
class Pod:
    """One running pod of one container."""

    name: str
    address: str
    template: Manifest
    process: subprocess.Popen[bytes]
    log: Path
    terminating: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def container(self) -> Manifest:
        (container,) = self.template["spec"]["containers"]
        return dict(container)

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def grace_period_s(self) -> float:
        return float(self.template["spec"].get("terminationGracePeriodSeconds", 30))

    def port(self, port: str | int) -> int:
        """The number of a port that a probe or a service names."""
        return port_number(self.container, port)

    def passes(self, probe_name: str) -> bool:
        """Runs a probe until it passes, or has failed as often as the kubelet lets it."""
        most = self.container[probe_name].get("failureThreshold", 3) if probe_name != "startupProbe" else 1
        return any(passes(self.container, probe_name, self.address) for _ in range(most))

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Rehearsal:
    """All pods of one release. A context manager, which ends them."""

    def __init__(self, directory: Path, secrets: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """`secrets` are those that the chart expects: file contents by name and key."""
        self._directory = directory
        self._secrets = secrets or {}
        self._numbers = itertools.count(1)
        self._subnet = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
        self._names = directory / "names.json"
        self._lock = threading.Lock()
        self.rendered = Rendered([])
        self.pods: list[Pod] = []
        directory.mkdir(parents=True, exist_ok=True)

    # --- what an operator does ---

    def install(self, rendered: Rendered) -> None:
        """Starts all pods, and returns when they are ready."""
        self.rendered = rendered
        for workload in sorted(rendered.of_kind("Deployment"), key=_is_of_baton):
            for _ in range(workload["spec"].get("replicas", 1)):
                self.start(workload)
        self.wait_ready(self.pods)

    def upgrade(self, rendered: Rendered) -> None:
        """Replaces pods whose template has changed, and follows new numbers of replicas, workload by workload."""
        before, self.rendered = self.rendered, rendered
        for workload in rendered.of_kind("Deployment"):
            name = workload["metadata"]["name"]
            if before.named("Deployment", name)["spec"]["template"] != workload["spec"]["template"]:
                self.roll(name)
            self.scale(name, workload["spec"]["replicas"])

    def roll(self, name: str) -> None:
        """A rolling update within maxSurge and maxUnavailable."""
        workload = self.rendered.named("Deployment", name)
        rules = workload["spec"]["strategy"].get("rollingUpdate", _RECREATE)
        old = self.of(name)
        while old:
            for _ in range(min(rules["maxSurge"], len(old))):
                self.start(workload)
            self._wait_available(workload)
            leaving = [old.pop(0) for _ in range(min(max(1, rules["maxSurge"]), len(old)))]
            self._terminate(leaving)
            if not rules["maxSurge"]:
                for _ in leaving:
                    self.start(workload)
                self._wait_available(workload)

    def scale(self, name: str, replicas: int) -> None:
        """Starts or terminates pods of a workload, the youngest first, and waits for it."""
        workload = self.rendered.named("Deployment", name)
        pods = self.of(name)
        for _ in range(replicas - len(pods)):
            self.start(workload)
        self._terminate(pods[replicas:])
        self._wait_available(workload)

    def lose(self, pod: Pod) -> None:
        """Kills a pod as the loss of its machine does, and starts another one in its place, not ready yet."""
        workload = self.rendered.named("Deployment", pod.name.rpartition("-")[0])
        os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait()
        self._forget(pod)
        self.start(workload)

    def terminate(self, pod: Pod) -> threading.Thread:
        """Begins to end a pod: off the endpoints at once, preStop, SIGTERM, SIGKILL after the grace period."""
        pod.terminating = True
        self._publish()
        ending = threading.Thread(target=self._end, args=(pod,), name=f"end {pod.name}")
        ending.start()
        return ending

    def run_job(self, rendered: Rendered, env: Mapping[str, str]) -> Path:
        """Runs the only Job, with some environment more. Returns the directory of its model volume."""
        (job,) = rendered.of_kind("Job")
        pod = self.start(job, env)
        assert pod.process.wait(START_DEADLINE_S) == 0, pod.said
        self._forget(pod)
        return self._directory / "claims" / "demo-baton-model"

    # --- what there is ---

    def of(self, name: str) -> list[Pod]:
        """The pods of a workload that are not terminating."""
        with self._lock:
            return [pod for pod in self.pods if pod.name.rpartition("-")[0] == name and not pod.terminating]

    def endpoints(self, service_name: str, port_name: str) -> list[str]:
        """host:port behind a service, as a load balancer knows them: of pods that are ready and not terminating."""
        service = self.rendered.named("Service", service_name)["spec"]
        (target,) = (port["targetPort"] for port in service["ports"] if port["name"] == port_name)
        pods = [pod for pod in self._selected(service["selector"]) if not pod.terminating]
        return [f"{pod.address}:{pod.port(target)}" for pod in pods if pod.passes("readinessProbe")]

    def wait_ready(self, pods: list[Pod]) -> None:
        """Returns when the startup and readiness probes of all pass."""
        for pod in pods:
            probe = pod.container.get("startupProbe")
            deadline_s = START_DEADLINE_S
            if probe is not None:
                deadline_s = min(deadline_s, probe["failureThreshold"] * probe["periodSeconds"])
                self._wait(pod, "startupProbe", deadline_s)
            self._wait(pod, "readinessProbe", deadline_s)

    def start(self, workload: Manifest, more_env: Mapping[str, str] = _NO_ENV) -> Pod:
        """Starts one pod of a workload."""
        template = workload["spec"]["template"]
        number = next(self._numbers)
        name = f"{workload['metadata']['name']}-{number}"
        address = f"{self._subnet}.{number if _is_of_baton(workload) else 250}"  # others keep that of their service
        directory = self._directory / name
        directory.mkdir()
        (container,) = template["spec"]["containers"]
        mounts = self._mount(template["spec"], container, directory, address)
        env = {item["name"]: _value_of(item, name, container) for item in container.get("env", [])}
        arguments = [*container.get("command", ["baton"]), *container.get("args", [])]
        arguments = [_EXPANSION.sub(lambda found: env[found[1]], text) for text in arguments]
        arguments = [address if text == "0.0.0.0" else text for text in arguments]
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._program(arguments[0]), *(_relocated(text, mounts) for text in arguments[1:])],
                cwd=directory,
                env=_ENVIRONMENT | {key: _relocated(value, mounts) for key, value in env.items()} | dict(more_env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        pod = Pod(name, address, template, process, log)
        with self._lock:
            self.pods.append(pod)
        self._publish()
        return pod

    def _program(self, command: str) -> list[str]:
        if command == "redis-server":
            return [redis_binary()]
        assert command == "baton"
        arguments = [str(self._names), str(_DNS_INTERVAL_S / SPEED), str(SPEED)]
        return [sys.executable, "-m", "tests.deploy.in_cluster", *arguments]

    def _mount(self, spec: Manifest, container: Manifest, directory: Path, address: str) -> dict[str, str]:
        """Fills a directory for each volume. Returns directories by mount path."""
        mounts: dict[str, str] = {}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            if mount["mountPath"] in _KEPT:
                continue
            volume = volumes[mount["name"]]
            if "persistentVolumeClaim" in volume:
                path = self._directory / "claims" / volume["persistentVolumeClaim"]["claimName"]
            else:
                path = directory / mount["name"]
            path.mkdir(parents=True, exist_ok=True)
            mounts[mount["mountPath"]] = str(path)
        for mount in container["volumeMounts"]:
            for name, text in self._files(volumes[mount["name"]]).items():
                text = self._with_addresses(_relocated(text, mounts)).replace("host: 0.0.0.0", f"host: {address}")
                (Path(mounts[mount["mountPath"]]) / name).write_text(text)
        return mounts

    def _files(self, volume: Manifest) -> dict[str, str]:
        if "configMap" in volume:
            return dict(self.rendered.named("ConfigMap", volume["configMap"]["name"])["data"])
        if "secret" not in volume:
            return {}
        name = volume["secret"]["secretName"]
        files = dict(self._secrets[name]) if name in self._secrets else self._own_secret(name)
        items = volume["secret"].get("items")
        return files if items is None else {item["path"]: files[item["key"]] for item in items}

    def _with_addresses(self, text: str) -> str:
        """Replaces the names of services with an address of their own in URLs."""
        for service in self.rendered.of_kind("Service"):
            pods = self._selected(service["spec"]["selector"])
            if service["spec"].get("clusterIP") != "None" and pods:
                text = text.replace(f"@{service['metadata']['name']}:", f"@{pods[0].address}:")
        return text

    def _own_secret(self, name: str) -> dict[str, str]:
        secret = self.rendered.named("Secret", name)
        plain = {key: base64.b64decode(text).decode() for key, text in secret.get("data", {}).items()}
        return plain | secret.get("stringData", {})

    # --- what a cluster manager does ---

    def _wait_available(self, workload: Manifest) -> None:
        pods = self.of(workload["metadata"]["name"])
        self.wait_ready(pods)
        time.sleep(workload["spec"].get("minReadySeconds", 0) / SPEED)  # a rule of the chart, not a guess

    def _terminate(self, pods: list[Pod]) -> None:
        endings = [self.terminate(pod) for pod in pods]
        for ending in endings:
            ending.join()

    def _end(self, pod: Pod) -> None:
        began = time.monotonic()
        sleep_s = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        time.sleep(sleep_s / SPEED)
        pod.process.send_signal(signal.SIGTERM)
        try:
            pod.process.wait(max(0.0, pod.grace_period_s - sleep_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            os.killpg(pod.process.pid, signal.SIGKILL)
            pod.process.wait()
        self._forget(pod)

    def _forget(self, pod: Pod) -> None:
        with self._lock:
            self.pods.remove(pod)
        self._publish()

    def _publish(self) -> None:
        """Writes the names of headless services: all their pods, ready or not."""
        names = {}
        for service in self.rendered.of_kind("Service"):
            pods = self._selected(service["spec"]["selector"])
            if service["spec"].get("clusterIP") == "None":
                assert service["spec"]["publishNotReadyAddresses"]
            name = f"{service['metadata']['name']}.{NAMESPACE}.svc.cluster.local"
            names[name] = [pod.address for pod in pods]
        with self._lock:
            draft = self._names.with_suffix(".new")
            draft.write_text(json.dumps(names))
            draft.rename(self._names)

    def _selected(self, selector: Mapping[str, str]) -> list[Pod]:
        with self._lock:
            return [pod for pod in self.pods if selector.items() <= pod.labels.items()]

    def _wait(self, pod: Pod, probe: str, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not pod.passes(probe):
            assert pod.process.poll() is None, f"{pod.name} ended with {pod.process.returncode}:\n{pod.said}"
            assert time.monotonic() < deadline, f"{pod.name}: {probe} does not pass:\n{pod.said}"
            time.sleep(0.1)

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                os.killpg(pod.process.pid, signal.SIGKILL)
            pod.process.wait()


def _is_of_baton(workload: Manifest) -> bool:
    """Others, such as Redis, start first."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container.get("command", ["baton"]) == ["baton"]


def _value_of(item: Manifest, pod_name: str, container: Manifest) -> str:
    if "value" in item:
        return str(item["value"])
    source = item["valueFrom"]
    if "fieldRef" in source:
        return {"metadata.name": pod_name}[source["fieldRef"]["fieldPath"]]
    kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
    assert source["resourceFieldRef"]["containerName"] == container["name"]
    return str(_cores(str(container["resources"][kind][resource])))


def _cores(quantity: str) -> int:
    return math.ceil(float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity))


def _relocated(text: str, mounts: Mapping[str, str]) -> str:
    """Replaces mount paths by directories, the longest first."""
    paths = sorted(mounts, key=len, reverse=True)
    pattern = re.compile("|".join(rf"{re.escape(path)}(?=/|\b)(?![\w-])" for path in paths))
    return pattern.sub(lambda found: mounts[found[0]], text)
