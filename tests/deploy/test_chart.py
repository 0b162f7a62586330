"""What the chart renders is what Kubernetes and Baton take; values that contradict each other are refused."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import helm_python
import pytest
import yaml

from common import __version__
from common.config import Section, build
from tests.deploy.chart import CHART, Rendered, chart, nested, render
from tests.deploy.kubernetes_schemas import VERSIONS, validate, violations
from tests.deploy.values import EVERYTHING, pairwise, values_of
from tests.deploy.values_schema import CONFIGS, CONNECTORS_FILE, FILE, connectors, schema

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads(FILE.read_text())
MATRIX = list(pairwise())


def settings_of(rendered: Rendered, role: str) -> Any:
    """The settings of a role as Baton reads them. Raises ConfigError."""
    for config_map in rendered.of_kind("ConfigMap"):
        if config_map["metadata"]["labels"]["app.kubernetes.io/component"] == role:
            document = yaml.safe_load(config_map["data"]["baton.yaml"])
            return build(CONFIGS[role], None, Section(document).section(role))
    return None


def check(rendered: Rendered, versions: tuple[str, ...]) -> None:
    for version in versions:
        for manifest in rendered.manifests:
            validate(manifest, version)
    assert list(violations(rendered)) == []
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered.manifests]
    assert len(names) == len(set(names))
    for role in CONFIGS:
        settings = settings_of(rendered, role)
        assert settings is not None or role == "prefill"
    check_references(rendered)


def check_references(rendered: Rendered) -> None:
    """Claims, config maps and service accounts that pods name are there, or are the user's own."""
    known = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered.manifests}
    theirs = {"kv", "models", "baton", "blocks", "keys", "public", "router-tls", "prefill-tls", "decode-tls"}
    secrets = {manifest["spec"]["secretName"] for manifest in rendered.of_kind("Certificate")}
    known |= {("Secret", name) for name in secrets}
    for workload, template in rendered.pod_templates():
        spec = template["spec"]
        named = [("ServiceAccount", spec.get("serviceAccountName", "baton"))]
        for volume in spec["volumes"]:
            named += [("ConfigMap", volume["configMap"]["name"])] if "configMap" in volume else []
            named += [("Secret", volume["secret"]["secretName"])] if "secret" in volume else []
            claim = volume.get("persistentVolumeClaim")
            named += [("PersistentVolumeClaim", claim["claimName"])] if claim else []
        for kind, name in named:
            assert (kind, name) in known or name in theirs, f"{workload}: no {kind} {name}"
        mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}, workload


@pytest.mark.parametrize("version", VERSIONS)
def test_the_defaults(version: str) -> None:
    check(render(), (version,))


def test_everything_at_once() -> None:
    rendered = render(values_of(EVERYTHING))
    assert {"ScaledObject", "PrometheusRule", "Certificate", "HTTPRoute", "NetworkPolicy", "Job"} <= {
        manifest["kind"] for manifest in rendered.manifests
    }
    check(rendered, VERSIONS[-1:])


def test_the_matrix_is_large_enough() -> None:
    assert len(MATRIX) >= 30


@pytest.mark.deploy
@pytest.mark.parametrize(
    "chosen", MATRIX, ids=lambda chosen: "-".join(map(str.replace, chosen.values(), " " * 99, "_" * 99))
)
def test_any_two_options_together(chosen: dict[str, str]) -> None:
    values = values_of(chosen)
    if chosen["autoscaling"] == "keda":
        values.setdefault("monitoring", {})["enabled"] = True
    check(render(values), VERSIONS)


def test_settings_reach_the_processes() -> None:
    rendered = render(values_of(EVERYTHING))
    router, decode = settings_of(rendered, "router"), settings_of(rendered, "decode")
    serving = router.serving
    assert (serving.request_timeout_s, serving.routing.max_index_blocks) == (120, 4_000_000)
    assert router.shutdown_grace_s == 2.5
    assert router.decode == ["dns:demo-baton-decode.llm.svc.cluster.local:8200"]
    assert router.tls.cluster_tls_name == decode.tls.cluster_tls_name == "demo-baton-pods"
    assert serving.served_models.model == decode.model.model == "/models/model"
    assert decode.model.device == "cuda"
    assert decode.connector_options == {"store": "redis", "host_bytes": "8GiB"}
    assert decode.scheduler.target_itl_ms is None


def test_clients_behind_a_proxy_do_not_share_the_bound_of_one() -> None:
    limits = settings_of(render(values_of({"client": "ingress"})), "router").limits
    assert limits.max_unfinished_body_bytes_per_client == limits.max_unfinished_body_bytes
    own = values_of({"client": "ingress"}) | nested({"router.settings.max_unfinished_body_bytes_per_client": 2**24})
    assert settings_of(render(own), "router").limits.max_unfinished_body_bytes_per_client == 2**24


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_an_upgrade_does_not_undo_what_the_autoscaler_did(kind: str) -> None:
    rendered = render(values_of({"autoscaling": kind}))
    for role in ("prefill", "decode"):
        assert "replicas" not in rendered.named("Deployment", f"demo-baton-{role}")["spec"]
    assert rendered.named("Deployment", "demo-baton-router")["spec"]["replicas"] == 2


def test_a_pod_is_restarted_when_its_own_settings_change() -> None:
    before, after = render(), render(nested({"decode.settings.max_num_seqs": 3}))
    changed = {
        name for (name, old), (_, new) in zip(before.pod_templates(), after.pod_templates(), strict=True) if old != new
    }
    assert changed == {"demo-baton-decode"}


SEVERAL_NODES = {
    "decode.nodes": 2,
    "decode.replicas": 3,
    "decode.settings.tensor_parallel_size": 4,
    "clusterTls.mode": "certManager",
}


def test_a_pod_of_several_nodes_is_a_group() -> None:
    rendered = render(nested(SEVERAL_NODES))
    check(rendered, VERSIONS)
    spec = rendered.named("LeaderWorkerSet", "demo-baton-decode")["spec"]
    assert spec["replicas"] == 3
    group = spec["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    [leader], [worker] = (group[each]["spec"]["containers"] for each in ("leaderTemplate", "workerTemplate"))
    assert leader["args"][-3:] == ["--nnodes=2", "--node-rank=$(NODE_RANK)", "--master-addr=$(POD_IP)"]
    assert worker["args"] == [*leader["args"][:-1], "--master-addr=$(LWS_LEADER_ADDRESS)"]
    assert {"startupProbe", "livenessProbe", "readinessProbe", "ports"} == leader.keys() - worker.keys()
    [service] = (each for each in rendered.of_kind("Service") if each["metadata"]["name"] == "demo-baton-decode")
    for template, is_served in ((group["leaderTemplate"], True), (group["workerTemplate"], False)):
        assert (service["spec"]["selector"].items() <= template["metadata"]["labels"].items()) == is_served


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_groups_are_scaled(kind: str) -> None:
    rendered = render(values_of({"autoscaling": kind}) | nested(SEVERAL_NODES | {"decode.autoscaling.enabled": True}))
    scaler = rendered.named({"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[kind], "demo-baton-decode")
    assert scaler["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


@pytest.mark.parametrize(
    ("cpu", "settings", "nodes", "threads"),
    [
        ("8", {"tensor_parallel_size": 2}, 1, "4"),
        ("7500m", {"tensor_parallel_size": 2}, 1, "3"),
        (2, {"tensor_parallel_size": 4}, 1, "1"),
        ("1.5", {"tensor_parallel_size": 2, "data_parallel_size": 2}, 1, "1"),
        ("8", {"tensor_parallel_size": 4}, 2, "4"),
    ],
)
def test_ranks_of_a_pod_share_its_cpus(cpu: str | int, settings: dict[str, int], nodes: int, threads: str) -> None:
    decode = {"settings": settings, "nodes": nodes, "resources": {"limits": {"cpu": cpu}}}
    templates = render({"decode": decode, "clusterTls": {"mode": "certManager"}}).pod_templates()
    (found,) = {
        variable["value"]
        for _, template in templates
        for container in template["spec"]["containers"]
        for variable in container.get("env", ())
        if variable["name"] == "OMP_NUM_THREADS" and "value" in variable
    }
    assert found == threads


def test_each_rank_has_a_gpu() -> None:
    decode = {"settings": {"tensor_parallel_size": 2}, "gpu": {"count": 2}}
    (template,) = [each for name, each in render({"decode": decode}).pod_templates() if "decode" in name]
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


CONTRADICTIONS = {
    "model.hub.repository": {"model.source": "hub"},
    "model.hub.revision": {"model.source": "hub", "model.hub.repository": "Qwen/Qwen3-0.6B"},
    "model.volume.existingClaim": {"model.source": "volume"},
    "model.image.reference": {"model.source": "image"},
    "set model.source: volume": {"model.volume.download": True},
    "set model.source: hub": {"model.hub.repository": "Qwen/Qwen3-0.6B"},
    "set prefill.sharedMemory": {"prefill.sharedMemory": ""},
    "set decode.sharedMemory": {"decode.sharedMemory": ""},
    "raise decode.replicas": {"decode.gpu.count": 2},
    "make for 2 ranks in each pod": {"decode.gpu.count": 4, "decode.settings.tensor_parallel_size": 2},
    "set connector.type: nixl, or disable": {
        "connector.type": "shared-storage",
        "connector.nixl.rdma.enabled": True,
    },
    "set connector.nixl.rdma.enabled": {"connector.nixl.rdma.ipcLock": True},
    "set connector.type: nixl, or remove": {
        "connector.type": "shared-storage",
        "connector.options": {"store": "redis"},
    },
    "Secret of redis.existingSecret": {"connector.options": {"url": "redis://:secret@redis"}},
    "set redis.bundled": {"connector.type": "redis"},
    "exclude each other": {"connector.type": "redis", "redis.bundled": True, "redis.existingSecret": "blocks"},
    "remove redis.bundled": {"redis.bundled": True},
    "raise decode.terminationGracePeriodSeconds": {"decode.drainSeconds": 55},
    "raise router.terminationGracePeriodSeconds": {"router.preStopSeconds": 15},
    "set maxSurge or maxUnavailable": {"decode.strategy": {"maxSurge": 0, "maxUnavailable": 0}},
    "set topology.mode: none": {"decode.topology.mode": "pack", "decode.affinity": {"podAntiAffinity": {}}},
    "decode.replicas is 0": {"decode.replicas": 0},
    "router.replicas is 0": {"router.replicas": 0},
    "decode.autoscaling.minReplicas is 0": {
        "monitoring.enabled": True,
        "decode.autoscaling": {"enabled": True, "minReplicas": 0},
    },
    "raise maxReplicas": {"autoscaling.kind": "hpa", "prefill.autoscaling": {"enabled": True, "minReplicas": 9}},
    "set monitoring.enabled: true, or autoscaling.kind": {"decode.autoscaling.enabled": True},
    "set clusterTls.secrets.decode": {
        "clusterTls": {"mode": "secret", "secrets": {"router": "router", "prefill": "prefill"}}
    },
    "set clusterTls.mode": {"decode.nodes": 2, "decode.settings.tensor_parallel_size": 2},
    "set decode.settings.tensor_parallel_size to a multiple": {"decode.nodes": 2, "clusterTls.mode": "certManager"},
    "set router.tls.secret": {"router.tls.enabled": True},
    "router.tls.certManager.issuerRef exclude": {
        "router.tls": {"enabled": True, "secret": "public", "certManager": {"issuerRef": {"name": "corp"}}}
    },
    "set router.tls.certManager.dnsNames": {
        "router.tls": {"enabled": True, "certManager": {"issuerRef": {"name": "corp"}}}
    },
    "set router.tls.enabled": {"router.tls.secret": "public"},
    "networkPolicy.extraEgress": {
        "networkPolicy": {"enabled": True, "restrictEgress": True},
        "connector.type": "redis",
        "redis.existingSecret": "blocks",
    },
    "set networkPolicy.enabled": {"networkPolicy.restrictEgress": True},
    "set ingress.hosts": {"ingress.enabled": True},
    "set httpRoute.parentRefs": {"httpRoute.enabled": True},
    "BackendTLSPolicy": {
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        "router.tls": {"enabled": True, "secret": "public"},
    },
    "set monitoring.apiKeySecret": {"monitoring.enabled": True, "router.apiKeys.existingSecret": "keys"},
    "set monitoring.enabled: true": {"monitoring.rules.enabled": True},
}


@cache
def refusal(advice: str) -> str:
    with pytest.raises(helm_python.HelmRenderError) as error:
        render(nested(CONTRADICTIONS[advice]))
    return str(error.value)


@pytest.mark.parametrize("advice", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_what_to_change(advice: str) -> None:
    assert advice in refusal(advice)


def test_every_refusal_is_tested() -> None:
    template = (CHART / "templates" / "_validate.tpl").read_text()
    for sentence in re.findall(r'fail \(?(?:printf )?"([^"]*)"', template):
        pattern = re.sub("%[a-z]", ".*", re.escape(sentence))
        assert any(re.search(pattern, refusal(advice)) for advice in CONTRADICTIONS), sentence


@pytest.mark.parametrize(
    ("dotted", "complaint"),
    [
        ({"decode.setings": {}}, "'setings' not allowed"),
        ({"decode.settings.max_num_seq": 3}, "'max_num_seq' not allowed"),
        ({"decode.settings.port": 3}, "'port' not allowed"),
        ({"connector.type": "nccl"}, "/connector/type"),
        ({"decode.replicas": "2"}, "/decode/replicas"),
        ({"decode.sharedMemory": "0"}, "/decode/sharedMemory"),
    ],
)
def test_a_wrong_value_is_refused_by_the_schema(dotted: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=complaint):
        chart().validate_schema(nested(dotted))


def test_the_schema_has_every_value() -> None:
    def compare(values: Any, schema: Any, path: str) -> None:
        if isinstance(values, dict) and "properties" in schema:
            assert set(values) == set(schema["properties"]) - {"global", "supplementalGroups"}, path
            for name, value in values.items():
                compare(value, schema["properties"][name], f"{path}.{name}")

    for role in CONFIGS:
        VALUES[role]["settings"] = SCHEMA["properties"][role]["properties"]["settings"]["properties"]
    compare(VALUES, SCHEMA, "")


def test_the_schema_has_every_setting() -> None:
    assert FILE.read_text() == schema(), "run make chart"
    assert CONNECTORS_FILE.read_text() == connectors(), "run make chart"


def test_lint() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert not report["errors"]
    assert [message for message in report["messages"] if "icon" not in message["error"]] == []


def test_the_version_is_that_of_the_package() -> None:
    assert chart().metadata["appVersion"] == __version__
