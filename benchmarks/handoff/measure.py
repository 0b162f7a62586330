"""The measurements: both sides take turns, and each figure of a side is taken from all of its turns."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.handoff import loads, offline
from benchmarks.harness.checkouts import NOW, Checkout
from benchmarks.harness.client import Client, Driver
from benchmarks.harness.figures import in_turn
from benchmarks.harness.models import Model

ROWS = (1, 2, 3, 4, 5)
STEP_BUDGET = 2048  # tokens, what pods take by default
TARGET_ITL_S = 0.05
LEAST_PROMPT_TOKENS = 64  # MIN_PREFILL_TOKENS; the older checkout may lack the name
NUM_STREAMS = 8
_COPIES = 50
Config = dict[str, dict[str, object]]  # sections of the file that `baton up` reads
_PREFER_PREFILL_PODS: Config = {"router": {"remote_prefill": "prefer"}}
_UNBOUNDED: Config = _PREFER_PREFILL_PODS | {"prefill": {"target_itl_ms": None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    turns: int
    connectors: tuple[str, ...]
    steps_s: tuple[float, ...]  # rising; of the prefill pod that never rests
    seconds: float  # for each connector and step time
    min_samples: int
    handed_over: tuple[int, int] = (512, 64)  # tokens of the prompts and answers of streams that are handed over
    colocated: tuple[int, int] = (128, 128)
    long_prompt: int = 2048
    interval_s: float = 2.0  # between long prompts
    beside_s: float = 15.0
    decoding: tuple[int, int] = (128, 48)
    batches: tuple[int, ...] = (1, 8)


class Cell(NamedTuple):
    """Handoffs over one connector beside steps of one length."""

    connector: str
    asked_step_s: float


@dataclass(slots=True)
class Taken:
    """All that was measured of one side. Times are seconds."""

    handoffs: dict[Cell, loads.Handoffs] = field(default_factory=dict)
    first_gaps: list[float] = field(default_factory=list)  # in median ITLs
    beside: list[loads.Beside] = field(default_factory=list)
    at_once: list[loads.AtOnce] = field(default_factory=list)
    at_once_unbounded: list[loads.AtOnce] = field(default_factory=list)  # with target_itl_ms null
    itls: dict[int, list[float]] = field(default_factory=dict)  # by batch; in a pod
    steps: dict[int, list[float]] = field(default_factory=dict)  # by batch; offline


@dataclass(slots=True)
class Results:
    """The results of both sides."""

    taken: dict[str, Taken]  # by name of the side
    copy_s: float = 0.0  # of the KV of a probe


class Benchmark:
    """Takes all figures, and tells `on_figure` of each."""

    def __init__(
        self, plan: Plan, sides: Sequence[Checkout], model: Model, scratch: Path, on_figure: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._sides = sides
        self._model = model
        self._scratch = scratch
        self._say = on_figure
        self._token_s: float | None = None
        self.results = Results({side.name: Taken() for side in sides}, copy_s=_copy_time(model, loads.PROBE_TOKENS))

    def run(self, rows: Sequence[int]) -> Results:
        """Takes the figures of `rows`."""
        if 1 in rows:
            self._each_connector()
        for turn in range(self._plan.turns):
            for side in in_turn(self._sides, turn):
                if {2, 4} & {*rows}:
                    self._handed_over(side, rows)
                if 4 in rows and side.name == NOW:
                    self._unbounded(side)
                if {3, 5} & {*rows}:
                    self._colocated(side, rows, turn)
        return self.results

    def _each_connector(self) -> None:
        for turn, connector in enumerate(self._plan.connectors):
            for side in in_turn(self._sides, turn):
                taken = self.results.taken[side.name]
                with self._cluster(side, "--connector", connector, config=_UNBOUNDED) as driver:
                    for step_s in self._plan.steps_s:
                        cell = Cell(connector, step_s)
                        taken.handoffs[cell] = self._handoffs(driver, step_s)
                        self._say(f"{side.name}: {cell}: {taken.handoffs[cell]}")

    def _handoffs(self, driver: Driver, step_s: float) -> loads.Handoffs:
        plan = self._plan
        if self._token_s is None:  # once, so that both sides get the same prompts
            self._token_s = driver.run(loads.token_time)
        return driver.run(
            loads.handoffs,
            step_tokens=min(max(1, round(step_s / self._token_s)), STEP_BUDGET - loads.PROBE_TOKENS),
            step_s=step_s,
            seconds=plan.seconds,
            min_samples=plan.min_samples,
        )

    def _handed_over(self, side: Checkout, rows: Sequence[int]) -> None:
        taken = self.results.taken[side.name]
        num_prompt_tokens, num_tokens = self._plan.handed_over
        with self._cluster(side, config=_PREFER_PREFILL_PODS) as driver:
            if 2 in rows:
                gaps = driver.run(
                    loads.first_gaps,
                    num_streams=NUM_STREAMS,
                    num_prompt_tokens=num_prompt_tokens,
                    num_tokens=num_tokens,
                )
                taken.first_gaps += gaps
                self._say(f"{side.name}: gaps in ITLs: {gaps}")
            if 4 in rows:
                taken.at_once.append(self._at_once(driver))
                self._say(f"{side.name}: {taken.at_once[-1]}")

    def _unbounded(self, side: Checkout) -> None:
        taken = self.results.taken[side.name]
        with self._cluster(side, config=_UNBOUNDED) as driver:
            taken.at_once_unbounded.append(self._at_once(driver))
        self._say(f"{side.name}, target_itl_ms null: {taken.at_once_unbounded[-1]}")

    def _at_once(self, driver: Driver) -> loads.AtOnce:
        num_prompt_tokens, _ = self._plan.handed_over
        return driver.run(loads.prompts_at_once, num_prompts=NUM_STREAMS, num_prompt_tokens=num_prompt_tokens)

    def _colocated(self, side: Checkout, rows: Sequence[int], turn: int) -> None:
        with self._cluster(side, "--prefill", "0") as driver:
            if 5 in rows:  # the pod rests while the model runs offline
                for measure in in_turn((self._in_pod, self._offline), turn):
                    measure(side, driver)
            if 3 in rows:
                self._beside(side, driver)

    def _in_pod(self, side: Checkout, driver: Driver) -> None:
        taken = self.results.taken[side.name]
        num_prompt_tokens, num_tokens = self._plan.decoding
        for batch in self._plan.batches:
            itls = driver.run(
                loads.steady_itls, num_streams=batch, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens
            )
            taken.itls.setdefault(batch, []).extend(itls)
            self._say(f"{side.name}: batch {batch}: ITL {statistics.median(itls):.5f} s")

    def _offline(self, side: Checkout, _: Driver) -> None:
        plan = self._plan
        arguments = map(str, (self._model.directory, *plan.decoding, *plan.batches))
        all_cores = str(len(os.sched_getaffinity(0)))
        with side.start(offline.__file__, *arguments, OMP_NUM_THREADS=all_cores) as script:
            times = json.loads(script.read_until("{"))
        for batch in plan.batches:
            self.results.taken[side.name].steps.setdefault(batch, []).extend(times[str(batch)])
            self._say(f"{side.name}: batch {batch}: step offline {statistics.median(times[str(batch)]):.5f} s")

    def _beside(self, side: Checkout, driver: Driver) -> None:
        plan = self._plan
        num_prompt_tokens, num_tokens = plan.colocated
        beside = driver.run(
            loads.beside_prompts,
            num_streams=NUM_STREAMS,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_tokens,
            long_prompt_tokens=plan.long_prompt,
            interval_s=plan.interval_s,
            seconds=plan.beside_s,
            least_prompt_tokens=LEAST_PROMPT_TOKENS,
        )
        self.results.taken[side.name].beside.append(beside)
        self._say(f"{side.name}: {replace(beside, gaps=sorted(beside.gaps)[-NUM_STREAMS:])}")

    @contextmanager
    def _cluster(self, side: Checkout, *options: str, config: Config | None = None) -> Iterator[Driver]:
        """A cluster that has warmed up."""
        model = self._model
        with side.cluster(self._scratch, "--model", str(model.directory), *options, config=config) as url:
            driver = Driver(url, model.name, model.vocab_size)
            driver.run(Client.complete_at_once, 2, LEAST_PROMPT_TOKENS, 4)
            yield driver


def _copy_time(model: Model, num_tokens: int) -> float:
    """Seconds in which memory takes the KV of so many tokens from one place to another and back."""
    source = bytes(num_tokens * model.kv_bytes_per_token)
    target = bytearray(source)
    times = []
    for _ in range(_COPIES):
        started = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - started)
    return 2 * statistics.median(times)
