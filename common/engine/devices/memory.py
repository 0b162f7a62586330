"""The memory available for a KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from common.engine.config import CacheConfig

_DEFAULT_FRACTION_CPU = 0.1
_DEFAULT_FRACTION_CUDA = 0.9


def available_kv_bytes(config: CacheConfig, device: torch.device) -> int:
    """Bytes for the KV cache: the setting if there is one, else a share of what is free on the device now."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * (config.memory_fraction or _DEFAULT_FRACTION_CUDA))
    return int(free_host_bytes() * (config.memory_fraction or _DEFAULT_FRACTION_CPU))


def free_host_bytes() -> int:
    """Memory that this process could still take: the machine's available memory, or less in a limited cgroup."""
    return min(_available_on_machine(), _available_in_cgroup())


def _available_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024  # kB
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _available_in_cgroup(root: Path = Path("/sys/fs/cgroup")) -> int:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((root / limit_name).read_text(encoding="ascii"))
            used = int((root / used_name).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, limit - used)
    return 1 << 62
