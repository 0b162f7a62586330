"""Parts of Baton that may not be installed."""

from __future__ import annotations

import importlib
from types import ModuleType

from common.errors import ConfigError

_OWN_PACKAGES = (
    "cli", "deploy", "loadgen", "planning", "router", "prefill_service", "decode_service", "kv_store", "common",
)  # fmt: skip


def import_with_extra(module: str, what: str, extra: str) -> ModuleType:
    """Import `module`. Raises ConfigError saying which extra `what` needs if a foreign package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OWN_PACKAGES:
            raise
        raise ConfigError(f"{what}: {error.name} is not installed; pip install 'baton-llm[{extra}]'") from error
