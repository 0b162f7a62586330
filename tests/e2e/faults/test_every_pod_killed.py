"""Hundreds of streams at once over two prefill and two decode pods, each of which is killed once: exact answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from common.demo_model import demo_model_path
from common.tokenization import Tokenizer
from common.types import SamplingParams
from tests.e2e.clients.answers import Checker, Job
from tests.e2e.clients.fronts import Front, answer_of
from tests.e2e.clients.http_client import HttpFront, http_client
from tests.e2e.clients.progress import Progress
from tests.e2e.clients.reference import answered
from tests.e2e.clients.specs import Api, RequestSpec
from tests.e2e.faults.fleet import ROUTER_SETTINGS, Fleet, Settings, Size, running_fleet
from tests.e2e.reference import PROMPTS

MAX_TOKENS = 24
VICTIMS = ("decode-0", "prefill-0", "decode-1", "prefill-1")
FIRST_KILL = 0.1  # share of the tokens that clients have received
RUN_DEADLINE_S = 300.0
SETTINGS: Settings = {
    "prefill": {"handoff_quarantine_s": 5},
    "decode": {"max_num_seqs": 32},
    "router": ROUTER_SETTINGS,
}


class Run:
    """As many clients as jobs; each sends its request again as long as pods remain to be killed."""

    def __init__(self, fleet: Fleet, jobs: Sequence[Job]) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self._fleet = fleet
        self._jobs = jobs
        self._checker = Checker(Tokenizer.from_directory(demo_model_path()))
        self._progress = Progress()
        self._all_killed = False

    async def run(self) -> None:
        """Returns when every stream has ended and every pod is back."""
        async with asyncio.timeout(RUN_DEADLINE_S), http_client() as client, asyncio.TaskGroup() as group:
            front = HttpFront(client, [self._fleet.http(self._fleet.router)[0]])
            group.create_task(self._kill_each())
            for job in self._jobs:
                group.create_task(self._client(front, job))

    async def _client(self, front: Front, job: Job) -> None:
        while True:
            answer = await answer_of({Api.HTTP: front}, job.spec, self._progress)
            failure = answer.error or self._checker.difference(job, answer)
            self.num_answers += 1
            if failure:
                self.failures.append(f"{job.spec}: {failure}")
            if self._all_killed or failure:
                return

    async def _kill_each(self) -> None:
        """One after the other is back: a decode pod is always alive."""
        await self._progress.until(int(FIRST_KILL * MAX_TOKENS * len(self._jobs)))
        for name in VICTIMS:
            victim = self._fleet.server(name)
            await asyncio.to_thread(victim.wait_gone, victim.kill())
            victim.start()
            self._all_killed = name == VICTIMS[-1]
            await asyncio.to_thread(self._fleet.wait_ready)


@pytest.mark.parametrize(
    ("connector", "num_streams"),
    [
        pytest.param("shared-storage", 500, marks=pytest.mark.slow),
        pytest.param("redis", 500, marks=pytest.mark.slow),
        pytest.param("nixl", 500, marks=pytest.mark.slow),
    ],
)
async def test_each_pod_is_killed_once_and_every_answer_is_exact(connector: str, num_streams: int) -> None:
    jobs = await asyncio.to_thread(make_jobs, num_streams)
    with running_fleet(connector, Size(2, 2), settings=SETTINGS) as fleet:
        run = Run(fleet, jobs)
        await run.run()
        assert not run.failures, "\n".join([*run.failures[:20], fleet.output])
        assert run.num_answers >= num_streams
        await asyncio.to_thread(fleet.check_integrity)


def make_jobs(count: int) -> list[Job]:
    """Short prompts; greedy and seeded in turn, every fifth with logprobs."""
    specs = []
    for index in range(count):
        greedy = index % 2 == 0
        params = SamplingParams(
            temperature=0.0 if greedy else 0.9,
            seed=None if greedy else index,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            num_logprobs=0 if index % 5 == 0 else None,
        )
        prompt = f"{index}. {PROMPTS[index % len(PROMPTS)]}"
        specs.append(RequestSpec(name=str(index), api=Api.HTTP, prompt=prompt, params=params))
    return answered(specs, serially=False)
