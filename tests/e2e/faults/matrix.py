"""One cell of the matrix fault x stage x connector: a fault strikes running requests, and nobody's answer shows it.

1. Streams start; through both routers if the fault is the peer's.
2. The stage is observed and the fault struck.
3. All streams of the first router end, and all that were open on the peer.
4. The fault is healed; everything is ready again and idle, and holds no more than before.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tests.e2e.faults.faults import ClockJump, Cut, Fault, Hang, Kill, Restart, Slow
from tests.e2e.faults.fleet import SETTLE_DEADLINE_S, Fleet, eventually
from tests.e2e.faults.server_process import ServerProcess
from tests.e2e.faults.stages import PodWatch, Stage, reached, watched
from tests.e2e.faults.traffic import Job, Stream, Wave

MAX_TRIES = 40  # to reach a stage before all is over
RUN_DEADLINE_S = 150.0
RESTART = "SIGKILL and restart"
CUT = "network cut"  # between the victim and the first prefill pod
_FAULTS: dict[str, Callable[[ServerProcess], Fault]] = {
    "SIGKILL": Kill,
    RESTART: Restart,
    "SIGSTOP": Hang,
    "slow": Slow,
    "clock jump": ClockJump,
}
COSTS_NOTHING = ("slow", "clock jump")  # nobody is given up
Descriptors = dict[str, int]
# Connections that a server may have beyond those of the first idle moment, after any number of faults: pods meet for
# the first time, and gRPC may connect twice to a server that comes back.
NUM_SPARE_CONNECTIONS = 4
_salts = itertools.count()


class Case(NamedTuple):
    """Which fault strikes whom, and when."""

    fault: str
    victim: str  # name of a server
    stage: Stage

    def __str__(self) -> str:
        return f"{self.fault} of {self.victim}, {self.stage.value}"


class Outcome(NamedTuple):
    """What came of it."""

    connector: str
    case: Case
    num_exact: int  # streams that were answered as if nothing had happened
    num_broken: int  # streams that ended with an error, their router being the victim
    recovery_s: float  # from the fault until the last of the streams that were open had gone on or ended


class Strike(NamedTuple):
    """A fault that has struck."""

    at: float  # monotonic seconds
    open: list[tuple[Stream, int]]  # streams that had not ended, and how many tokens they had


async def warm_up(fleet: Fleet, jobs: Sequence[Job]) -> None:
    """Without a fault: every pod meets every other, and every connection that stays open is opened."""
    for router in (fleet.router, fleet.peer):
        await serve(fleet, router, jobs)


async def serve(fleet: Fleet, router: ServerProcess, jobs: Sequence[Job]) -> None:
    """One wave, all of whose answers are right."""
    wave = Wave(fleet.target(router), jobs, f"salt {next(_salts)}")
    await wave.run()
    assert not wave.faults, "\n".join([*wave.faults, fleet.output])


async def run_case(fleet: Fleet, case: Case, jobs: Sequence[Job], idle: Descriptors) -> Outcome:
    """Raises AssertionError for whatever is not as it should be. The fleet is ready and idle before and after.

    `idle` is what its servers had open when they were first idle.
    """
    for _ in range(MAX_TRIES):
        async with asyncio.timeout(RUN_DEADLINE_S):
            outcome = await _attempt(fleet, case, jobs)
            if case.fault == RESTART:
                await _keep_busy(fleet, jobs)
        await asyncio.to_thread(_settle, fleet, idle)
        if outcome is not None:
            return outcome
    raise AssertionError(f"{case}: the stage was not seen in {MAX_TRIES} waves")


async def _keep_busy(fleet: Fleet, jobs: Sequence[Job]) -> None:
    """Streams until every pod is back, and once more, so that the new incarnation is used."""
    back = asyncio.create_task(asyncio.to_thread(fleet.wait_ready))
    while not back.done():
        await serve(fleet, fleet.router, jobs)
    await back
    await serve(fleet, fleet.router, jobs)


async def _attempt(fleet: Fleet, case: Case, jobs: Sequence[Job]) -> Outcome | None:
    """None: all was over before the stage was seen."""
    victim = fleet.server(case.victim)
    fault = _fault(fleet, case.fault, victim)
    watched_pods = [victim] if victim in fleet.pods else fleet.pods
    hits_peer = victim is fleet.peer
    main = Wave(fleet.target(fleet.router), jobs[: len(jobs) // 2] if hits_peer else jobs, f"salt {next(_salts)}")
    other = Wave(fleet.target(fleet.peer), jobs[len(jobs) // 2 :] if hits_peer else [], f"salt {next(_salts)}")
    async with watched([fleet.target(pod) for pod in watched_pods]) as watches, asyncio.TaskGroup() as group:
        running, other_running = group.create_task(main.run()), group.create_task(other.run())
        at_stage = group.create_task(_reached_on_any(case.stage, other if hits_peer else main, watched_pods, watches))
        await asyncio.wait([at_stage, running], return_when=asyncio.FIRST_COMPLETED)
        if not at_stage.done():
            at_stage.cancel()
            return None
        strike = Strike(time.monotonic(), [(s, len(s.token_ids)) for s in main.streams if not s.ended])
        await fault.strike()
        await running
        if hits_peer and case.fault not in COSTS_NOTHING:
            await asyncio.to_thread(fleet.check_integrity)  # what it had submitted is gone with it
        await fault.heal()
        await other_running
    _check_answers(fleet, case, main, other)
    return _outcome(fleet, case, strike, [*main.streams, *other.streams])


async def _reached_on_any(stage: Stage, wave: Wave, pods: Sequence[ServerProcess], watches: Sequence[PodWatch]) -> None:
    """Returns when the wave has come to the stage on one of the pods."""
    tasks = [
        asyncio.create_task(reached(stage, wave, watch, decodes=pod.name.startswith("decode")))
        for pod, watch in zip(pods, watches, strict=True)
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await next(iter(done))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fault(fleet: Fleet, name: str, victim: ServerProcess) -> Fault:
    return Cut(fleet, fleet.pods[0].name, victim.name) if name == CUT else _FAULTS[name](victim)


def _check_answers(fleet: Fleet, case: Case, main: Wave, other: Wave) -> None:
    assert not main.faults, "\n".join([str(case), *main.faults, fleet.output])
    may_break = case.fault.startswith("SIGKILL")
    faults = [] if may_break else other.faults
    faults += [f"not a prefix: {stream.text!r}" for stream in other.streams if not stream.is_prefix]
    assert not faults, "\n".join([str(case), "through the peer:", *faults, fleet.output])


def _outcome(fleet: Fleet, case: Case, strike: Strike, streams: Sequence[Stream]) -> Outcome:
    num_exact = sum(not stream.fault for stream in streams)
    recovery_s = max((stream.next_at(number) - strike.at for stream, number in strike.open), default=0.0)
    return Outcome(fleet.connector, case, num_exact, len(streams) - num_exact, recovery_s)


def descriptors_of(fleet: Fleet) -> Descriptors:
    """Number of open file descriptors of each server, by name."""
    return {server.name: len(server.descriptors()) for server in fleet.servers}


def _settle(fleet: Fleet, idle: Descriptors) -> None:
    """Returns when the fleet is as it was."""
    fleet.settle()
    for server in fleet.servers:
        bound = idle[server.name] + NUM_SPARE_CONNECTIONS
        eventually(partial(_holds, server, bound), SETTLE_DEADLINE_S, partial(_excess, server, bound))


def _holds(server: ServerProcess, bound: int) -> bool:
    return len(server.descriptors()) <= bound


def _excess(server: ServerProcess, bound: int) -> str:
    return f"{server.name} should have {bound} descriptors at most, has {server.descriptors()}"
