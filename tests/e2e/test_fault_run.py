"""300 requests while prefill pods, decode pods and the store fail at random moments, and nobody's answer shows it.

Moments are shares of a round's tokens, so that a slow machine sees the same run as a fast one. In each round one decode
pod and one or both prefill pods are killed, these at once, and the next round begins when all are back: a decode pod is
always alive. Blocks are so few that they are used again while a write of a killed pod could still be under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc
import httpx
import psutil
import pytest
import redis
import torch

from common.engine.llm import LLM
from common.pb import inference_pb2, inference_pb2_grpc, pods_pb2, pods_pb2_grpc
from common.types import SamplingParams
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.reference import PROMPTS, greedy_completion
from tests.redis_server import RedisServer, running_redis

SEED = 3
NUM_ROUNDS = 3
ROUND_SIZE = 100  # requests
NUM_CLIENTS = 25  # at once
DAMAGES_PER_ROUND = 20  # of the store
REQUEST_DEADLINE_S = 150.0
RESTART_DEADLINE_S = 120.0
NUM_BLOCKS = 256  # of a pod
QUARANTINE_S = 3
HANG_SHARE = 0.1  # of a round's tokens that are received while a pod hangs
ANCHOR_EVERY = 15  # so many requests, one is also answered by `transformers`
PREFILL_VICTIMS = [["prefill-0"], ["prefill-0", "prefill-1"], ["prefill-1"]]
SENTENCES = ["The sun is a star. ", "Rain falls on the hills. ", "Tom has a red boat. "]


class Job(NamedTuple):
    """One request and the tokens it must be answered with."""

    prompt: str
    params: SamplingParams
    token_ids: list[int]
    text: str


class Store(Protocol):
    """Where the blocks lie between two pods."""

    options: tuple[str, ...]  # of `baton up`

    def damage(self, rng: random.Random) -> None:
        """Does it some harm that a store may come to."""


class SharedDirectory:
    """The shared-storage connector's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.options = ("--connector", "shared-storage", "--connector-path", str(path))

    def damage(self, rng: random.Random) -> None:
        """Deletes all, or spoils, cuts or exchanges every block."""
        kind = rng.choice(["delete", *DAMAGES])
        if kind == "delete":
            for child in self._path.iterdir():
                shutil.rmtree(child, ignore_errors=True)
            return
        files = sorted(path for path in self._path.rglob("*") if path.is_file())
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # renamed or evicted meanwhile
                path.write_bytes(damaged(kind, path.read_bytes(), lambda: rng.choice(files).read_bytes()))


class Redis:
    """A redis-server of the test's own."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.options = ("--connector", "redis", "--connector-options", f"url={server.url}")

    def damage(self, rng: random.Random) -> None:
        """Kills the server, which comes up empty; or empties it; or spoils, cuts or exchanges every block."""
        kind = rng.choice(["kill", "delete", *DAMAGES])
        if kind == "kill":
            self._server.kill()
            self._server.start()
            return
        with redis.Redis(port=self._server.port) as client:
            if kind == "delete":
                client.flushall()
                return
            keys = sorted(client.keys())
            for key in keys:
                value = damaged(kind, client.get(key) or b"", lambda: client.get(rng.choice(keys)) or b"")
                client.set(key, value, keepttl=True)


DAMAGES = ("spoil", "cut", "exchange")


def damaged(kind: str, block: bytes, another: Callable[[], bytes]) -> bytes:
    """What a broken store returns instead of `block`."""
    match kind:
        case "spoil":  # so much that nobody could overlook it in the answer
            middle = len(block) // 2
            return block[:middle] + bytes(value ^ 0xFF for value in block[middle:])
        case "cut":
            return block[: len(block) // 2]
        case _:
            return another()


class NoStore:
    """A direct connector's: pods write into each other, so that only they can fail."""

    options = ("--connector", "nixl")

    def damage(self, rng: random.Random) -> None:
        """Nothing is there to be damaged."""


@contextlib.contextmanager
def open_store(connector: str, path: Path) -> Iterator[Store]:
    """A store for the connector; `path` is an empty directory."""
    match connector:
        case "redis":
            with running_redis() as server:
                yield Redis(server)
        case "shared-storage":
            yield SharedDirectory(path)
        case _:
            yield NoStore()


@dataclass
class Fault:
    """Something that happens once."""

    at: float  # share of the round's tokens that clients have received
    strike: Callable[[], None]


class Round:
    """Streams of some jobs, `NUM_CLIENTS` at once, and faults at their moments."""

    def __init__(self, jobs: list[Job], faults: list[Fault]) -> None:
        self.failures: list[str] = []
        self._jobs = iter(jobs)
        self._faults = sorted(faults, key=lambda fault: fault.at, reverse=True)
        self._num_expected = sum(len(job.token_ids) for job in jobs)
        self._num_received = 0

    async def run(self, address: str) -> None:
        """Returns when every request has ended."""
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(self._client(stub) for _ in range(NUM_CLIENTS)))

    async def _client(self, stub: inference_pb2_grpc.InferenceStub) -> None:
        for job in self._jobs:
            if failure := await self._failure_of(stub, job):
                self.failures.append(f"{job.prompt!r}: {failure}")

    async def _failure_of(self, stub: inference_pb2_grpc.InferenceStub, job: Job) -> str:
        """What is wrong with the answer; empty: nothing."""
        text, token_ids = "", []
        try:
            async for chunk in stub.GenerateStream(_request(job), timeout=REQUEST_DEADLINE_S):
                if chunk.token_ids and chunk.start_index != len(token_ids):
                    return f"index {chunk.start_index} after {len(token_ids)} tokens"
                text += chunk.text
                token_ids += chunk.token_ids
                self._advance(len(chunk.token_ids))
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} after {len(token_ids)} tokens: {error.details()}"
        if token_ids != job.token_ids:
            return f"wrong tokens: {token_ids}, expected {job.token_ids}"
        return "" if text == job.text else f"wrong text: {text!r}, expected {job.text!r}"

    def _advance(self, num_tokens: int) -> None:
        self._num_received += num_tokens
        while self._faults and self._num_received >= self._faults[-1].at * self._num_expected:
            self._faults.pop().strike()


class Pods:
    """The pods of a cluster, to be killed and awaited."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._incarnations = {name: self._incarnation(name) for name in cluster.addresses}

    def send(self, number: signal.Signals, name: str, *, to_engine: bool) -> None:
        """A signal to the pod, or to its engine process: neither survives the other."""
        process = psutil.Process(self._cluster.pid_of(name))
        if to_engine:
            (process,) = process.children()
        process.send_signal(number)

    def wait_restarted(self, name: str) -> None:
        """Returns when a new incarnation of the pod is up, and the router will use it."""
        deadline = time.monotonic() + RESTART_DEADLINE_S
        while (incarnation := self._incarnation(name)) == self._incarnations[name] or not self._in_use(name):
            assert time.monotonic() < deadline, f"{name} is not back:\n{self._cluster.output}"
            time.sleep(0.05)
        self._incarnations[name] = incarnation

    def router_metrics(self) -> str:
        """As Prometheus reads them."""
        return httpx.get(f"{self._cluster.url}/metrics").text

    def _incarnation(self, name: str) -> int:
        """0 if the pod cannot be reached; so is what it was before a kill."""
        with grpc.insecure_channel(self._cluster.addresses[name]) as channel:
            try:
                return pods_pb2_grpc.PodStub(channel).GetInfo(pods_pb2.GetInfoRequest(), timeout=5).incarnation
            except grpc.RpcError:
                return self._incarnations[name]

    def _in_use(self, name: str) -> bool:
        ready = f'baton_pod_ready{{address="{self._cluster.addresses[name]}",role="{name.partition("-")[0]}"}} 1.0'
        return ready in self.router_metrics()


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """All requests of a run."""
    return _jobs(random.Random(SEED))


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A --config file. A killed pod's writes are over at once, or the answers tell."""
    path = tmp_path / "settings.yaml"
    path.write_text(f"router: {{remote_prefill: prefer}}\nprefill: {{handoff_quarantine_s: {QUARANTINE_S}}}\n")
    return path


@pytest.mark.parametrize("connector", ["shared-storage", "redis", "nixl"])
async def test_three_hundred_requests_among_faults(
    connector: str, jobs: list[Job], settings: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(SEED)
    options = ("--config", str(settings), "--prefill", "2", "--decode", "2", "--num-blocks", str(NUM_BLOCKS))
    with (
        open_store(connector, tmp_path_factory.mktemp("store")) as store,
        running_cluster(*options, *store.options) as cluster,
    ):
        pods = Pods(cluster)
        prefill_victims_of_round = itertools.cycle(PREFILL_VICTIMS)
        for start in range(0, len(jobs), ROUND_SIZE):
            decode_victim, prefill_victims = f"decode-{rng.randrange(2)}", next(prefill_victims_of_round)
            victims = [decode_victim, *prefill_victims]
            faults = [*_death(pods, [decode_victim], rng), *_death(pods, prefill_victims, rng)]
            faults += [Fault(rng.random(), lambda: store.damage(rng)) for _ in range(DAMAGES_PER_ROUND)]
            round_ = Round(jobs[start : start + ROUND_SIZE], faults)
            await round_.run(cluster.grpc_address)
            assert not round_.failures, "\n".join([*round_.failures, cluster.output])
            for name in victims:
                await asyncio.to_thread(pods.wait_restarted, name)
            await asyncio.to_thread(cluster.check_integrity)
        metrics = await asyncio.to_thread(pods.router_metrics)
    for counter in ("baton_redispatch_total{", "baton_recompute_total{"):
        assert counter in metrics, "the faults have hit nobody"


def _death(pods: Pods, names: Sequence[str], rng: random.Random) -> list[Fault]:
    """Of all of them at one moment. They hang first, so that some requests are sure to wait for them when they die."""
    to_engine = rng.random() < 0.5
    at = rng.uniform(0.05, 0.75)

    def send(number: signal.Signals) -> None:
        for name in names:
            pods.send(number, name, to_engine=to_engine)

    return [Fault(at, lambda: send(signal.SIGSTOP)), Fault(at + HANG_SHARE, lambda: send(signal.SIGKILL))]


def _jobs(rng: random.Random) -> list[Job]:
    """Prompts of a few tokens to some ten blocks, many with a beginning in common; greedy and seeded in turn."""
    asked = []
    for index in range(NUM_ROUNDS * ROUND_SIZE):
        shared = SENTENCES[rng.randrange(len(SENTENCES))] * rng.choice([0, 0, 4, 12, 24])
        own = f"{index}. " if rng.random() < 0.8 else ""
        greedy = index % 2 == 0
        params = SamplingParams(
            temperature=0.0 if greedy else 0.9,
            seed=None if greedy else index,
            max_tokens=rng.randint(4, 48),
            ignore_eos=True,
        )
        asked.append((shared + own + rng.choice(PROMPTS), params))
    torch.set_num_threads(1)  # several would wait for each other where the cores are busy
    with LLM() as llm:
        answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
    jobs = [
        Job(prompt, params, answer.token_ids, answer.text)
        for (prompt, params), answer in zip(asked, answers, strict=True)
    ]
    for job in _anchors(jobs):
        assert job.text == greedy_completion(job.prompt, job.params.max_tokens, ignore_eos=True)
    return jobs


def _anchors(jobs: list[Job]) -> Iterator[Job]:
    return (job for job in jobs[::ANCHOR_EVERY] if job.params.temperature == 0)


def _request(job: Job) -> inference_pb2.GenerateRequest:
    options = inference_pb2.GenerateOptions(
        temperature=job.params.temperature,
        seed=job.params.seed,
        max_tokens=job.params.max_tokens,
        ignore_eos=job.params.ignore_eos,
    )
    return inference_pb2.GenerateRequest(text=job.prompt, options=options)
