"""Who may connect to whom under the chart's network policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.deploy.chart import NAMESPACE, Manifest, Rendered, nested, render

CLOSED = {
    "networkPolicy": {
        "enabled": True,
        "restrictEgress": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "chat"}}}],
    }
}
UCX_PORT = 43210


class Peer(NamedTuple):
    """One end of a connection."""

    namespace: str
    labels: dict[str, str]
    ports: dict[str, int]  # by name


def peers(rendered: Rendered) -> dict[str, Peer]:
    found = {
        "client": Peer("chat", {}, {}),
        "prometheus": Peer("monitoring", {}, {}),
        "stranger": Peer("other", {}, {}),
    }
    for _, template in rendered.pod_templates():
        labels = template["metadata"]["labels"]
        ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0].get("ports", [])}
        found[labels["app.kubernetes.io/component"]] = Peer(NAMESPACE, labels, ports)
    return found


def allows(rendered: Rendered, source: Peer, target: Peer, port: int) -> bool:
    """Whether both ends allow it. A pod that no policy selects allows everything."""
    return _allows(rendered, "Egress", source, target, target, port) and _allows(
        rendered, "Ingress", target, source, target, port
    )


def _allows(rendered: Rendered, direction: str, pod: Peer, other: Peer, target: Peer, port: int) -> bool:
    if pod.namespace != NAMESPACE:
        return True
    policies = [
        policy["spec"]
        for policy in rendered.of_kind("NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and _selects(policy["spec"]["podSelector"], pod.labels)
    ]
    side = "from" if direction == "Ingress" else "to"
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
    return not policies or any(_fits(rule, side, other, target, port) for rule in rules)


def _fits(rule: Manifest, side: str, other: Peer, target: Peer, port: int) -> bool:
    ports = [target.ports.get(entry["port"], entry["port"]) for entry in rule.get("ports", [])]
    others = rule.get(side, [])
    return (not ports or port in ports) and (not others or any(_is(peer, other) for peer in others))


def _is(selector: Manifest, peer: Peer) -> bool:
    namespaces = selector.get("namespaceSelector")
    if namespaces is None:
        return peer.namespace == NAMESPACE and _selects(selector["podSelector"], peer.labels)
    return _selects(namespaces, {"kubernetes.io/metadata.name": peer.namespace})


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())


def connections(values: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    rendered = render(nested({**CLOSED, **values}))
    ends = peers(rendered)
    for source, first in ends.items():
        for target, second in ends.items():
            if source != target and second.namespace == NAMESPACE:
                for port in (*second.ports.values(), UCX_PORT):
                    if allows(rendered, first, second, port):
                        yield source, target, port


ALWAYS = {
    *(("client", "router", port) for port in (8000, 9000)),
    ("prometheus", "router", 8000),
    ("prometheus", "prefill", 9100),
    ("prometheus", "decode", 9100),
    ("router", "prefill", 8100),
    ("router", "decode", 8200),
    ("decode", "prefill", 8100),
}


@pytest.mark.parametrize(
    ("values", "more"),
    [
        (
            {},
            {
                *(("decode", "prefill", port) for port in (9100, UCX_PORT)),
                *(("prefill", "decode", port) for port in (8200, 9100, UCX_PORT)),
            },
        ),
        (
            {"connector.type": "redis", "redis.bundled": True},
            {("prefill", "redis", 6379), ("decode", "redis", 6379)},
        ),
        ({"connector.type": "shared-storage"}, set()),
        (
            {
                "connector.type": "shared-storage",
                "clusterTls.mode": "certManager",
                "decode.nodes": 2,
                "decode.settings.tensor_parallel_size": 2,
            },
            {
                *(("decode-node", "decode", port) for port in (8200, 9100, 29500, UCX_PORT)),
                ("decode", "decode-node", UCX_PORT),
            },
        ),
    ],
    ids=["nixl", "redis", "shared-storage", "several nodes"],
)
def test_only_what_is_needed_is_allowed(values: dict[str, Any], more: set[tuple[str, str, int]]) -> None:
    assert set(connections(values)) == ALWAYS | more


def test_pods_without_prefill_pods_talk_to_routers_only() -> None:
    allowed = set(connections({"prefill.replicas": 0, "connector.type": "shared-storage"}))
    assert {(source, port) for source, target, port in allowed if target == "decode"} == {
        ("router", 8200),
        ("prometheus", 9100),
    }
