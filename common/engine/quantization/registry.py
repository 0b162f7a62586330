"""The formats by name: values of the setting `quantization`."""

from __future__ import annotations

from common.engine.quantization.base import QuantizedLinear
from common.engine.registry import Registry

QUANTIZATIONS: Registry[type[QuantizedLinear]] = Registry(
    "quantization",
    {
        "int8": "common.engine.quantization.int8:Int8Linear",
        "int8-dynamic": "common.engine.quantization.dynamic_int8:DynamicInt8Linear",
    },
)
