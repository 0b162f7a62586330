"""Sets of values for the chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allpairspy import AllPairs

from tests.deploy.chart import nested

_HUB = {"model.hub.repository": "Qwen/Qwen3-0.6B", "model.hub.revision": "c1899de"}
_PEER = {"namespaceSelector": {"matchLabels": {"team": "chat"}}}

# What each option adds to the defaults, by name of the choice.
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "connector": {
        "nixl": {},
        "nixl over RDMA": {
            "connector.nixl": {"ucxTls": "rc,ud,tcp", "ucxNetDevices": "mlx5_0:1", "rdma": {"enabled": True}}
        },
        "nixl above Redis": {"connector.options": {"store": "redis", "host_bytes": "8GiB"}, "redis.bundled": True},
        "nixl above shared storage": {"connector.options": {"store": "shared-storage"}},
        "Redis": {"connector.type": "redis", "redis.bundled": True},
        "own Redis": {"connector.type": "redis", "redis.existingSecret": "blocks"},
        "shared storage": {"connector.type": "shared-storage", "connector.options": {"max_bytes": "20GiB"}},
        "own shared storage": {
            "connector.type": "shared-storage",
            "connector.sharedStorage.existingClaim": "kv",
            "prefill.sharedMemory": "",
            "decode.sharedMemory": "",
        },
    },
    "model": {
        "demo": {},
        "hub": {**_HUB, "model.source": "hub", "model.hub.tokenSecret": "hub"},
        "downloaded volume": {**_HUB, "model.source": "volume", "model.volume.download": True, "model.name": "qwen"},
        "own volume": {"model.source": "volume", "model.volume.existingClaim": "models"},
        "image": {"model.source": "image", "model.image.reference": "registry.example.org/qwen3:1"},
    },
    "gpu": {
        "none": {},
        "both": {"prefill.gpu.count": 1, "decode.gpu.count": 1, "decode.runtimeClassName": "nvidia"},
    },
    "prefill": {"one": {}, "none": {"prefill.replicas": 0}, "many": {"prefill.replicas": 4, "decode.replicas": 8}},
    "cluster TLS": {
        "off": {},
        "secret": {
            "clusterTls.mode": "secret",
            "clusterTls.secrets": {"router": "router-tls", "prefill": "prefill-tls", "decode": "decode-tls"},
        },
        "own authority": {"clusterTls.mode": "certManager"},
        "issuer": {
            "clusterTls.mode": "certManager",
            "clusterTls.certManager.issuerRef": {"name": "corp", "kind": "ClusterIssuer"},
        },
    },
    "client": {
        "plain": {},
        "TLS": {"router.tls.enabled": True, "router.tls.secret": "public"},
        "TLS of cert-manager": {
            "router.tls.enabled": True,
            "router.tls.certManager": {"issuerRef": {"name": "corp"}, "dnsNames": ["llm.example.org"]},
        },
        "ingress": {
            "ingress": {"enabled": True, "hosts": ["llm.example.org"], "className": "nginx", "tlsSecret": "public"}
        },
        "gateway": {
            "httpRoute": {
                "enabled": True,
                "parentRefs": [{"name": "public", "namespace": "gateways"}],
                "hostnames": ["llm.example.org"],
                "pathPrefix": "/qwen",
                "headers": [{"name": "x-model", "value": "qwen"}],
            }
        },
    },
    "keys": {"none": {}, "API keys": {"router.apiKeys.existingSecret": "keys", "monitoring.apiKeySecret": "operator"}},
    "monitoring": {
        "off": {},
        "on": {"monitoring.enabled": True, "monitoring.labels": {"release": "prometheus"}},
        "rules": {"monitoring.enabled": True, "monitoring.rules.enabled": True},
    },
    "autoscaling": {
        "off": {},
        "hpa": {
            "autoscaling.kind": "hpa",
            "prefill.autoscaling.enabled": True,
            "decode.autoscaling.enabled": True,
        },
        "keda": {
            "prefill.autoscaling.enabled": True,
            "decode.autoscaling.enabled": True,
            "decode.autoscaling.itlSeconds": 0,
            "monitoring.enabled": True,
        },
    },
    "network": {
        "open": {},
        "policies": {"networkPolicy.enabled": True, "networkPolicy.clients": [_PEER]},
        "closed": {
            "networkPolicy.enabled": True,
            "networkPolicy.restrictEgress": True,
            "networkPolicy.extraEgress": [{"ports": [{"port": 443}]}],
        },
    },
    "placement": {
        "spread": {},
        "packed": {
            "decode.topology": {"mode": "pack", "key": "topology.kubernetes.io/zone"},
            "prefill.topology": {"mode": "pack", "key": "topology.kubernetes.io/zone"},
        },
        "pinned": {
            "decode.nodeSelector": {"pool": "gpu"},
            "decode.tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "decode.topology": {"mode": "none"},
            "decode.affinity": {"podAntiAffinity": {}},
            "decode.priorityClassName": "serving",
            "decode.resources": {"limits": {"cpu": "2500m", "memory": "4Gi"}},
        },
    },
    "settings": {
        "none": {},
        "some": {
            "router.settings": {"request_timeout_s": 120, "max_index_blocks": 4000000, "decode_policy": "round_robin"},
            "decode.settings": {"max_num_seqs": 128, "target_itl_ms": "none", "kv_cache_memory": "4GiB"},
            "prefill.settings": {"enable_prefix_caching": False},
            "router.drainSeconds": 2.5,
        },
    },
    "nodes": {
        "one": {},
        "two": {
            "prefill.nodes": 2,
            "prefill.settings.tensor_parallel_size": 2,
            "decode.nodes": 2,
            "decode.settings.tensor_parallel_size": 2,
            "clusterTls.mode": "certManager",
        },
    },
    "names": {
        "default": {},
        "own": {
            "fullnameOverride": "chat",
            "clusterDomain": "k8s.example.org",
            "listenAddress": "::",
            "commonLabels": {"team": "chat"},
            "image": {"registry": "registry.example.org/team/", "tag": "1.2", "pullSecrets": [{"name": "registry"}]},
            "serviceAccount": {"create": False, "name": "baton"},
        },
    },
}
EVERYTHING = {
    "connector": "nixl above Redis",
    "model": "downloaded volume",
    "gpu": "both",
    "cluster TLS": "own authority",
    "client": "gateway",
    "keys": "API keys",
    "monitoring": "rules",
    "autoscaling": "keda",
    "network": "closed",
    "placement": "packed",
    "settings": "some",
}


def values_of(chosen: dict[str, str]) -> dict[str, Any]:
    """The values of some choices; the others are the first."""
    dotted: dict[str, Any] = {}
    for option, choice in chosen.items():
        dotted |= CHOICES[option][choice]
    return nested(dotted)


def pairwise() -> Iterator[dict[str, str]]:
    """Choices such that any two of two options occur together."""
    for row in AllPairs([list(choices) for choices in CHOICES.values()]):
        yield dict(zip(CHOICES, row, strict=True))
