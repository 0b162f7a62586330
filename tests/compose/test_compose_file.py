"""What deploy/compose says fits together, and is what Baton's processes take. A typo in it fails here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from common import __version__
from common.config import parse
from common.pod.config import PodConfig
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from tests.compose.compose_file import DIRECTORY, Service, document, services, used_variables, variables
from tests.compose.images import ROOT, STAND_INS

CONFIGS: dict[str, type[msgspec.Struct]] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
OURS = [service for service in services().values() if service.target]
PROFILES = {"shared-storage", "redis", "nixl", "cpu", "gpu"}


def settings_of(service: Service) -> msgspec.Struct:
    """What the service's process reads from its command and the files that it mounts."""
    verb, role, *options = service.command
    assert verb == "serve"
    options = [word.replace("/etc/baton/", f"{DIRECTORY}/config/") for word in options]
    return parse(CONFIGS[role], options, prog=role, section=role)


def test_every_variable_has_a_value_and_every_value_a_use() -> None:
    used = used_variables()
    assert {name for name, has_default in used.items() if not has_default} <= variables().keys()
    assert variables().keys() - used.keys() == {"COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME"}
    assert variables()["BATON_VERSION"] == __version__


@pytest.mark.parametrize("service", OURS, ids=lambda service: service.name)
def test_a_command_is_one_that_its_process_takes(service: Service) -> None:
    settings = settings_of(service)
    port = settings.port if isinstance(settings, PodConfig) else settings.grpc_port  # type: ignore[attr-defined]
    assert service.health == ["CMD", "baton", "health", f"127.0.0.1:{port}"]
    if isinstance(settings, PodConfig):
        connector = next((each for each in ("redis", "nixl") if each in service.name), None)
        assert settings.connector == (connector or ("nixl" if "gpu" in service.name else "shared-storage"))
        assert settings.connector_path in ("", *service.volumes)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_profile_has_one_pair_of_pods_that_the_router_finds(profile: str) -> None:
    running = services(profile)
    pods = [each for each in running.values() if each.target in ("cpu", "cuda")]
    assert sorted(each.command[1] for each in pods) == ["decode", "prefill"]
    assert {each.target for each in pods} == {"cuda" if profile == "gpu" else "cpu"}
    router = settings_of(running["router"])
    assert isinstance(router, RouterConfig)
    for pod in pods:
        settings = settings_of(pod)
        assert isinstance(settings, PodConfig)
        (address,) = getattr(router, pod.command[1])
        scheme, name, port = address.split(":")
        assert (scheme, name in pod.aliases, int(port)) == ("dns", True, settings.port)
        assert f"{name}:{settings.metrics_port}" in prometheus_targets()
    for service in running.values():
        assert all(running[name].health for name in service.after)
    assert "router:8000" in prometheus_targets()


def prometheus_targets() -> set[str]:
    jobs = yaml.safe_load((DIRECTORY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    static = {target for job in jobs for group in job.get("static_configs", ()) for target in group["targets"]}
    by_name = [group for job in jobs for group in job.get("dns_sd_configs", ())]
    return static | {f"{name}:{group['port']}" for group in by_name for name in group["names"]}


def test_mounts_are_there_and_named_volumes_declared() -> None:
    for service in services().values():
        for source in service.volumes.values():
            if source.startswith("."):
                assert (DIRECTORY / source).is_dir(), f"{service.name}: {source}"
            else:
                assert source in document()["volumes"], f"{service.name}: {source}"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    grafana = services()["grafana"]
    provisioning = DIRECTORY / grafana.volumes["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/baton.yaml").read_text())["providers"]
    dashboards = DIRECTORY / grafana.volumes[provider["options"]["path"]]
    assert [json.loads(path.read_text())["title"] for path in dashboards.glob("*.json")] == ["Baton"]
    home = Path(grafana.environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (dashboards / home.name).is_file()
    assert str(home.parent) == provider["options"]["path"]


def test_images_are_targets_of_the_dockerfile_and_pinned() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^FROM runtime AS (\w+)$", dockerfile, re.MULTILINE))
    assert {service.target for service in OURS} == targets
    for service in services().values():
        expected = f"baton-{service.target}:{__version__}" if service.target else STAND_INS[service.name]
        assert service.image == expected


def test_containers_have_no_rights_that_they_do_not_need() -> None:
    for name, entry in document()["services"].items():
        assert entry["read_only"], name
        assert entry["cap_drop"] == ["ALL"], name
        assert entry["security_opt"] == ["no-new-privileges:true"], name
        for port in entry.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(linter), "deploy/docker/Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_pod_of_two_nodes() -> None:
    """compose.nodes.yaml, on top of the file."""
    added = document("compose.nodes.yaml")["services"]
    running = {name: services("shared-storage").get(name) for name in added}
    assert [name for name, each in running.items() if each is None] == ["decode-node"]
    settings = {}
    for name, entry in added.items():
        known = running[name] or services()["decode"]
        settings[name] = settings_of(known._replace(command=[str(word) for word in entry["command"]]))
        assert settings[name].tls.cluster_ca == "/certs/ca.pem"
        assert "./certs:/certs:ro" in entry["volumes"]
        if name != "decode-node":
            assert entry["command"][:4] == known.command[:4]
    decode, node = settings["decode"], settings["decode-node"]
    parallel = msgspec.structs.replace(decode.parallel, node_rank=1)
    assert msgspec.structs.replace(node, parallel=parallel) == node
    assert (parallel.nnodes, parallel.tensor_parallel_size, parallel.master_addr) == (2, 2, "decode")
    base = document()["services"]["decode"]
    for name in ("image", "read_only", "tmpfs", "cap_drop", "security_opt", "restart", "profiles"):
        assert added["decode-node"][name] == base[name]
