"""Pages of results: tables, the machine, and targets with what was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

SERVING_PACKAGES = ("grpcio", "protobuf", "uvicorn", "uvloop", "httptools", "tokenizers", "msgspec")


class Verdict(NamedTuple):
    """A target and what was measured."""

    target: str
    measured: str
    is_met: bool

    def __str__(self) -> str:
        return f"{'pass' if self.is_met else 'FAIL'}: {self.target}: {self.measured}"


def row(*cells: object) -> str:
    """Returns a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: str, rows: Iterable[Sequence[object]] = ()) -> list[str]:
    """Returns the lines of a table. `columns`: their titles, with " | " between them."""
    return [f"| {columns} |", "|---" * len(columns.split(" | ")) + "|", *(row(*cells) for cells in rows)]


def verdict_table(verdicts: Iterable[Verdict]) -> list[str]:
    """Returns a section: the targets, and which of them are met."""
    rows = ((each.target, each.measured, verdict_word(each.is_met)) for each in verdicts)
    return ["## Targets", "", *table("target | measured | ", rows)]


def verdict_word(is_met: bool | None) -> str:
    """Returns a verdict as tables have it; None: there is none."""
    return {True: "pass", False: "**FAIL**", None: ""}[is_met]


def spread(values: Sequence[float], form: str = ".4g") -> str:
    """Returns median and range of some values."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


class Page:
    """A page of results: its head, and lines that are printed as they come."""

    def __init__(self, title: str, words: str, machine: Mapping[str, str]) -> None:
        facts = (f"- {name}: {value}" for name, value in machine.items())
        self._lines = [f"# {title}", "", words, "", *facts]

    def section(self, title: str) -> None:
        """Begins a section."""
        self.add("", f"## {title}", "")

    def add(self, *lines: str) -> None:
        """Adds lines, and prints them."""
        print("\n".join(lines), flush=True)
        self._lines += lines

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def write(self, file: Path | None) -> None:
        """Writes the page, if there is a file to write it to."""
        if file is not None:
            file.write_text(str(self), encoding="utf-8")


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
