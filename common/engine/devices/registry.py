"""Attention backends by name, imported lazily."""

from __future__ import annotations

import importlib
from typing import Literal, cast

import torch

from common.engine.devices.attention import AttentionBackend, KVSpec

AttentionBackendName = Literal["torch", "cpu", "cpu-invariant", "triton", "triton-invariant"]

_BACKENDS: dict[AttentionBackendName, str] = {
    "torch": "common.engine.devices.torch.attention:TorchAttention",
    "cpu": "common.engine.devices.cpu.attention:CpuAttention",
    "cpu-invariant": "common.engine.devices.cpu.attention:BatchInvariantAttention",
    "triton": "common.engine.devices.gpu.attention:TritonAttention",
    "triton-invariant": "common.engine.devices.gpu.attention:BatchInvariantTritonAttention",
}


def create_backend(name: AttentionBackendName, kv_cache: torch.Tensor) -> AttentionBackend:
    """Build the backend over the KV cache."""
    module_name, _, class_name = _BACKENDS[name].partition(":")
    backend_class = getattr(importlib.import_module(module_name), class_name)
    return cast("AttentionBackend", backend_class(kv_cache))


def can_attend(name: AttentionBackendName, device: torch.device, spec: KVSpec) -> bool:
    """True if the backend works on the KV cache of a model."""
    if name == "torch":
        return True
    module = importlib.import_module(_BACKENDS[name].partition(":")[0])
    return bool(module.supports(device, spec))
