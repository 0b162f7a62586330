"""Runs pytest once for each set of instructions that kernels are written for and this processor has, from the oldest
on: python -m tests.each_isa tests/unit/common/engine/devices/cpu -x"""

from __future__ import annotations

import os
import subprocess
import sys

from llvmlite import binding

from common.engine.devices.cpu.kernels.processor import LEVELS, VARIABLE

_NEEDED = {"avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "amx": "amx-bf16"}
_OF_TORCH = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}


def main() -> int:
    """Returns the exit status of the first run that fails, or 0."""
    found = binding.get_host_cpu_features()
    for level in LEVELS:
        if found.get(_NEEDED.get(level, "avx2")):
            sys.stderr.write(f"{level}\n")
            environment = os.environ | {VARIABLE: level} | _OF_TORCH.get(level, {})
            if status := subprocess.call([sys.executable, "-m", "pytest", *sys.argv[1:]], env=environment):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
