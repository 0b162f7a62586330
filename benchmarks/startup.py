"""How long processes take to start: wall clock, processor time, and the memory of a cluster.

    python -m benchmarks.startup [--repeats 5] [--before DIR] [--markdown FILE]

Measured are `baton --help`, a router without pods, a decode pod with the demo model, and `baton up`, each from the
command to the line that says it is ready. Processor time is that of the command and all its processes, user and system,
and depends less on what else the machine does. Memory is read after one request, so that nothing is still lazy.

With --before the commands of another checkout take turns with those of this one, in the same Python environment.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx
import psutil

from benchmarks.harness.checkouts import BEFORE, HERE, NOW, Checkout, sides_of
from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import in_turn, medians, ratio
from benchmarks.harness.processes import Child
from benchmarks.harness.report import SERVING_PACKAGES, Page, Verdict, describe_machine, table, verdict_table

MIB = 2**20
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


Starts = Mapping[str, Sequence[Start]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    args = make_parser("benchmarks.startup", __doc__, repeats=5, has_before=True).parse_args(argv)
    words = f"""`python -m benchmarks.startup`, whose help says what is measured.

Medians of {args.repeats} starts. The difference is the median over pairs that were measured one after the other, of
processor time."""
    page = Page("Time to start", words, describe_machine(*SERVING_PACKAGES))
    sides = sides_of(args.before)
    starts: dict[str, dict[str, list[Start]]] = {side.name: defaultdict(list) for side in sides}
    for repeat in range(args.repeats):
        for name in COMMANDS:
            for side in in_turn(sides, repeat):
                start = measure_start(name, side)
                starts[side.name][name].append(start)
                print(f"{name}, {side.name}: {start}", file=sys.stderr)
    page.add("", *verdict_table(verdicts(starts[NOW])))
    page.section("Times")
    page.add(*_times(starts[NOW], starts.get(BEFORE, {})))
    page.section("Memory of a cluster")
    rows = ((name, f"{used:.0f}", f"{shared:.0f}") for name, (used, shared) in measure_memory().items())
    page.add(*table("process | MiB resident | of them file-backed", rows))
    page.write(args.markdown)
    return 0


def measure_start(name: str, checkout: Checkout) -> Start:
    """Starts one of COMMANDS, waits for its line, ends it."""
    started = time.perf_counter()
    with _start(name, checkout) as process:
        process.read_until(_READY[name])
        return Start(time.perf_counter() - started, process.cpu_s)


def measure_memory() -> dict[str, tuple[float, float]]:
    """Returns MiB that are resident in each process of a cluster that has answered once, and those of them that are
    file-backed, of which the kernel maps more or fewer, by what is in the page cache."""
    with _start("baton up", HERE) as launcher:
        url = launcher.read_until(_READY["baton up"]).split()[2]
        body = {"model": "baton-demo", "prompt": "The capital of France is", "max_tokens": 8}
        httpx.post(url, json=body, timeout=60).raise_for_status()
        found = ((name, process.memory_info()) for name, process in _processes(launcher.pid))
        return {name: (memory.rss / MIB, memory.shared / MIB) for name, memory in found}


def _start(name: str, checkout: Checkout) -> Child:
    command = ("-m", "cli.main", *COMMANDS[name])
    return Child(*command, variables=checkout.variables, directory=checkout.root, is_direct=True)


def verdicts(starts: Starts) -> list[Verdict]:
    """The targets, by the medians."""
    found = []
    for name, target_s in TARGETS_S.items():
        ready_s = statistics.median(start.ready_s for start in starts[name])
        found.append(Verdict(f"{name} ready in under {target_s:g} s", f"{ready_s:.2f} s", ready_s < target_s))
    return found


def _times(now: Starts, before: Starts) -> list[str]:
    rows = []
    for name, starts in now.items():
        ready, cpu = zip(*starts, strict=True)
        cells = [f"{statistics.median(ready):.2f}", f"{min(ready):.2f} to {max(ready):.2f}"]
        cells.append(f"{statistics.median(cpu):.2f}")
        if before:
            times = ratio(cpu, [start.cpu_s for start in before[name]])
            cells += [*(f"{each:.2f}" for each in medians(before[name])), f"{100 * (times - 1):+.0f} %"]
        rows.append((name, *cells, *([] if before else ["-"] * 3)))
    return table(" | ready, s | range | processor, s | ready before | processor before | difference", rows)


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
