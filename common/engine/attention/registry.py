"""Attention backends by name, imported lazily."""

from __future__ import annotations

import importlib
from typing import cast

import torch

from common.engine.attention.base import AttentionBackend
from common.engine.config import AttentionBackendName

_BACKENDS = {"torch": "common.engine.attention.torch_backend:TorchAttention"}


def create_backend(name: AttentionBackendName, kv_cache: torch.Tensor) -> AttentionBackend:
    """Build the backend over the KV cache. "auto" is the fastest one of the cache's device."""
    target = _BACKENDS["torch" if name == "auto" else name]
    module_name, _, class_name = target.partition(":")
    backend_class = getattr(importlib.import_module(module_name), class_name)
    return cast("AttentionBackend", backend_class(kv_cache))
