"""The measurements: both sides take turns, and each figure of a side is taken from all of its turns."""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import uvloop

from benchmarks.handoff import loads
from benchmarks.handoff.client import Client
from benchmarks.handoff.model import Model
from benchmarks.handoff.sides import ScriptError, Side, in_turn

ROWS = (1, 2, 3, 4, 5, 6)
AFTER = "after"
BEFORE = "before"
STEP_BUDGET = 2048  # tokens, what pods take by default
TARGET_ITL_S = 0.05
LEAST_PROMPT_TOKENS = 64  # MIN_PREFILL_TOKENS; the older checkout may lack the name
NUM_STREAMS = 8
_ROW_TIMEOUT_S = 600.0
Config = dict[str, dict[str, object]]  # sections of the file that `baton up` reads
_PREFER_PREFILL_PODS: Config = {"router": {"remote_prefill": "prefer"}}
_UNBOUNDED: Config = _PREFER_PREFILL_PODS | {"prefill": {"target_itl_ms": None}}

Result = TypeVar("Result")


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
    num_running: int = 256
    num_scheduler_steps: int = 200


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
    scheduler: list[float] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)  # by row: why there is nothing


@dataclass(slots=True)
class Results:
    """The results of both sides."""

    taken: dict[str, Taken]  # by name of the side
    copy_s: float = 0.0  # of the KV of a probe


class Benchmark:
    """Takes all figures, and tells `on_figure` of each."""

    def __init__(
        self, plan: Plan, sides: Sequence[Side], model: Model, scratch: Path, on_figure: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._sides = sides
        self._model = model
        self._scratch = scratch
        self._say = on_figure
        self._token_s: float | None = None
        self.results = Results({side.name: Taken() for side in sides}, copy_s=model.copy_time(loads.PROBE_TOKENS))

    def run(self, rows: Sequence[int]) -> Results:
        """Takes the figures of `rows`."""
        if 1 in rows:
            self._each_connector()
        for turn in range(self._plan.turns):
            for side in in_turn(self._sides, turn):
                if {2, 4} & {*rows}:
                    self._handed_over(side, rows)
                if 4 in rows and side.name == AFTER:
                    self._unbounded(side)
                if {3, 5} & {*rows}:
                    self._colocated(side, rows, turn)
                if 6 in rows:
                    self._scheduler(side)
        return self.results

    def _each_connector(self) -> None:
        for turn, connector in enumerate(self._plan.connectors):
            for side in in_turn(self._sides, turn):
                taken = self.results.taken[side.name]
                config = _UNBOUNDED if side.has_option("--target-itl-ms") else _PREFER_PREFILL_PODS
                with self._cluster(side, "--connector", connector, config=config) as client:
                    for step_s in self._plan.steps_s:
                        cell = Cell(connector, step_s)
                        taken.handoffs[cell] = self._handoffs(client, step_s)
                        self._say(f"{side.name}: {cell}: {taken.handoffs[cell]}")

    def _handoffs(self, client: Driver, step_s: float) -> loads.Handoffs:
        plan = self._plan
        if self._token_s is None:  # once, so that both sides get the same prompts
            self._token_s = client.run(loads.token_time)
        step_tokens = min(max(1, round(step_s / self._token_s)), STEP_BUDGET - loads.PROBE_TOKENS)
        return client.run(
            lambda client: loads.handoffs(
                client, step_tokens=step_tokens, step_s=step_s, seconds=plan.seconds, min_samples=plan.min_samples
            )
        )

    def _handed_over(self, side: Side, rows: Sequence[int]) -> None:
        taken = self.results.taken[side.name]
        num_prompt_tokens, num_tokens = self._plan.handed_over
        with self._cluster(side, config=_PREFER_PREFILL_PODS) as client:
            if 2 in rows:
                gaps = client.run(
                    lambda client: loads.first_gaps(
                        client, num_streams=NUM_STREAMS, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens
                    )
                )
                taken.first_gaps += gaps
                self._say(f"{side.name}: gaps in ITLs: {gaps}")
            if 4 in rows:
                taken.at_once.append(self._at_once(client))
                self._say(f"{side.name}: {taken.at_once[-1]}")

    def _unbounded(self, side: Side) -> None:
        taken = self.results.taken[side.name]
        with self._cluster(side, config=_UNBOUNDED) as client:
            taken.at_once_unbounded.append(self._at_once(client))
        self._say(f"{side.name}, target_itl_ms null: {taken.at_once_unbounded[-1]}")

    def _at_once(self, client: Driver) -> loads.AtOnce:
        num_prompt_tokens, _ = self._plan.handed_over
        return client.run(
            lambda client: loads.prompts_at_once(client, num_prompts=NUM_STREAMS, num_prompt_tokens=num_prompt_tokens)
        )

    def _colocated(self, side: Side, rows: Sequence[int], turn: int) -> None:
        with self._cluster(side, "--prefill", "0") as client:
            if 5 in rows:
                self._steady(side, client, turn)
            if 3 in rows:
                self._beside(side, client)

    def _steady(self, side: Side, client: Driver, turn: int) -> None:
        """The pod rests while the same model runs offline."""
        taken, plan = self.results.taken[side.name], self._plan
        num_prompt_tokens, num_tokens = plan.decoding

        def in_pod() -> None:
            for batch in plan.batches:
                load = functools.partial(
                    loads.steady_itls, num_streams=batch, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens
                )
                taken.itls.setdefault(batch, []).extend(client.run(load))

        def offline() -> None:
            times = side.run("offline.py", self._model.directory, num_prompt_tokens, num_tokens, *plan.batches)
            for batch in plan.batches:
                taken.steps.setdefault(batch, []).extend(times[str(batch)])

        for measure in (in_pod, offline) if turn % 2 == 0 else (offline, in_pod):
            measure()
        for batch in plan.batches:
            itl, step = statistics.median(taken.itls[batch]), statistics.median(taken.steps[batch])
            self._say(f"{side.name}: batch {batch}: ITL {itl:.5f} s, step offline {step:.5f} s")

    def _beside(self, side: Side, client: Driver) -> None:
        plan = self._plan
        num_prompt_tokens, num_tokens = plan.colocated
        beside = client.run(
            lambda client: loads.beside_prompts(
                client,
                num_streams=NUM_STREAMS,
                num_prompt_tokens=num_prompt_tokens,
                num_tokens=num_tokens,
                long_prompt_tokens=plan.long_prompt,
                interval_s=plan.interval_s,
                seconds=plan.beside_s,
                least_prompt_tokens=LEAST_PROMPT_TOKENS,
            )
        )
        self.results.taken[side.name].beside.append(beside)
        self._say(f"{side.name}: {replace(beside, gaps=sorted(beside.gaps)[-NUM_STREAMS:])}")

    def _scheduler(self, side: Side) -> None:
        taken, plan = self.results.taken[side.name], self._plan
        try:
            taken.scheduler += side.run("scheduling.py", plan.num_running, plan.num_scheduler_steps)
        except ScriptError as error:
            if side.name == AFTER:
                raise
            taken.reasons[6] = str(error)
            return
        self._say(f"{side.name}: scheduler: {statistics.median(taken.scheduler):.6f} s")

    @contextmanager
    def _cluster(self, side: Side, *options: str, config: Config | None = None) -> Iterator[Driver]:
        """A cluster that has warmed up."""
        model = self._model
        with side.cluster(self._scratch, "--model", str(model.directory), *options, config=config) as url:
            driver = Driver(Client(url, model.name, model.vocab_size, seed=0))
            driver.run(lambda client: client.complete_at_once(2, LEAST_PROMPT_TOKENS, 4))
            yield driver


class Driver:
    """Runs loads to their end, each in an event loop of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def run(self, load: Callable[[Client], Awaitable[Result]]) -> Result:
        """Raises TimeoutError if a load takes longer than any should."""

        async def bounded() -> Result:
            async with asyncio.timeout(_ROW_TIMEOUT_S):
                return await load(self._client)

        return uvloop.run(bounded())


def as_json(results: Results) -> dict[str, object]:
    """Returns the results for a file."""
    sides = {name: asdict(taken) for name, taken in results.taken.items()}
    for taken in sides.values():
        taken["handoffs"] = [cell._asdict() | each for cell, each in taken["handoffs"].items()]
    return {"copy_s": results.copy_s, "sides": sides}
