"""The parts that pages of results share: the machine, and targets with what was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured."""

    target: str
    measured: str
    is_met: bool


def format_verdict(verdict: Verdict) -> str:
    """Returns one line for the terminal."""
    return f"{'pass' if verdict.is_met else 'FAIL'}: {verdict.target}: {verdict.measured}"


def describe_machine(*packages: str) -> dict[str, str]:
    """Returns the facts of the machine on which the figures depend, with the versions of `packages`."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def describe_torch_machine() -> dict[str, str]:
    """Returns the same for figures that depend on how torch computes."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return describe_machine("torch", "transformers") | {"threads": str(torch.get_num_threads()), "device": device}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
