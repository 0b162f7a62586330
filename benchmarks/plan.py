"""What `baton plan` predicts, next to what a real cluster does.

    python -m benchmarks.plan [--repeats N] [--requests N] [--markdown FILE]

One prefill and one decode pod on this machine, each engine with one thread on a core of its own; the model has 100M
random parameters. `baton profile-engine` measures the same model on one of the cores. Then the plan's simulator says
what load these pods hold, and at three shares of it the same requests, at the same times, go to the simulator and to
the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.engine import describe_machine
from benchmarks.handoff.client import Client, Generation
from benchmarks.handoff.model import Model, make_model
from benchmarks.handoff.sides import ROOT, Side
from planning.profile import EngineProfile, load_profile
from planning.search import Planner, Size, Slo
from planning.workload import Workload, synthetic

ISL, OSL = 128, 32
SLO = Slo(2.0, 0.2)
LOADS = (0.2, 0.5, 0.8)
SIZE = Size(1, 1)
WITHIN = 0.2
_WARM_UP = 6  # requests
_PROFILE_S = 20
_MEASURES = ("TTFT p50", "TTFT p90", "ITL p50", "ITL p90")


class Figures(NamedTuple):
    """Milliseconds, in the order of _MEASURES."""

    ttft_p50: float
    ttft_p90: float
    itl_p50: float
    itl_p90: float


class Row(NamedTuple):
    """One load: medians of the repeats."""

    load: float
    rate: float
    predicted: Figures
    measured: Figures

    @property
    def errors(self) -> list[float]:
        """Of the predictions, as shares of what was measured."""
        return [predicted / measured - 1 for predicted, measured in zip(self.predicted, self.measured, strict=True)]


def main() -> int:
    """Measures and prints. Returns 1 if a prediction is off by more than WITHIN."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="of each load and repeat")
    parser.add_argument("--markdown", type=Path, help="also write the page here")
    args = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = make_model(scratch)
        profile = _profile(model, scratch)
        capacity = _capacity(profile)
        print(f"{SIZE} hold {capacity:.3g} requests/s; {profile.steps}", file=sys.stderr)
        rows = _measure(model, scratch, profile, capacity, args.repeats, args.requests)
    page = format_markdown(machine, profile, capacity, rows)
    print(page)
    if args.markdown:
        args.markdown.write_text(page)
    return 0 if all(abs(error) <= WITHIN for row in rows for error in row.errors) else 1


def _profile(model: Model, scratch: Path) -> EngineProfile:
    """Of one thread on one core."""
    output = scratch / "profile.json"
    command = [sys.executable, "-m", "cli.main", "profile-engine", str(model.directory), "--num-threads", "1"]
    command += ["--seconds", str(_PROFILE_S), "--output", str(output)]
    core = min(os.sched_getaffinity(0))
    subprocess.run(command, cwd=ROOT, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    return load_profile(output)


def _capacity(profile: EngineProfile) -> float:
    """Requests per second that SIZE holds."""
    planner = Planner(profile, synthetic(0.1, ISL, OSL, 300), SLO)
    planner.check_possible()
    return planner.rate(planner.most_scale(SIZE, 1.0))


def _measure(
    model: Model, scratch: Path, profile: EngineProfile, capacity: float, repeats: int, num_requests: int
) -> list[Row]:
    taken: dict[float, list[tuple[Figures, Figures]]] = {load: [] for load in LOADS}
    os.environ["OMP_NUM_THREADS"] = "1"  # of each engine
    side = Side("plan", ROOT)
    with side.cluster(scratch, "--model", str(model.directory), "--prefill", "1", "--decode", "1") as url:
        _pin()
        client = Client(url, model.name, model.vocab_size, seed=1)
        asyncio.run(_warm_up(client))
        for seed in range(repeats):
            for load in LOADS:
                workload = synthetic(load * capacity, ISL, OSL, num_requests, seed=seed)
                pair = _predict(profile, workload), asyncio.run(_serve(client, workload))
                print(f"{load:.0%}: predicted {_text(pair[0])}, measured {_text(pair[1])}", file=sys.stderr)
                taken[load].append(pair)
    return [
        Row(load, load * capacity, *(_medians(figures) for figures in zip(*pairs, strict=True)))
        for load, pairs in taken.items()
    ]


def _pin() -> None:
    """Gives each engine process a core: the prefill pods' and the decode pods' in turn."""
    cores = sorted(os.sched_getaffinity(0))
    engines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if "common.engine.core_proc" in path.read_text() and _is_ours(int(path.parent.name)):
                engines.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    assert len(engines) == SIZE.total, engines
    for number, pid in enumerate(sorted(engines)):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {cores[number % len(cores)]})


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        found = re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        pid = int(found[1])
    return False


def _predict(profile: EngineProfile, workload: Workload) -> Figures:
    p50, p90 = (
        Planner(profile, workload, SLO._replace(percentile=share), has_warm_up=False).measure(SIZE)
        for share in (50.0, 90.0)
    )
    return Figures(*(1e3 * seconds for seconds in (p50.ttft_s, p90.ttft_s, p50.itl_s, p90.itl_s)))


async def _warm_up(client: Client) -> None:
    for _ in range(_WARM_UP):
        await client.complete(ISL, OSL)
    await client.complete_at_once(_WARM_UP, ISL, OSL)


async def _serve(client: Client, workload: Workload) -> Figures:
    """Sends each request at its time, however many run."""
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def send(arrival_s: float, num_prompt_tokens: int, num_tokens: int) -> Generation:
        await asyncio.sleep(started + arrival_s - loop.time())
        return await client.complete(num_prompt_tokens, num_tokens)

    generations = await asyncio.gather(
        *(send(each.arrival_s, each.num_prompt_tokens, each.num_output_tokens) for each in workload.requests)
    )
    ttfts = [generation.ttft_s for generation in generations]
    gaps = [gap for generation in generations for gap in generation.gaps_s]
    return Figures(*(1e3 * float(np.percentile(values, share)) for values in (ttfts, gaps) for share in (50, 90)))


def _medians(figures: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*figures, strict=True)))


def _text(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in zip(_MEASURES, figures, strict=True))


def format_markdown(machine: dict[str, str], profile: EngineProfile, capacity: float, rows: Sequence[Row]) -> str:
    """The page."""
    lines = [
        _HEAD.format(capacity=capacity, isl=ISL, osl=OSL, ttft=SLO.ttft_s, itl=1e3 * SLO.itl_s),
        *(f"- {key}: {value}" for key, value in machine.items()),
        f"- fit of the profile: median error {profile.fit_error:.1%}",
        "",
        "| load | requests/s | " + " | ".join(_MEASURES) + " |",
        "|---|---|" + "---|" * len(_MEASURES),
    ]
    for row in rows:
        cells = [
            f"{predicted:.0f} for {measured:.0f} ({error:+.0%})"
            for predicted, measured, error in zip(row.predicted, row.measured, row.errors, strict=True)
        ]
        lines.append(f"| {row.load:.0%} | {row.rate:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


_HEAD = """# Plans next to a real cluster

`python -m benchmarks.plan --markdown FILE`. One prefill and one decode pod, each engine with one thread on a core of
its own; a model of 100M random parameters; prompts of {isl} tokens, answers of {osl}. The profile is that of one thread
on one core. By the plan, these pods hold {capacity:.3g} requests/s within {ttft:g} s to the first token and {itl:g} ms
between tokens (p99). The same requests, at the same times, go to the simulator and to the cluster. Milliseconds:
predicted for measured, medians of the repeats, and by how much the prediction is off.
"""


if __name__ == "__main__":
    sys.exit(main())
