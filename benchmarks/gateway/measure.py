"""The measurements. The routers of this checkout and of the older one run at the same time and take turns, case by
case, so that what else the machine does is the same for both. Both are restarted for each repeat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.gateway.workload import SETUPS, Case, Setup
from benchmarks.harness.checkouts import BEFORE, HERE, NOW, Checkout
from benchmarks.harness.figures import in_turn, medians, ratio
from benchmarks.harness.processes import Child, ChildEndedError, OrderError
from benchmarks.router.measure import StreamLoad
from benchmarks.router.pace import HOLD
from benchmarks.router.systems import System, baton

_WARM_UP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    repeats: int
    concurrency: int
    num_answers: int
    fast: StreamLoad  # whose tokens come as fast as they can
    paced: StreamLoad  # whose tokens come at a rate, as those of a model do


class Cost(NamedTuple):
    """Processor seconds of the router, of all its threads."""

    request_s: float  # of a whole answer of one token
    token_s: float  # of streams under way, as fast as they come
    paced_token_s: float  # of those with a rate: the router wakes up for every step of the pod


class Router(NamedTuple):
    """Which router is measured."""

    checkout: Checkout = HERE
    options: tuple[str, ...] = ()


# What operators see of each request: lines of a log, timelines. A log level given twice is the last one.
SEEN = Router(options=("--log-level", "info"))
UNSEEN = Router(options=("--max-timelines", "0", "--no-access-log"))


@dataclass(slots=True)
class Results:
    """By name of the case; one Cost for each repeat."""

    now: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    before: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))  # cases that it has

    @property
    def medians(self) -> dict[str, Cost]:
        """Medians of this checkout."""
        return {name: Cost(*medians(costs)) for name, costs in self.now.items()}

    @property
    def medians_before(self) -> dict[str, Cost]:
        """Medians of the older one."""
        return {name: Cost(*medians(costs)) for name, costs in self.before.items()}

    @property
    def ratios(self) -> dict[str, Cost]:
        """Medians of now / before, each of two that were taken one after the other; not seconds."""
        return {
            name: Cost(*map(ratio, zip(*self.now[name], strict=True), zip(*costs, strict=True)))
            for name, costs in self.before.items()
        }


def measure(plan: Plan, now: Router, before: Router | None, on_figure: Callable[[str], None]) -> Results:
    """Everything, in turn. `before`: what `now` is compared with. `on_figure` gets a line for each figure."""
    results = Results()
    for repeat in range(plan.repeats):
        for setup in SETUPS:
            with Child("-m", "benchmarks.router.load") as load, ExitStack() as stack:
                load.read_line()
                sides = {NOW: stack.enter_context(start(setup, now))}
                if before is not None and (older := _start_older(setup, before, stack)) is not None:
                    sides[BEFORE] = older
                for case in setup.cases:
                    for side, system in in_turn(sides.items(), repeat):
                        if side == BEFORE and not has(system, load, case):
                            continue
                        costs = (results.now if side == NOW else results.before)[case.name]
                        costs.append(_cost(plan, system, load, case))
                        on_figure(f"{case.name}, {side}: {costs[-1]}")
    return results


def start(setup: Setup, router: Router, under: Sequence[str] = ()) -> AbstractContextManager[System]:
    """The router between pods. `under`: see Child."""
    return baton(checkout=router.checkout, options=[*setup.options, *router.options], answer=setup.answer, under=under)


def _start_older(setup: Setup, router: Router, stack: ExitStack) -> System | None:
    """None: it does not know the options."""
    try:
        return stack.enter_context(start(setup, router))
    except ChildEndedError:
        return None


def has(system: System, load: Child, case: Case) -> bool:
    """Whether its requests are served."""
    try:
        ask_answers(system, load, case, 1, 1)
    except OrderError:
        return False
    return True


def _cost(plan: Plan, system: System, load: Child, case: Case) -> Cost:
    ask_answers(system, load, case, plan.concurrency, _WARM_UP)
    cpu_s = system.router.cpu_s
    ask_answers(system, load, case, plan.concurrency, plan.num_answers)
    request_s = (system.router.cpu_s - cpu_s) / plan.num_answers
    return Cost(request_s, *(_token_s(system, load, case, streams) for streams in (plan.fast, plan.paced)))


def _token_s(system: System, load: Child, case: Case, streams: StreamLoad) -> float:
    system.set_pace(HOLD)
    _open(system, load, case, streams)
    cpu_s = system.router.cpu_s
    system.set_pace(str(streams.step_s))
    load.ask("finish")
    cpu_s = system.router.cpu_s - cpu_s
    system.set_pace("0")
    return cpu_s / (streams.num_streams * (streams.num_tokens - 1))  # the first came before


def ask_answers(system: System, load: Child, case: Case, concurrency: int, count: int) -> None:
    """Asks for answers of one token. Raises OrderError if one fails."""
    if case.call is None:
        load.ask("grpc_answers", system.grpc_address, concurrency, count)
    else:
        load.ask("answers", system.address, concurrency, count, case.call)


def _open(system: System, load: Child, case: Case, streams: StreamLoad) -> None:
    if case.call is None:
        load.ask("grpc_open", system.grpc_address, streams.num_streams, streams.num_tokens)
    else:
        load.ask("open", system.address, streams.num_streams, streams.num_tokens, case.call)
