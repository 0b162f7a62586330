"""The devices by name: values of the setting `device`."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from common.engine.config import ModelConfig
from common.engine.devices.base import Device
from common.engine.registry import Registry

DeviceFactory = Callable[[ModelConfig, int], Device]
"""The device of this number, where there are several of the kind. Raises ConfigError if there is none."""

_CPU = "common.engine.devices.cpu.device:CpuDevice"
_INTERPRETER = "common.engine.devices.gpu.device:TritonDevice"


def create_best(config: ModelConfig, number: int) -> Device:
    """A GPU if there is one."""
    return DEVICES.find("cuda" if torch.cuda.is_available() else "cpu")(config, number)


def create_on_host(config: ModelConfig, number: int) -> Device:
    """The CPU; with TRITON_INTERPRET=1, it interprets the kernels for GPUs."""
    return DEVICES.find(_INTERPRETER if os.environ.get("TRITON_INTERPRET") == "1" else _CPU)(config, number)


DEVICES: Registry[DeviceFactory] = Registry(
    "device",
    {
        "auto": "common.engine.devices.registry:create_best",
        "cpu": "common.engine.devices.registry:create_on_host",
        "cuda": "common.engine.devices.gpu.device:CudaDevice",
    },
)
