"""Counts the instructions of the router for an answer, by valgrind: nearly the same however busy the machine is."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.gateway.measure import Router, ask_answers, has, start
from benchmarks.gateway.workload import SETUPS
from benchmarks.harness.checkouts import BEFORE, NOW
from benchmarks.harness.processes import Child
from benchmarks.harness.report import Page, table

_CONCURRENCY = 4
_WARM_UP = 60
_TOTALS = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)

Counts = dict[str, dict[str, float]]
"""Instructions for an answer, by case and side."""


def count(routers: Mapping[str, Router], num_answers: int, on_figure: Callable[[str], None]) -> Counts:
    """Counts for each side in turn. Raises FileNotFoundError if valgrind is not installed."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise FileNotFoundError("valgrind is not installed")
    counts: Counts = {}
    for side, router in routers.items():
        for setup in SETUPS:
            with tempfile.TemporaryDirectory() as directory, Child("-m", "benchmarks.router.load") as load:
                load.read_line()
                callgrind = (valgrind, "--tool=callgrind", "-q", f"--callgrind-out-file={directory}/counts")
                with start(setup, router, callgrind) as system:
                    for case in (case for case in setup.cases if has(system, load, case)):
                        ask_answers(system, load, case, _CONCURRENCY, _WARM_UP)
                        _take(system.router.pid, Path(directory))
                        ask_answers(system, load, case, _CONCURRENCY, num_answers)
                        found = counts.setdefault(case.name, {})[side] = (
                            _take(system.router.pid, Path(directory)) / num_answers
                        )
                        on_figure(f"{case.name}, {side}: {found:,.0f}")
    return counts


def make_page(machine: Mapping[str, str], num_answers: int, counts: Counts) -> Page:
    """Prints the table, and returns the page with it."""
    words = "`python -m benchmarks.gateway --instructions`: millions of instructions that the router executes for an\n"
    words += (
        f"answer of one token, of {num_answers:,} answers, {_CONCURRENCY} at a time, counted by valgrind's callgrind."
    )
    page = Page("What each API of the gateway costs, in instructions", words, machine)
    rows = ((name, *_cells(found[NOW], found.get(BEFORE))) for name, found in counts.items() if NOW in found)
    page.add("", *table("requests | now | before | difference", rows))
    return page


def _cells(now: float, before: float | None) -> tuple[str, str, str]:
    if before is None:
        return f"{now / 1e6:.2f}", "-", "-"
    return f"{now / 1e6:.2f}", f"{before / 1e6:.2f}", f"{100 * (now / before - 1):+.1f} %"


def _take(pid: int, directory: Path) -> int:
    """Returns the instructions since the last call; counting goes on from 0."""
    subprocess.run(["callgrind_control", "-d", str(pid)], check=True, capture_output=True)
    total = 0
    for file in directory.iterdir():
        if (found := _TOTALS.search(file.read_text(encoding="utf-8", errors="replace"))) is not None:
            total += int(found[1])
            file.unlink()
    return total
