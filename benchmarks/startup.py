"""Time from `baton up` to ready, and the resident memory of each process.

    python -m benchmarks.startup --runs 3 --prefill 1 --decode 1

Prints one JSON object per run and a summary. Memory is read after one request, so that nothing is still lazy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import httpx
import psutil

MIB = 2**20


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    args = parser.parse_args()
    runs = [measure(args.prefill, args.decode) for _ in range(args.runs)]
    for run in runs:
        print(json.dumps(asdict(run)))
    print("\n".join(summary(runs)))
    return 0


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster from start to end."""

    ready_s: float  # from the command to the printed curl line
    first_answer_s: float
    stop_s: float  # from SIGTERM to the launcher's exit
    rss_mib: dict[str, float]  # by process, after the first answer


def summary(runs: Sequence[Run]) -> list[str]:
    """Lines for a person."""
    ready = sorted(run.ready_s for run in runs)
    lines = [f"ready after {statistics.median(ready):.1f} s (median of {len(runs)}, {ready[0]:.1f} to {ready[-1]:.1f})"]
    lines += [
        f"{name:<24} {max(run.rss_mib[name] for run in runs):6.0f} MiB resident at most" for name in runs[-1].rss_mib
    ]
    return lines


def measure(prefill: int, decode: int) -> Run:
    """Start a cluster, ask it something, stop it."""
    command = [sys.executable, "-m", "cli.main", "up", "--port", "0", "--grpc-port", "0"]
    command += ["--prefill", str(prefill), "--decode", str(decode)]
    started = time.perf_counter()
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        curl = next((line.split() for line in launcher.stdout if line.strip().startswith("curl ")), None)
        ready_s = time.perf_counter() - started
        if curl is None:
            raise SystemExit(f"the cluster did not start: exit code {launcher.wait()}")
        first_answer_s = _ask(curl[2])
        rss = {name: process.memory_info().rss / MIB for name, process in _processes(launcher.pid)}
    finally:
        launcher.terminate()
        stopping = time.perf_counter()
        launcher.wait(60)
    return Run(
        ready_s=round(ready_s, 2),
        first_answer_s=round(first_answer_s, 3),
        stop_s=round(time.perf_counter() - stopping, 2),
        rss_mib={name: round(size, 1) for name, size in rss.items()},
    )


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
