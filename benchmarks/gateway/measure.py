"""The measurements. This checkout and the older one take turns, each started anew for each repeat."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.gateway.workload import SETUPS, Case, Setup
from benchmarks.router.measure import StreamLoad
from benchmarks.router.pace import HOLD
from benchmarks.router.processes import Child, ChildEndedError, OrderError
from benchmarks.router.systems import System, baton

_WARM_UP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    repeats: int
    concurrency: int
    num_answers: int
    streams: StreamLoad


class Cost(NamedTuple):
    """Processor seconds of the router, of all its threads."""

    request_s: float  # of a whole answer of one token
    token_s: float  # of a stream under way


@dataclass(slots=True)
class Results:
    """By name of the case; one Cost for each repeat."""

    now: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    before: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))  # cases that it has

    @property
    def medians(self) -> dict[str, Cost]:
        """Of this checkout."""
        return {name: _median(costs) for name, costs in self.now.items()}

    @property
    def medians_before(self) -> dict[str, Cost]:
        """Of the older one."""
        return {name: _median(costs) for name, costs in self.before.items()}

    @property
    def ratios(self) -> dict[str, Cost]:
        """Medians of now / before, each of two that were taken one after the other; not seconds."""
        return {
            name: _median(
                [
                    Cost(now.request_s / before.request_s, now.token_s / before.token_s)
                    for now, before in zip(self.now[name], costs, strict=True)
                ]
            )
            for name, costs in self.before.items()
        }


def measure(plan: Plan, before: Path | None, on_figure: Callable[[str], None]) -> Results:
    """Everything, in turn. `before`: the older checkout, if there is one. `on_figure` gets a line for each figure."""
    results = Results()
    checkouts = [None] if before is None else [None, before]
    for repeat in range(plan.repeats):
        for setup in SETUPS:
            for checkout in checkouts if repeat % 2 == 0 else reversed(checkouts):
                table = results.now if checkout is None else results.before
                for name, cost in _costs(plan, setup, checkout).items():
                    table[name].append(cost)
                    on_figure(f"{checkout or 'this checkout'}: {name}: {cost}")
    return results


def _costs(plan: Plan, setup: Setup, checkout: Path | None) -> dict[str, Cost]:
    """By name of the case. An older checkout may lack some, or the options of all."""
    with ExitStack() as stack:
        load = stack.enter_context(Child("benchmarks.gateway.load"))
        load.read_line()
        try:
            system = stack.enter_context(baton(directory=checkout, options=setup.options, answer=setup.answer))
        except ChildEndedError:
            if checkout is None:
                raise
            return {}
        cases = [case for case in setup.cases if checkout is None or _has(system, load, case)]
        return {case.name: _cost(plan, system, load, case) for case in cases}


def _has(system: System, load: Child, case: Case) -> bool:
    """Whether its requests are served."""
    try:
        _ask_answers(system, load, case, 1, 1)
    except OrderError:
        return False
    return True


def _cost(plan: Plan, system: System, load: Child, case: Case) -> Cost:
    _ask_answers(system, load, case, plan.concurrency, _WARM_UP)
    cpu_s = system.router.cpu_s
    _ask_answers(system, load, case, plan.concurrency, plan.num_answers)
    request_s = (system.router.cpu_s - cpu_s) / plan.num_answers
    num_streams, num_tokens, step_s = plan.streams
    system.set_pace(HOLD)
    _open(system, load, case, num_streams, num_tokens)
    cpu_s = system.router.cpu_s
    system.set_pace(str(step_s))
    load.ask("finish")
    token_s = (system.router.cpu_s - cpu_s) / (num_streams * (num_tokens - 1))  # the first came before
    system.set_pace("0")
    return Cost(request_s, token_s)


def _ask_answers(system: System, load: Child, case: Case, concurrency: int, count: int) -> None:
    if case.call is None:
        load.ask("grpc_answers", system.grpc_address, concurrency, count)
    else:
        load.ask("answers", system.address, concurrency, count, case.call)


def _open(system: System, load: Child, case: Case, num_streams: int, num_tokens: int) -> None:
    if case.call is None:
        load.ask("grpc_open", system.grpc_address, num_streams, num_tokens)
    else:
        load.ask("open", system.address, num_streams, num_tokens, case.call)


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))
