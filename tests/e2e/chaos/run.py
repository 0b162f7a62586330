"""Random requests while everything but the routers fails at random moments; all answers are those of the reference.

1. A round's clients take its requests one after the other, `NUM_CLIENTS` at once, through two routers.
2. Faults strike when so many of the requests have ended; what was killed is started again at once.
3. After the round everything is ready again, sound and empty.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from tests.e2e.chaos.storm import QUARANTINE_S, Moment, draw_storm
from tests.e2e.clients.answers import Answer, Checker, Job
from tests.e2e.clients.fronts import Front, answer_of
from tests.e2e.clients.grpc_client import GrpcFront, grpc_channels
from tests.e2e.clients.http_client import HttpFront, http_client
from tests.e2e.clients.progress import Progress
from tests.e2e.clients.reference import answered
from tests.e2e.clients.specs import Api, random_spec
from tests.e2e.faults.fleet import ROUTER_SETTINGS, Fleet, Settings, Size, running_fleet

NUM_CLIENTS = 12  # at once
ROUND_SIZE = 75  # requests
ROUND_DEADLINE_S = 400.0
RESTART_INTERVAL_S = 1.0
NUM_BLOCKS = 80  # of a pod: so few that blocks are reused at once, and requests are preempted
SETTINGS: Settings = {
    "prefill": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "policy": "priority",
        "handoff_quarantine_s": QUARANTINE_S,
    },
    "decode": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "policy": "priority",
        "handoff_queue_timeout_s": 8,  # not minutes, as all prefill pods may hang, and faults last until requests end
    },
    "router": ROUTER_SETTINGS,
}
_RECOVERIES = ("baton_router_redispatch_total", "baton_router_recompute_total", "baton_router_prefill_retries_total")


class Round:
    """One round of a run."""

    def __init__(self, fleet: Fleet, jobs: Sequence[Job], storm: Sequence[Moment], checker: Checker) -> None:
        self.failures: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._fleet = fleet
        self._num_jobs = len(jobs)
        self._jobs = iter(jobs)
        self._storm = list(storm)
        self._checker = checker
        self._progress = Progress()
        self._num_ended = 0

    async def run(self) -> None:
        """Returns when every request has ended and every fault is over."""
        routers = (self._fleet.router, self._fleet.peer)
        async with (
            asyncio.timeout(ROUND_DEADLINE_S),
            http_client() as http,
            grpc_channels([self._fleet.target(router) for router in routers]) as channels,
            asyncio.TaskGroup() as tasks,
        ):
            urls = [self._fleet.http(router)[0] for router in routers]
            fronts = {Api.HTTP: HttpFront(http, urls), Api.GRPC: GrpcFront(channels)}
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._client(fronts, tasks))

    async def _client(self, fronts: Mapping[Api, Front], tasks: asyncio.TaskGroup) -> None:
        for job in self._jobs:
            self._judge(job, await answer_of(fronts, job.spec, self._progress))
            self._num_ended += 1
            while self._storm and self._num_ended >= self._storm[0].at * self._num_jobs:
                tasks.create_task(self._storm.pop(0).act())

    def _judge(self, job: Job, answer: Answer) -> None:
        problem = self._checker.difference(job, answer)
        if not problem and answer.error:
            # The client said that it would rather have no answer than one whose KV must be computed again.
            is_allowed = answer.is_unavailable and job.spec.fails_without_kv
            problem = "" if is_allowed else answer.error
        if problem:
            self.failures.append(f"{job.spec}\n  {problem}\n  got {answer}\n  expected {job.expected}")
        self.outcomes["failed" if answer.error else "left" if answer.has_left else "exact"] += 1


def make_jobs(seed: int, count: int) -> list[Job]:
    """Requests of one seed, with their answers."""
    rng = random.Random(seed)
    return answered([random_spec(rng, f"seed {seed}, request {index}") for index in range(count)])


async def run_rounds(fleet: Fleet, jobs: Sequence[Job], checker: Checker, rng: random.Random) -> Counter[str]:
    """Returns how requests ended. Raises AssertionError with all that is needed to find out why one ended wrongly."""
    outcomes: Counter[str] = Counter()
    for first in range(0, len(jobs), ROUND_SIZE):
        storm = draw_storm(fleet, rng)
        round_ = Round(fleet, jobs[first : first + ROUND_SIZE], storm, checker)
        await round_.run()
        if round_.failures:
            raise AssertionError("\n".join([*map(str, storm), *round_.failures, fleet.output]))
        outcomes += round_.outcomes
        await _settle(fleet)
    return outcomes


async def _settle(fleet: Fleet) -> None:
    """Returns when the fleet is as it was. A pod that was started while its store did not answer has refused to run,
    and is started again, as a supervisor would do."""
    settling = asyncio.create_task(asyncio.to_thread(fleet.settle))
    while not settling.done():
        fleet.start()
        await asyncio.wait([settling], timeout=RESTART_INTERVAL_S)
    await settling


def num_recoveries(fleet: Fleet) -> float:
    """How often a request had to go on without something that it had counted on."""
    return sum(fleet.metric(router, name) for router in (fleet.router, fleet.peer) for name in _RECOVERIES)


def chaos_fleet(connector: str) -> AbstractContextManager[Fleet]:
    """Two pods of each role."""
    return running_fleet(connector, Size(2, 2), settings=SETTINGS, num_blocks=NUM_BLOCKS)
