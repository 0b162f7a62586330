"""Instructions that kernels may use: those of the processor, or of an older one."""

from __future__ import annotations

import os
from functools import cache

from llvmlite import binding

from common.errors import ConfigError

VARIABLE = "BATON_MAX_CPU_ISA"
_WITHOUT = {  # beginnings of the names, as LLVM has them, of what came later
    "avx2": ("avx512", "avx10", "amx"),
    "avx512_vnni": ("avx512bf16", "avx512fp16", "avx10", "amx"),
    "avx512_bf16": ("avx512fp16", "avx10", "amx"),
    "amx": (),
}
LEVELS = tuple(_WITHOUT)  # each has what those before it have


@cache
def features() -> binding.FeatureMap:
    """Returns whether there is each feature, by LLVM's name of it. Raises ConfigError for a level that is not known."""
    found = binding.get_host_cpu_features()
    level = os.environ.get(VARIABLE, "")
    if level and level not in _WITHOUT:
        raise ConfigError(f"{VARIABLE}: {level} is unknown; known: {', '.join(LEVELS)}")
    for name in found:
        if name.startswith(_WITHOUT.get(level, ())):
            found[name] = False
    return found


def is_x86() -> bool:
    """True if the instructions are those of x86-64."""
    return bool(binding.get_process_triple().startswith("x86_64"))
