"""The formats by the `quant_method` of config.json, or the name of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from common.engine.quantization.checkpoints.base import CheckpointFormat
from common.engine.quantization.checkpoints.gguf import GGUF, GGUF_SUFFIX
from common.engine.registry import Registry
from common.errors import ConfigError

_FORMATS = {
    "gptq": "common.engine.quantization.checkpoints.gptq:GPTQ",
    "awq": "common.engine.quantization.checkpoints.awq:AWQ",
    "fp8": "common.engine.quantization.checkpoints.fp8:FP8",
    "compressed-tensors": "common.engine.quantization.checkpoints.compressed_tensors:CompressedTensors",
}
_CLASSES: Registry[Callable[[Mapping[str, Any]], CheckpointFormat]] = Registry("model", _FORMATS)


def find_format(raw_config: Mapping[str, Any], weight_files: Sequence[Path] = ()) -> CheckpointFormat | None:
    """The format of a checkpoint, by its config.json or the names of its files; None if it is not quantised, or by a
    method that only transformers knows. Raises ConfigError for a method that is not known, and for what is not
    supported of one."""
    if any(path.suffix == GGUF_SUFFIX for path in weight_files):
        return GGUF()
    settings = raw_config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ConfigError.of("model", f"quantization_config in config.json is not an object: {settings!r}")
    method = settings.get("quant_method")
    if method in _FORMATS:
        return _CLASSES.find(str(method))(settings)
    if method is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        known = ", ".join(_FORMATS)
        raise ConfigError.of("model", f"its weights are quantised by {method!r}, which is none of {known}")
    return None
