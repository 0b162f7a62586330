"""Hundreds of streams at once over two prefill and two decode pods, each of which is killed once: exact answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from common.engine.llm import LLM
from common.types import SamplingParams
from tests.e2e.faults.fleet import ROUTER_SETTINGS, Fleet, Settings, Size, running_fleet
from tests.e2e.faults.http_streams import HttpJob, failure_of, timeout
from tests.e2e.reference import PROMPTS, greedy_completion

MAX_TOKENS = 24
ANCHOR_EVERY = 25  # so many jobs, one is also answered by `transformers`
VICTIMS = ("decode-0", "prefill-0", "decode-1", "prefill-1")
FIRST_KILL = 0.1  # share of the tokens that clients have received
RUN_DEADLINE_S = 300.0
SETTINGS: Settings = {
    "prefill": {"handoff_quarantine_s": 5},
    "decode": {"max_num_seqs": 32},
    "router": ROUTER_SETTINGS,
}


class Run:
    """As many clients as jobs, each with its own; whoever is done begins anew while pods remain to be killed."""

    def __init__(self, fleet: Fleet, jobs: Sequence[HttpJob]) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self._fleet = fleet
        self._jobs = jobs
        self._num_events = 0
        self._begun = asyncio.Event()
        self._all_killed = False

    async def run(self) -> None:
        """Returns when every stream has ended and every pod is back."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        url, _ = self._fleet.http(self._fleet.router)
        async with (
            asyncio.timeout(RUN_DEADLINE_S),
            httpx.AsyncClient(limits=limits, timeout=timeout()) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._kill_each())
            for job in self._jobs:
                group.create_task(self._client(client, url, job))

    async def _client(self, client: httpx.AsyncClient, url: str, job: HttpJob) -> None:
        while True:
            failure = await failure_of(client, url, job, self._on_event)
            self.num_answers += 1
            if failure:
                self.failures.append(f"{job.prompt!r}: {failure}")
            if self._all_killed or failure:
                return

    def _on_event(self) -> None:
        self._num_events += 1
        if self._num_events >= FIRST_KILL * MAX_TOKENS * len(self._jobs):
            self._begun.set()

    async def _kill_each(self) -> None:
        """One after the other is back: a decode pod is always alive."""
        await self._begun.wait()
        for name in VICTIMS:
            victim = self._fleet.server(name)
            await asyncio.to_thread(victim.wait_gone, victim.kill())
            victim.start()
            self._all_killed = name == VICTIMS[-1]
            await asyncio.to_thread(self._fleet.wait_ready)


@pytest.mark.parametrize(
    ("connector", "num_streams"),
    [
        pytest.param("shared-storage", 500),
        pytest.param("redis", 500, marks=pytest.mark.slow),
        pytest.param("nixl", 500, marks=pytest.mark.slow),
    ],
)
async def test_each_pod_is_killed_once_and_every_answer_is_exact(connector: str, num_streams: int) -> None:
    jobs = await asyncio.to_thread(make_http_jobs, num_streams)
    with running_fleet(connector, Size(2, 2), settings=SETTINGS) as fleet:
        run = Run(fleet, jobs)
        await run.run()
        assert not run.failures, "\n".join([*run.failures[:20], fleet.output])
        assert run.num_answers >= num_streams
        await asyncio.to_thread(fleet.check_integrity)


def make_http_jobs(count: int) -> list[HttpJob]:
    """Short prompts; greedy and seeded in turn, every fifth with logprobs."""
    asked = []
    for index in range(count):
        greedy = index % 2 == 0
        params = SamplingParams(
            temperature=0.0 if greedy else 0.9,
            seed=None if greedy else index,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            num_logprobs=0 if index % 5 == 0 else None,
        )
        asked.append((f"{index}. {PROMPTS[index % len(PROMPTS)]}", params))
    with LLM() as llm:
        answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
    jobs = []
    for (prompt, params), answer in zip(asked, answers, strict=True):
        logprobs = [position.sampled for position in answer.logprobs or []]
        jobs.append(HttpJob(prompt, params, answer.text, len(answer.token_ids), logprobs))
    for job in jobs[::ANCHOR_EVERY]:
        if job.params.temperature == 0:
            assert job.text == greedy_completion(job.prompt, MAX_TOKENS, ignore_eos=True)
    return jobs
