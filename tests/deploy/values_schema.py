"""Writes what the chart knows of Baton's settings and connectors: python -m tests.deploy.values_schema"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from common.config import field_names
from decode_service.config import DecodeConfig
from kv_store.registry import JOINING_CONNECTOR_NAMES, kind_of
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from tests.deploy.chart import CHART

FILE = CHART / "values.schema.json"
CONNECTORS_FILE = CHART / "connectors.json"
CONFIGS: dict[str, type[msgspec.Struct]] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
# Settings that the chart decides itself.
_OWNED = {
    *("host", "port", "model", "revision", "served_model_name", "registry", "registry_namespace"),
    *("cluster_ca", "cluster_cert", "cluster_key", "cluster_tls_name"),
}
_OWNED_OF_ROUTER = {
    *("grpc_port", "prefill", "decode", "models", "api_keys_file", "tls_cert", "tls_key", "shutdown_grace_s"),
}
_OWNED_OF_PODS = {
    *("pod_id", "metrics_port", "connector", "connector_path", "connector_options", "drain_timeout_s", "device"),
    *("advertise", "registry_lease_s", "nnodes", "node_rank", "master_addr", "master_port"),
}


def settings_of(role: str) -> list[str]:
    """Settings of a role that users of the chart may set."""
    owned = _OWNED | (_OWNED_OF_ROUTER if role == "router" else _OWNED_OF_PODS)
    return sorted(set(field_names(CONFIGS[role])) - owned)


def schema() -> str:
    """The schema with the current settings."""
    document: dict[str, Any] = json.loads(FILE.read_text())
    for role in CONFIGS:
        settings = document["properties"][role]["properties"]["settings"]
        settings["properties"] = {name: {} for name in settings_of(role)}
    connector = document["properties"]["connector"]["properties"]
    connector["type"] = {"enum": list(JOINING_CONNECTOR_NAMES)}
    return json.dumps(document, indent=2) + "\n"


def connectors() -> str:
    """What the templates go by of each connector."""
    kinds = {name: kind_of(name) for name in JOINING_CONNECTOR_NAMES}
    known = {
        name: {"direct": not kind.is_store, "directory": kind.directory_option, "redis": kind.redis_option}
        for name, kind in kinds.items()
    }
    return json.dumps(known, indent=2) + "\n"


if __name__ == "__main__":
    CONNECTORS_FILE.write_text(connectors())
    FILE.write_text(schema())
