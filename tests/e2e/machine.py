"""The machine on which something was measured."""

from __future__ import annotations

import os
from pathlib import Path


def describe_machine() -> str:
    """Cores and processor of this machine, and what else it does."""
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    model = next((value.strip() for name, _, value in fields if name.strip() == "model name"), "an unknown processor")
    return f"{len(os.sched_getaffinity(0))} cores of {model}, load average {os.getloadavg()[2]:.1f} over 15 minutes"
