"""Compares the predictions of `baton plan` with a real cluster.

    python -m benchmarks.plan [--paced] [--repeats N] [--requests N] [--markdown FILE]

One prefill and one decode pod on this machine, each engine with one thread on a core of its own; the model has 100M
random parameters. `baton profile-engine` measures the same model on one of the cores. Then the plan's simulator says
what load these pods hold, and at three shares of it the same requests, at the same times, go to the simulator and to
the cluster.

With --paced the steps of the cluster's engines take the time of a profile, that of one core with 100M parameters,
whatever the machine: each runs the demo model and sleeps for the rest. That compares all but the profile, also on a
machine that has other things to do.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import psutil

from benchmarks.harness.checkouts import HERE, ROOT
from benchmarks.harness.client import Client, Driver, Generation
from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import medians
from benchmarks.harness.models import Model, demo_model, make_served_model
from benchmarks.harness.processes import Child
from benchmarks.harness.report import Page, describe_torch_machine, table
from benchmarks.paced_pod import EXECUTOR, PACE_VARIABLE
from common.demo_model import DEMO_MODEL_NAME
from loadgen.http_client import RequestFailed
from planning.profile import EngineProfile, load_profile, write_profile
from planning.search import Planner, Size, Slo
from planning.steps import StepFit
from planning.workload import Request, Workload, synthetic

ISL, OSL = 128, 32
SLO = Slo(2.0, 0.2)
LOADS = (0.2, 0.5, 0.8)
SIZE = Size(1, 1)
WITHIN = 0.2
_WARM_UP = 6  # requests, alone, and as many at once
_WARM_UP_REQUEST_S = 5.0  # of the simulation, for one of them
_READY_TRIES = 60
# One core of an Intel Xeon (Sapphire Rapids), float32: fitted to the CPU time of steps of the 100M model.
PACE = StepFit(
    prefill_base_s=0.058,
    decode_base_s=0.0495,
    prompt_token_s=0.00128,
    attended_s=1.22e-6,
    decode_request_s=0.00255,
    context_token_s=0.0,
)
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
        """Errors of the predictions, as shares of what was measured."""
        return [predicted / measured - 1 for predicted, measured in zip(self.predicted, self.measured, strict=True)]

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        figures = (
            f"{predicted:.0f} for {measured:.0f} ({error:+.0%})"
            for predicted, measured, error in zip(self.predicted, self.measured, self.errors, strict=True)
        )
        return [f"{self.load:.0%}", f"{self.rate:.2f}", *figures]


def main() -> int:
    """Measures and prints. Returns 1 if a prediction is off by more than WITHIN."""
    parser = make_parser("benchmarks.plan", __doc__, repeats=3)
    parser.add_argument("--paced", action="store_true", help="with the step times of a profile")
    parser.add_argument("--requests", type=int, default=60, help="of each load and repeat")
    args = parser.parse_args()
    machine = describe_torch_machine()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = demo_model() if args.paced else make_served_model(scratch)
        profile = _profile(model, scratch)
        if args.paced:
            profile = msgspec.structs.replace(profile, steps=PACE, fit_error=0.0)
        capacity = _capacity(profile)
        print(f"{SIZE} hold {capacity:.3g} requests/s; {profile.steps}", file=sys.stderr)
        cluster = _paced_cluster(profile, scratch) if args.paced else _cluster(model, scratch)
        name = DEMO_MODEL_NAME if args.paced else model.name
        rows = _measure(cluster, model, name, profile, capacity, args.repeats, args.requests)
    title, words = _PACED_HEAD if args.paced else _HEAD
    words += _WORDS.format(capacity=capacity, isl=ISL, osl=OSL, ttft=SLO.ttft_s, itl=1e3 * SLO.itl_s)
    page = Page(title, words, machine | {"fit of the profile": f"median error {profile.fit_error:.1%}"})
    page.add("", *table(" | ".join(("load", "requests/s", *_MEASURES)), (row.cells for row in rows)))
    page.write(args.markdown)
    return 0 if all(abs(error) <= WITHIN for row in rows for error in row.errors) else 1


def _profile(model: Model, scratch: Path) -> EngineProfile:
    """Returns the profile of one thread on one core."""
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


@contextmanager
def _cluster(model: Model, scratch: Path) -> Iterator[str]:
    """The URL of its router."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of each engine
    config = {"decode": {"target_itl_ms": 1e3 * SLO.target_itl_s}}
    options = ("--model", str(model.directory), "--prefill", "1", "--decode", "1")
    with HERE.cluster(scratch, *options, config=config) as url:
        _pin()
        yield url


@contextmanager
def _paced_cluster(profile: EngineProfile, scratch: Path) -> Iterator[str]:
    """The same, of pods whose steps take the time of a profile."""
    pace = scratch / "pace.json"
    write_profile(profile, pace)
    variables = {PACE_VARIABLE: str(pace), "OMP_NUM_THREADS": "1"}
    connector = ["--connector", "shared-storage", "--connector-path", str(scratch / "kv")]
    target = ["--target-itl-ms", str(1e3 * SLO.target_itl_s)]
    with ExitStack() as stack:

        def run(module: str, *options: str) -> dict[str, str]:
            return stack.enter_context(Child("-m", module, *options, variables=variables)).read_ready()

        prefill = run("benchmarks.harness.pods", EXECUTOR, "prefill", *connector)["address"]
        decode = run("benchmarks.harness.pods", EXECUTOR, "decode", *connector, *target)["address"]
        router = ("cli.main", "serve", "router", "--prefill", prefill, "--decode", decode, "--port", "0")
        yield run(*router, "--grpc-port", "0")["http"]


def _measure(
    cluster: AbstractContextManager[str],
    model: Model,
    name: str,
    profile: EngineProfile,
    capacity: float,
    repeats: int,
    num_requests: int,
) -> list[Row]:
    taken: dict[float, list[tuple[Figures, Figures]]] = {load: [] for load in LOADS}
    with cluster as url:
        driver = Driver(url, name, model.vocab_size, seed=1)
        driver.run(_warm_up)
        for seed in range(repeats):
            for load in LOADS:
                workload = synthetic(load * capacity, ISL, OSL, num_requests, seed=seed)
                pair = _predict(profile, workload), driver.run(_serve, workload)
                print(f"{load:.0%}: predicted {_text(pair[0])}, measured {_text(pair[1])}", file=sys.stderr)
                taken[load].append(pair)
    return [
        Row(load, load * capacity, *(Figures(*medians(figures)) for figures in zip(*pairs, strict=True)))
        for load, pairs in taken.items()
    ]


def _pin() -> None:
    """Gives each engine process a core: the prefill pods' and the decode pods' in turn."""
    cores = sorted(os.sched_getaffinity(0))
    children = psutil.Process().children(recursive=True)
    engines = sorted(child.pid for child in children if "common.engine.core_proc" in " ".join(child.cmdline()))
    assert len(engines) == SIZE.total, engines
    for number, pid in enumerate(engines):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {cores[number % len(cores)]})


def _predict(profile: EngineProfile, workload: Workload) -> Figures:
    """After the warm-up that the cluster has had: the router has learned how long steps take."""
    alone = [Request(number * _WARM_UP_REQUEST_S, ISL, OSL) for number in range(_WARM_UP)]
    at_once = [Request(_WARM_UP * _WARM_UP_REQUEST_S, ISL, OSL)] * _WARM_UP
    start_s = 2 * _WARM_UP * _WARM_UP_REQUEST_S
    counted = [each._replace(arrival_s=start_s + each.arrival_s) for each in workload.requests]
    whole = workload._replace(requests=[*alone, *at_once, *counted])
    p50, p90 = (
        Planner(profile, whole, SLO._replace(percentile=share), warm_up_s=start_s).measure(SIZE)
        for share in (50.0, 90.0)
    )
    return Figures(*(1e3 * seconds for seconds in (p50.ttft_s, p90.ttft_s, p50.itl_s, p90.itl_s)))


async def _warm_up(client: Client) -> None:
    await _until_ready(client)
    for _ in range(_WARM_UP):
        await client.complete(ISL, OSL)
    await client.complete_at_once(_WARM_UP, ISL, OSL)


async def _until_ready(client: Client) -> None:
    """Waits until the router has its pods."""
    for _ in range(_READY_TRIES):
        try:
            await client.complete(ISL, 1)
            return
        except RequestFailed:  # 503
            await asyncio.sleep(1.0)
    raise SystemExit("the cluster does not get ready")


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


def _text(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in zip(_MEASURES, figures, strict=True))


_HEAD = (
    "Plans next to a real cluster",
    """\
`python -m benchmarks.plan --markdown FILE`. One prefill and one decode pod, each engine with one thread on a core of
its own; a model of 100M random parameters. The profile is that of one thread on one core.
""",
)
_PACED_HEAD = (
    "Plans next to a cluster whose steps take the time of a profile",
    """\
`python -m benchmarks.plan --paced --markdown FILE`. One prefill and one decode pod and a router, all of them real, but
for the time of their engines' steps: each runs the demo model and sleeps until the step would be over by the profile of
one core with a model of 100M parameters.
""",
)
_WORDS = """\
Prompts of {isl} tokens, answers of {osl}. By the plan, these pods hold {capacity:.3g} requests/s within {ttft:g} s to
the first token and {itl:g} ms between tokens (p99). The same requests, at the same times, go to the simulator and to
the cluster. Milliseconds: predicted for measured, medians of the repeats, and by how much the prediction is off."""


if __name__ == "__main__":
    sys.exit(main())
