"""Offline checks of manifests: against the schemas of Kubernetes, and against Pod Security "restricted"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.deploy.chart import Manifest, Rendered

VERSIONS = ("1.33", "1.37")
_CRDS = Path(__file__).with_name("crds.yaml")
_VOLUMES = {"configMap", "emptyDir", "image", "persistentVolumeClaim", "secret"}


def validate(manifest: Manifest, version: str) -> None:
    """Raises a ValidationError; an unknown field is one."""
    _validate(json.dumps(manifest, sort_keys=True), version)


@cache  # most manifests are the same for many sets of values
def _validate(text: str, version: str) -> None:
    manifest = json.loads(text)
    schema = _crds().get(manifest["kind"])
    if schema is None:
        kubernetes_validate.validate(manifest, version, strict=True)
    else:
        schema.validate(manifest)
    if manifest["kind"] == "LeaderWorkerSet":
        for name in ("leaderTemplate", "workerTemplate"):
            template = manifest["spec"]["leaderWorkerTemplate"][name]
            pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
            kubernetes_validate.validate(pods, version, strict=True)


@cache
def _crds() -> dict[str, Any]:
    """A validator of each kind of custom resource."""
    validators = {}
    for kind, crd in yaml.safe_load(_CRDS.read_text()).items():
        spec = {"type": "object", "additionalProperties": False, **crd["spec"]}
        properties = {
            "apiVersion": {"const": crd["apiVersion"]},
            "kind": {"const": kind},
            "metadata": {"type": "object", "required": ["name", "labels"]},
            "spec": spec,
        }
        schema = {"type": "object", "additionalProperties": False, "required": [*properties], "properties": properties}
        jsonschema.Draft202012Validator.check_schema(schema)
        validators[kind] = jsonschema.Draft202012Validator(schema)
    return validators


def violations(rendered: Rendered) -> Iterator[str]:
    """What Pod Security "restricted" and our own rules refuse."""
    for name, template in rendered.pod_templates():
        spec = template["spec"]
        for problem in _of_pod(spec):
            yield f"{name}: {problem}"
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            for problem in _of_container(container):
                yield f"{name}/{container['name']}: {problem}"


def _of_pod(spec: Manifest) -> Iterator[str]:
    context = spec["securityContext"]
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield "may run as root"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "has no seccomp profile"
    if spec.get("hostNetwork") or spec.get("hostPID") or spec.get("hostIPC"):
        yield "is in a namespace of its host"
    if spec.get("automountServiceAccountToken") is not False:
        yield "has a token of the Kubernetes API"
    if spec.get("enableServiceLinks") is not False:
        yield "has its environment filled with services"
    for volume in spec.get("volumes", []):
        if not volume.keys() <= _VOLUMES | {"name"}:
            yield f"has a volume {volume}"


def _of_container(container: Manifest) -> Iterator[str]:
    context = container["securityContext"]
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "may gain privileges"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "may write to its root file system"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "has capabilities"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "has a port of its host"
    if "memory" not in container["resources"].get("limits", {}):
        yield "has no memory limit"
