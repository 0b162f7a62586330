"""How long processes take to start: wall clock, processor time, and the memory of a cluster.

    python -m benchmarks.startup [--runs 5] [--before DIR] [--markdown FILE]

Measured are `baton --help`, a router without pods, a decode pod with the demo model, and `baton up`, each from the
command to the line that says it is ready. Processor time is that of the command and all its processes, user and system,
and depends less on what else the machine does. Memory is read after one request, so that nothing is still lazy.

With --before the commands of another checkout take turns with those of this one, in the same Python environment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from benchmarks.page import Verdict, describe_machine, format_verdict
from benchmarks.router.report import PACKAGES

MIB = 2**20
HERE = Path(__file__).resolve().parents[1]
_FEW_LINES = ["--log-level", "warning"]
COMMANDS = {
    "baton --help": ["--help"],
    "router": ["serve", "router", "--port", "0", "--grpc-port", "0", "--decode", "127.0.0.1:1", *_FEW_LINES],
    "decode pod": ["serve", "decode", "--port", "0", *_FEW_LINES],
    "baton up": ["up", "--port", "0", "--grpc-port", "0"],
}
TARGETS_S = {"baton --help": 0.3, "router": 3.0, "decode pod": 8.0}
_READY = {"baton --help": "exit codes:", "router": "ready role=", "decode pod": "ready role=", "baton up": "curl "}


class Start(NamedTuple):
    """One start."""

    ready_s: float  # from the command to the line
    cpu_s: float  # of all its processes until then


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster from start to end."""

    ready_s: float  # from the command to the printed curl line
    first_answer_s: float
    stop_s: float  # from SIGTERM to the launcher's exit
    rss_mib: dict[str, float]  # by process, after the first answer


Starts = Mapping[str, Sequence[Start]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    args = _parser().parse_args(argv)
    machine = describe_machine(*PACKAGES)
    sides = {"now": HERE} | ({"before": args.before} if args.before else {})
    starts: dict[str, dict[str, list[Start]]] = {side: defaultdict(list) for side in sides}
    for run in range(args.runs):
        for name in COMMANDS:
            for side in list(sides)[:: -1 if run % 2 else 1]:  # neither is always the first
                start = measure_start(name, sides[side])
                starts[side][name].append(start)
                print(f"{name}, {side}: ready {start.ready_s:.2f} s, processor {start.cpu_s:.2f} s", file=sys.stderr)
    memory = summary([measure_cluster(prefill=1, decode=1)])
    found = verdicts(starts["now"])
    tables = format_tables(starts["now"], starts.get("before", {}), found, memory)
    print(tables)
    print("\n".join(map(format_verdict, found)))
    if args.markdown:
        args.markdown.write_text(format_page(machine, args.runs, tables, args.note))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--before", type=Path, metavar="DIR", help="an older checkout, to compare with")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--note", default="", help="a remark for the page of markdown")
    return parser


def measure_start(name: str, checkout: Path) -> Start:
    """Starts one of COMMANDS, waits for its line, ends it."""
    with _running(COMMANDS[name], checkout) as (process, started):
        _await_line(process, _READY[name])
        return Start(time.perf_counter() - started, _cpu_s(process.pid))


def measure_cluster(prefill: int, decode: int) -> Run:
    """Starts a cluster, asks it something, stops it."""
    command = [*COMMANDS["baton up"], "--prefill", str(prefill), "--decode", str(decode)]
    with _running(command, HERE) as (launcher, started):
        curl = _await_line(launcher, _READY["baton up"])
        ready_s = time.perf_counter() - started
        first_answer_s = _ask(curl.split()[2])
        rss = {name: process.memory_info().rss / MIB for name, process in _processes(launcher.pid)}
        launcher.terminate()
        stopping = time.perf_counter()
        launcher.wait(60)
        stop_s = time.perf_counter() - stopping
    return Run(ready_s, first_answer_s, stop_s, rss)


def summary(runs: Sequence[Run]) -> list[str]:
    """Lines for a person."""
    ready = sorted(run.ready_s for run in runs)
    lines = [f"ready after {statistics.median(ready):.1f} s (median of {len(runs)}, {ready[0]:.1f} to {ready[-1]:.1f})"]
    lines += [
        f"{name:<24} {max(run.rss_mib[name] for run in runs):6.0f} MiB resident at most" for name in runs[-1].rss_mib
    ]
    return lines


def verdicts(starts: Starts) -> list[Verdict]:
    """The targets, by the medians."""
    found = []
    for name, target_s in TARGETS_S.items():
        ready_s = _median(starts[name]).ready_s
        found.append(Verdict(f"{name} ready in under {target_s:g} s", f"{ready_s:.2f} s", ready_s < target_s))
    return found


def format_tables(now: Starts, before: Starts, found: Sequence[Verdict], memory: Sequence[str]) -> str:
    """All tables, in markdown."""
    lines = ["## Targets", "", "| target | measured | |", "|---|---|---|"]
    lines += [f"| {each.target} | {each.measured} | {'pass' if each.is_met else '**FAIL**'} |" for each in found]
    lines += [
        "",
        "## Times",
        "",
        "| | ready, s | range | processor, s | ready before | processor before | difference |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, starts in now.items():
        median, times = _median(starts), [start.ready_s for start in starts]
        cells = [f"{median.ready_s:.2f}", f"{min(times):.2f} to {max(times):.2f}", f"{median.cpu_s:.2f}"]
        cells += _compared(starts, before[name]) if before else ["-", "-", "-"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "## Memory of a cluster", "", "```text", *memory, "```", ""])


def format_page(machine: Mapping[str, str], runs: int, tables: str, note: str) -> str:
    """The page that a run writes."""
    lines = ["# Time to start", "", "`python -m benchmarks.startup`, whose help says what is measured.", ""]
    lines += [f"Medians of {runs} starts. The difference is the median over pairs that were measured one after the"]
    lines += ["other, of processor time.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    return "\n".join([*lines, *(["", note] if note else []), "", tables])


def _compared(now: Sequence[Start], before: Sequence[Start]) -> list[str]:
    median = _median(before)
    ratio = statistics.median(new.cpu_s / old.cpu_s for new, old in zip(now, before, strict=True))
    return [f"{median.ready_s:.2f}", f"{median.cpu_s:.2f}", f"{100 * (ratio - 1):+.0f} %"]


def _median(starts: Sequence[Start]) -> Start:
    return Start(*(statistics.median(values) for values in zip(*starts, strict=True)))


@contextlib.contextmanager
def _running(arguments: Sequence[str], checkout: Path) -> Iterator[tuple[subprocess.Popen[str], float]]:
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, started
    finally:
        process.terminate()
        process.wait(60)


def _await_line(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().startswith(what):
            return line
    raise SystemExit(f"it did not start: exit code {process.wait()}")


def _cpu_s(pid: int) -> float:
    """Returns the processor time of the process and all below it; a process that has ended counts nothing."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def _ask(url: str) -> float:
    """Seconds of one short completion."""
    body = {"model": "baton-demo", "prompt": "The capital of France is", "max_tokens": 8}
    started = time.perf_counter()
    httpx.post(url, json=body, timeout=60).raise_for_status()
    return time.perf_counter() - started


def _processes(launcher_pid: int) -> list[tuple[str, psutil.Process]]:
    """The processes of the cluster by name; the engine core of a pod is named after it."""
    launcher = psutil.Process(launcher_pid)
    found = [("launcher", launcher)]
    for child in launcher.children():
        command = child.cmdline()
        name = command[command.index("--pod-id") + 1] if "--pod-id" in command else "router"
        found.append((name, child))
        found += [(f"{name} engine core", core) for core in child.children(recursive=True)]
    return found


if __name__ == "__main__":
    sys.exit(main())
