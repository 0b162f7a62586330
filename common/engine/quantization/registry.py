"""The formats by name: values of the setting `quantization`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.engine.registry import Registry

if TYPE_CHECKING:  # settings are checked in processes that do not import torch
    from common.engine.quantization.base import QuantizedLinear

QUANTIZATIONS: Registry[type[QuantizedLinear]] = Registry(
    "quantization",
    {
        "int8": "common.engine.quantization.int8:Int8Linear",
        "int8-dynamic": "common.engine.quantization.dynamic_int8:DynamicInt8Linear",
    },
)
