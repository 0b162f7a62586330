"""Builds connectors as they are configured."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, cast

from common.engine.worker.slots import SlotConnector

if TYPE_CHECKING:
    from common.engine.config import KVConnectorConfig
    from common.engine.kv_connector import ConnectorFactory, WorkerConnector


def create_connector(config: KVConnectorConfig) -> WorkerConnector:
    """Builds the pod's connector, or a rank's part of it. Raises ConfigError if its name or options are wrong."""
    factory = cast("ConnectorFactory", pkgutil.resolve_name(config.factory))
    connector = factory(config.name, config.options)
    return SlotConnector(config.slots_path, connector.split().per_rank) if config.slots_path else connector
