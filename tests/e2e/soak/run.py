"""Thousands of mixed requests against one cluster, which must hold no more at the end than after the first of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import httpx
import yaml

from router.security.keys import digest_of
from tests.e2e.clients.answers import Answer
from tests.e2e.clients.fronts import Front, answer_of
from tests.e2e.clients.grpc_client import GrpcFront, grpc_channels
from tests.e2e.clients.http_client import HttpFront, http_client
from tests.e2e.clients.progress import Progress
from tests.e2e.clients.specs import Api, RequestSpec
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.soak.footprint import Sample, read_sample
from tests.e2e.soak.visits import KEY, OPERATOR_KEY, REQUESTS_PER_MINUTE, SMALL_KEY, Probe, Visit, random_visit

NUM_CLIENTS = 8  # at once
SAMPLE_EVERY = 500  # requests
NUM_BLOCKS = 512  # of a pod


class Soak:
    """All requests of one soak."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()  # by kind of visit
        self.failures: list[str] = []
        self.samples: list[Sample] = []
        self._cluster = cluster
        self._seed = seed
        self._rng = random.Random(seed)
        self._progress = Progress()
        self._num_begun = 0

    async def run(self, num_requests: int, on_sample: Callable[[Sample], None]) -> None:
        """Returns when all have ended; `on_sample` is told each sample."""
        await self._sample(on_sample)
        while self._num_begun < num_requests:
            end = min(num_requests, self._num_begun + SAMPLE_EVERY)
            async with (
                http_client() as http,
                grpc_channels([self._cluster.grpc_address]) as channels,
                asyncio.TaskGroup() as clients,
            ):
                fronts = {key: self._fronts(http, channels, key) for key in (KEY, SMALL_KEY)}
                for _ in range(NUM_CLIENTS):
                    clients.create_task(self._client(http, fronts, end))
            await self._sample(on_sample)

    async def _sample(self, on_sample: Callable[[Sample], None]) -> None:
        operator = _authorization(OPERATOR_KEY)
        self.samples.append(await asyncio.to_thread(read_sample, self._cluster, self._num_begun, operator))
        on_sample(self.samples[-1])

    def _fronts(self, http: httpx.AsyncClient, channels: list[grpc.aio.Channel], key: str) -> Mapping[Api, Front]:
        headers = _authorization(key)
        return {Api.HTTP: HttpFront(http, [self._cluster.url], headers), Api.GRPC: GrpcFront(channels, headers)}

    async def _client(self, http: httpx.AsyncClient, fronts: Mapping[str, Mapping[Api, Front]], end: int) -> None:
        while self._num_begun < end:
            name = f"seed {self._seed}, request {self._num_begun}"
            self._num_begun += 1
            visit = random_visit(self._rng, name)
            if isinstance(visit, Probe):
                problem = await self._refused(http, visit)
            else:
                problem = await self._served(fronts[visit.key], visit)
            if problem:
                self.failures.append(f"{name}: {visit}\n  {problem}")

    async def _refused(self, http: httpx.AsyncClient, probe: Probe) -> str:
        """What is wrong with the answer; empty: nothing."""
        headers = {"content-type": "application/json", **_authorization(probe.key)}
        response = await http.request(
            probe.method, f"{self._cluster.url}{probe.path}", content=probe.body, headers=headers
        )
        self.outcomes[f"{probe.kind}: {response.status_code}"] += 1
        return "" if response.status_code in probe.statuses else f"status {response.status_code}: {response.text}"

    async def _served(self, fronts: Mapping[Api, Front], visit: Visit) -> str:
        """What is wrong with the answer; empty: nothing."""
        answer = await answer_of(fronts, visit.spec, self._progress)
        is_over_quota = visit.key == SMALL_KEY and answer.is_overload
        self.outcomes["over quota" if is_over_quota else "aborted" if answer.has_left else "served"] += 1
        return "" if is_over_quota or answer.has_left else _problem_of(visit.spec, answer)


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _hash_of(key: str) -> str:
    return f"sha256:{digest_of(key).hex()}"


def _problem_of(spec: RequestSpec, answer: Answer) -> str:
    """What is wrong with an answer of which only the shape is known."""
    if answer.error:
        return answer.error
    if any(choice.finish_reason not in ("stop", "length") for choice in answer.choices):
        return f"an end without a reason: {answer}"
    if answer.num_tokens is not None and not 1 <= answer.num_tokens <= spec.n * spec.params.max_tokens:
        return f"{answer.num_tokens} tokens"
    return ""


@contextlib.contextmanager
def soak_cluster(connector: str, directory: Path) -> Iterator[Cluster]:
    """One router, one prefill pod and two decode pods, with API keys."""
    keys = directory / "keys.yaml"
    entries = [
        {"name": "main", "hash": _hash_of(KEY), "min_priority": -10},
        {"name": "operator", "hash": _hash_of(OPERATOR_KEY), "operator": True},
        {
            "name": "small",
            "hash": _hash_of(SMALL_KEY),
            "requests_per_minute": REQUESTS_PER_MINUTE,
            "min_priority": -10,
        },
    ]
    keys.write_text(yaml.safe_dump(entries))
    settings = directory / "baton.yaml"
    router = {"remote_prefill": "prefer", "api_keys_file": str(keys)}
    settings.write_text(yaml.safe_dump({"router": router}))
    options = ("--decode", "2", "--connector", connector, "--num-blocks", str(NUM_BLOCKS), "--config", str(settings))
    with running_cluster(*options) as cluster:
        yield cluster
