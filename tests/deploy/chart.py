"""The chart, rendered by the Helm library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "baton"
RELEASE, NAMESPACE = "demo", "llm"

Values = Mapping[str, Any]
Manifest = dict[str, Any]


class Rendered(NamedTuple):
    """What one set of values renders to."""

    manifests: list[Manifest]

    def of_kind(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def named(self, kind: str, name: str) -> Manifest:
        (found,) = (manifest for manifest in self.of_kind(kind) if manifest["metadata"]["name"] == name)
        return found

    def pod_templates(self) -> Iterator[tuple[str, Manifest]]:
        """Name of each workload, and the pod that it runs."""
        for manifest in self.manifests:
            if "template" in manifest.get("spec", {}):
                yield manifest["metadata"]["name"], manifest["spec"]["template"]
            if manifest["kind"] == "LeaderWorkerSet":
                group = manifest["spec"]["leaderWorkerTemplate"]
                yield manifest["metadata"]["name"], group["leaderTemplate"]
                yield f"{manifest['metadata']['name']}-node", group["workerTemplate"]


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render(values: Values | None = None, *, name: str = RELEASE) -> Rendered:
    """Raises helm_python.HelmError."""
    files = chart().render(dict(values or {}), name=name, namespace=NAMESPACE)
    documents = (document for path, text in files.items() if path.endswith(".yaml") for document in _load(text))
    return Rendered([document for document in documents if document])


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"router.replicas": 2} -> {"router": {"replicas": 2}}"""
    values: dict[str, Any] = {}
    for path, value in dotted.items():
        *parents, last = path.split(".")
        target = values
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = dict(value) if isinstance(value, dict) else value
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice: {keys}{node.start_mark}"
        return super().construct_mapping(node, deep=deep)


def _load(text: str) -> list[Any]:
    return list(yaml.load_all(text, _StrictLoader))
