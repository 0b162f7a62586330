"""The measurements. Systems take turns, each started anew for each repeat; a figure is the median of its repeats."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.harness.figures import in_turn, medians
from benchmarks.harness.processes import Child
from benchmarks.router import decisions
from benchmarks.router.pace import HOLD
from benchmarks.router.systems import System, no_router

_WARM_UP_REQUESTS = 50
_WARM_UP_STREAMS = 8
_MANY_TOKENS = 100_000  # of streams that are dropped before their end

Start = Callable[[], AbstractContextManager[System]]


class StreamLoad(NamedTuple):
    """Streams at once, and how fast each gets its tokens."""

    num_streams: int
    num_tokens: int  # of each
    step_s: float  # 0: as fast as it goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements of a run."""

    repeats: int
    concurrency: tuple[int, ...]  # one-token answers at once
    num_answers: int
    streams: tuple[StreamLoad, ...]
    idle_streams: tuple[int, ...]  # rising
    decision_pods: tuple[int, ...]
    decision_blocks: tuple[int, ...]


class Answers(NamedTuple):
    """One-token answers, through the router and past it."""

    requests_per_s: float
    p50_s: float
    p99_s: float
    direct_p50_s: float
    direct_p99_s: float
    added_p50_s: float
    added_p99_s: float
    cpu_s: float  # of the router, per request


class Streams(NamedTuple):
    """Streams under way, without their beginnings."""

    tokens_per_cpu_s: float
    tokens_per_s: float
    tokens_per_event: float


class Idle(NamedTuple):
    """Streams that are open and get nothing."""

    bytes_per_stream: float


@dataclass(slots=True)
class Results:
    """By name of the system and load."""

    answers: dict[tuple[str, int], Answers] = field(default_factory=dict)
    streams: dict[tuple[str, StreamLoad], Streams] = field(default_factory=dict)
    idle: dict[tuple[str, int], Idle] = field(default_factory=dict)
    decisions: list[decisions.Times] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def measure(plan: Plan, starts: Sequence[Start], on_figure: Callable[[str], None]) -> Results:
    """Everything, in turn. `on_figure` gets a line for each figure as it is taken."""
    results = Results()
    answers: dict[tuple[str, int], list[Answers]] = defaultdict(list)
    streams: dict[tuple[str, StreamLoad], list[Streams]] = defaultdict(list)
    idle: dict[tuple[str, int], list[Idle]] = defaultdict(list)
    for repeat in range(plan.repeats):
        for start in in_turn(starts, repeat):
            with Child("-m", "benchmarks.router.load") as load, start() as system:
                load.read_line()
                results.versions[system.name] = system.version
                warm_up(system, load)
                for number, held in _idle_streams(plan, system, load):
                    idle[system.name, number].append(held)
                    on_figure(f"{system.name}: {number} idle streams: {held}")
                for concurrency in plan.concurrency:
                    answers[system.name, concurrency].append(_answers(plan, system, load, concurrency))
                    on_figure(f"{system.name}: {concurrency} at once: {answers[system.name, concurrency][-1]}")
                _measure_streams(plan, system, load, streams, on_figure)
        with Child("-m", "benchmarks.router.load") as load, no_router() as system:
            load.read_line()
            load.ask("answers", system.address, 1, _WARM_UP_REQUESTS)
            _measure_streams(plan, system, load, streams, on_figure)
    results.answers = {key: Answers(*medians(samples)) for key, samples in answers.items()}
    results.streams = {key: Streams(*medians(samples)) for key, samples in streams.items()}
    results.idle = {key: Idle(*medians(samples)) for key, samples in idle.items()}
    for num_pods in plan.decision_pods:
        for num_blocks in plan.decision_blocks:
            results.decisions.append(decisions.measure(num_pods, num_blocks))
            on_figure(str(results.decisions[-1]))
    return results


def warm_up(system: System, load: Child) -> None:
    """So that what is done once is not measured."""
    load.ask("answers", system.address, 1, _WARM_UP_REQUESTS)
    system.ask_directly(load, 1, _WARM_UP_REQUESTS)
    system.set_pace(HOLD)
    load.ask("open", system.address, _WARM_UP_STREAMS, 2)
    system.set_pace("0")
    load.ask("finish")


def _idle_streams(plan: Plan, system: System, load: Child) -> Iterator[tuple[int, Idle]]:
    """First of all, while the router's memory has no holes that streams could fill."""
    system.set_pace(HOLD)
    before = system.router.own_bytes
    opened = 0
    for number in plan.idle_streams:
        load.ask("open", system.address, number - opened, _MANY_TOKENS)
        opened = number
        yield number, Idle((system.router.own_bytes - before) / number)
    load.ask("close")
    system.wait_until_idle()
    system.set_pace("0")


def _answers(plan: Plan, system: System, load: Child, concurrency: int) -> Answers:
    cpu_s = system.router.cpu_s
    routed = load.ask("answers", system.address, concurrency, plan.num_answers)
    cpu_s = system.router.cpu_s - cpu_s
    direct = system.ask_directly(load, concurrency, plan.num_answers)
    p50, p99 = _percentiles(routed["latencies"])
    direct_p50, direct_p99 = _percentiles(direct["latencies"])
    return Answers(
        requests_per_s=plan.num_answers / routed["wall_s"],
        p50_s=p50,
        p99_s=p99,
        direct_p50_s=direct_p50,
        direct_p99_s=direct_p99,
        added_p50_s=p50 - direct_p50,
        added_p99_s=p99 - direct_p99,
        cpu_s=cpu_s / plan.num_answers,
    )


def _measure_streams(
    plan: Plan,
    system: System,
    load: Child,
    streams: dict[tuple[str, StreamLoad], list[Streams]],
    on_figure: Callable[[str], None],
) -> None:
    for what in plan.streams:
        streams[system.name, what].append(_streams(system, load, what))
        on_figure(f"{system.name}: {what}: {streams[system.name, what][-1]}")


def _streams(system: System, load: Child, what: StreamLoad) -> Streams:
    system.set_pace(HOLD)
    load.ask("open", system.address, what.num_streams, what.num_tokens)
    cpu_s = system.router.cpu_s
    started = time.perf_counter()
    system.set_pace(str(what.step_s))
    came = load.ask("finish")
    wall_s = time.perf_counter() - started
    cpu_s = system.router.cpu_s - cpu_s
    system.set_pace("0")
    num_tokens = what.num_streams * (what.num_tokens - 1)  # the first came before
    return Streams(
        tokens_per_cpu_s=num_tokens / max(cpu_s, 0.01),  # processor time comes in steps of 10 ms
        tokens_per_s=num_tokens / wall_s,
        tokens_per_event=num_tokens / came["num_events"],
    )


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    percentiles = statistics.quantiles(seconds, n=100)
    return percentiles[49], percentiles[98]
