"""What is changed for `podman kube play` is what tests/kube/manifests.py lists."""

from __future__ import annotations

import pytest
import yaml

from tests.deploy.chart import nested, render
from tests.kube.manifests import claims, dns_names, pod_manifests

_CHANGED = {"args", "volumeMounts", "ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}


@pytest.mark.parametrize("connector", ["shared-storage", "redis", "nixl"])
def test_the_rest_of_a_pod_is_as_rendered(connector: str) -> None:
    rendered = render(nested({"connector.type": connector, "redis.bundled": connector == "redis"}))
    before = yaml.safe_dump_all(rendered.manifests)
    for workload in rendered.of_kind("Deployment"):
        *mounted, played = pod_manifests(rendered, workload, "pod-7")
        old, new = workload["spec"]["template"]["spec"], played["spec"]["template"]["spec"]
        assert {key: old[key] for key in old if key not in ("containers", "volumes")}.items() <= new.items()
        (theirs,), (ours,) = old["containers"], new["containers"]
        assert {key: value for key, value in theirs.items() if key not in _CHANGED} == {
            key: value for key, value in ours.items() if key not in _CHANGED
        }
        paths = [mount["mountPath"] for mount in theirs["volumeMounts"] if mount["mountPath"] != "/dev/shm"]
        assert [mount["mountPath"] for mount in ours["volumeMounts"]] == paths
        assert len(theirs["args"]) == len(ours["args"])
        assert "$(" not in str(ours["args"])
        named = {volume["configMap"]["name"] for volume in new["volumes"] if "configMap" in volume}
        assert {manifest["metadata"]["name"] for manifest in mounted} == named
        assert not any("secret" in volume for volume in new["volumes"])
    assert yaml.safe_dump_all(rendered.manifests) == before


def test_services_become_the_names_that_routers_look_up() -> None:
    rendered = render()
    config = yaml.safe_load(rendered.named("ConfigMap", "demo-baton-router")["data"]["baton.yaml"])["router"]
    for role in ("prefill", "decode"):
        (entry,) = config[role]
        assert entry.split(":")[1] in dns_names(rendered, rendered.named("Deployment", f"demo-baton-{role}"))


def test_a_claim_belongs_to_the_user_of_the_pods() -> None:
    (claim,) = claims(render(nested({"connector.type": "shared-storage"})))
    assert set(claim["metadata"]["annotations"].values()) == {"10001"}
