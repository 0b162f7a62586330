"""The cores of the machine."""

from __future__ import annotations

import os


def num_usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
