"""Answers are the same with each proposer, over each connector, whatever happens to the pods.

Each cell is a proposer, a connector and a fault. Streams are greedy and drawn at temperature 1, and are compared with
the answers of an engine without drafts, which are those of `transformers`. In each cell drafts are right. Pods that are
killed are processes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from common.engine.config import EngineConfig
from common.engine.contract.masks import MaskSource
from common.engine.contract.step import RunningStep, SchedulerOutput
from common.engine.executor.inproc import InprocExecutor
from common.engine.llm import LLM, Completion
from common.types import FinishReason, SamplingParams
from deploy.own_code import importable
from deploy.pod_process import PodSpec
from deploy.ports import pick_ports
from tests.e2e.faults.server_process import ServerProcess
from tests.e2e.metrics import Metrics
from tests.eagle3_heads import tiny_head_dir
from tests.integration import speculation_rig as rig
from tests.integration.cluster import (
    BLOCK_SIZE,
    CHUNK,
    DEADLINE_S,
    START_DEADLINE_S,
    Cluster,
    Stream,
    all_ready,
    running_cluster,
    with_tokenizer,
)
from tests.mtp_models import mtp_model_dir
from tests.pods import StepGate, wait_for
from tests.redis_server import running_redis
from tests.tiny_models import prompt_of, random_model, reference_logprobs, tiny_config

pytestmark = pytest.mark.timeout(400)  # processes that import torch take their time to start on a busy machine

PROPOSERS = {  # {model}: the directory of the model; {head}: of a head for it
    "ngram": "ngram:min=1,depth=4",
    "suffix": "suffix:depth=4,memory=1MiB",
    "scripted": "tests.integration.speculation_rig:mostly_right",
    "draft": "draft:model={model},depth=4",  # the model itself
    "eagle3": "eagle3:model={head},depth=4",
    "mtp": "mtp:depth=4",  # of another model
}
CONNECTORS = ("colocated", "shared-storage", "redis", "nixl")
IN_EVERY_RUN = (  # each proposer, connector and fault; the others are for `make test-matrix`
    ("undisturbed", "redis", "suffix"),
    ("migrated", "shared-storage", "draft"),
    ("a prefill pod is killed", "shared-storage", "scripted"),
    ("a decode pod is killed", "colocated", "ngram"),
    ("preempted", "nixl", "scripted"),
    ("migrated", "redis", "ngram"),
    ("resumed by event id", "shared-storage", "eagle3"),
    ("resumed by event id", "nixl", "suffix"),
    ("undisturbed", "nixl", "mtp"),
)
FEW = (5, 6, 7)  # tokens, so that the answers of a model with random weights repeat
LAST = 9  # the token that ends an answer
MAX_TOKENS = 160
HELD_STEPS = 24  # of a pod, after which no answer is complete
SCARCE_BLOCKS = 48  # for one and a half of the streams
TARGET_ITL_MS = 1000  # so that no proposer is too slow, however slow the machine
LOGPROBS_TOLERANCE = 1e-5
EXPERTS_TOLERANCE = 1e-4  # their outputs add up in another order with each shape of a step
_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "allowed_token_ids": FEW, "max_tokens": MAX_TOKENS},
    {"temperature": 1.0, "seed": 3, "allowed_token_ids": FEW, "max_tokens": MAX_TOKENS},
    {"temperature": 0.0, "allowed_token_ids": FEW, "max_tokens": MAX_TOKENS - 1},
    {
        "temperature": 1.0,
        "seed": 4,
        "allowed_token_ids": (*FEW, LAST),
        "stop_token_ids": (LAST,),
        "min_tokens": 5 * HELD_STEPS + 10,
        "max_tokens": MAX_TOKENS,
    },
]


class Job(NamedTuple):
    """A request, and its answer without drafts."""

    prompt: list[int]
    options: dict[str, Any]
    answer: Completion


class Jobs(NamedTuple):
    """All that is asked for, of one model."""

    directory: Path
    jobs: list[Job]
    tolerance: float  # of log probabilities


class GatedExecutor(InprocExecutor):
    """An executor behind a gate."""

    def __init__(self, config: EngineConfig, gate: StepGate) -> None:
        super().__init__(config)
        self._gate = gate

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        if step.num_scheduled_tokens:
            self._gate.pass_through()
        return super().submit(step, masks)


class Cell:
    """What one cell serves."""

    def __init__(self, jobs: Jobs, path: Path, proposer: str, options: dict[str, Any]) -> None:
        self.jobs = jobs.jobs
        self._directory = jobs.directory
        self._tolerance = jobs.tolerance
        self._path = path
        head = tiny_head_dir(jobs.directory) if proposer == "eagle3" else None
        self._speculative = PROPOSERS[proposer].format(model=jobs.directory, head=head)
        self._options = options
        self._gates: list[StepGate] = []

    @asynccontextmanager
    async def serving(self, *, is_held: bool = False, **options: Any) -> AsyncIterator[Cluster]:
        """`is_held`: each decode pod is, after HELD_STEPS."""

        def create_executor(config: EngineConfig) -> GatedExecutor:
            gate = StepGate(is_open=not is_held)
            gate.allow(HELD_STEPS)
            self._gates.append(gate)
            return GatedExecutor(config, gate)

        settings = {"speculative": self._speculative, "decode_executor": create_executor, **self._options, **options}
        settings["target_itl_ms"] = TARGET_ITL_MS
        async with running_cluster(self._path, self._directory, **settings) as cluster:
            try:
                yield cluster
            finally:
                self.let_go()

    async def until_held(self, streams: Sequence[Stream]) -> None:
        """Returns when all decode pods hold, so that no stream is complete."""
        await wait_for(lambda: all(gate.is_holding for gate in self._gates) and any(each.tokens for each in streams))

    def let_go(self) -> None:
        for gate in self._gates:
            gate.open()

    def start(self, cluster: Cluster, jobs: Sequence[Job] = (), *, resumable: bool = False) -> list[Stream]:
        """Streams of these jobs, or of all."""
        return [
            Stream(cluster, job.prompt, {**job.options, "num_logprobs": 2}, resumable=resumable)
            for job in jobs or self.jobs
        ]

    async def check(self, streams: Sequence[Stream], jobs: Sequence[Job] = ()) -> None:
        """Waits for the streams, all of which are as without drafts."""
        for stream, (_, _, answer) in zip(streams, jobs or self.jobs, strict=True):
            await stream.reading
            assert stream.tokens == answer.token_ids
            assert (stream.text, stream.finish_reason) == (answer.text, answer.finish_reason.value)
            for found, expected in zip(stream.logprobs, answer.logprobs or (), strict=True):
                wanted = (expected.sampled, *(logprob for _, logprob in expected.top))
                assert found == pytest.approx(wanted, abs=self._tolerance)

    @contextmanager
    def pod(self, role: str) -> Iterator[tuple[ServerProcess, Metrics]]:
        """A pod that is a process."""
        port, metrics_port = pick_ports("127.0.0.1", 2)
        connector = self._options["connector"]
        settings = {
            "model": self._directory,
            "port": port,
            "metrics-port": metrics_port,
            "num-threads": 1,
            "block-size": BLOCK_SIZE,
            "num-blocks": 256,
            "target-itl-ms": TARGET_ITL_MS,
            "max-num-batched-tokens": CHUNK,
            "speculative": self._speculative,
            "connector": connector,
        }
        if connector == "shared-storage":
            settings["connector-path"] = self._path / "kv"
        command = [sys.executable, "-m", "cli.main", "serve", role]
        command += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        for name, value in self._options.get("connector_options", {}).items():
            command += ["--connector-options", f"{name}={value}"]
        spec = PodSpec(role, role, tuple(command), importable(os.environ), f"127.0.0.1:{port}")
        victim = ServerProcess(spec, self._path / f"{role}.log", within=(), clock=self._path / "clock")
        victim.start()
        try:
            yield victim, Metrics(f"http://127.0.0.1:{metrics_port}/metrics", kind="pod")
        finally:
            victim.close()


async def check_accepted(cluster: Cluster) -> None:
    """On each decode pod of this process, drafts were right, and heads have seen all that was computed elsewhere."""
    for pod in cluster.decode:
        drafts = (await pod.context.engine.stats()).drafts
        assert drafts.num_accepted
        assert drafts.num_unseen == 0


def num_moved(cluster: Cluster) -> float:
    """Requests that went on on another decode pod."""
    return sum(
        sample.value
        for metric in cluster.router.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "baton_router_redispatch_total"
    )


def cells(fault: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Parametrizes a test by proposer and connector."""
    combinations = [
        pytest.param(
            proposer, connector, marks=() if (fault, connector, proposer) in IN_EVERY_RUN else pytest.mark.matrix
        )
        for connector in CONNECTORS
        for proposer in PROPOSERS
        if (fault, connector) != ("a prefill pod is killed", "colocated")
    ]

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        parametrized = pytest.mark.parametrize(("proposer", "connector"), combinations)(test)
        return pytest.mark.cell(proposer="{proposer}", connector="{connector}", fault=fault)(parametrized)

    return mark


@pytest.fixture(scope="module")
def jobs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Jobs]:
    """By proposer."""

    @functools.cache
    def of_model(has_own_head: bool) -> Jobs:
        path = tmp_path_factory.mktemp("identity")
        if has_own_head:
            return make_jobs(with_tokenizer(mtp_model_dir(), path / "model"), EXPERTS_TOLERANCE)
        random_model(tiny_config("LlamaConfig", tie_word_embeddings=True)).save_pretrained(path / "plain")
        return make_jobs(with_tokenizer(path / "plain", path / "model"), LOGPROBS_TOLERANCE)

    return lambda proposer: of_model(proposer == "mtp")


def make_jobs(directory: Path, tolerance: float) -> Jobs:
    """Answers without drafts, and, beside the model, all of them for the scripted proposer."""
    prompts = [prompt_of(3 * CHUNK + 5, seed=seed) for seed in range(len(_OPTIONS))]
    params = [SamplingParams(**options, num_logprobs=2) for options in _OPTIONS]
    with LLM(directory, block_size=BLOCK_SIZE, num_blocks=256, num_threads=1) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP, FinishReason.LENGTH}
    sequences = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    (directory / rig.ANSWERS_FILE).write_text(json.dumps(sequences))
    for prompt, sequence, options, answer in zip(prompts, sequences, _OPTIONS, answers, strict=True):
        rows = reference_logprobs(directory, sequence)[len(prompt) - 1 : -1]
        found = [entry.sampled for entry in answer.logprobs or ()]
        expected = [float(row[token_id]) for row, token_id in zip(rows, answer.token_ids, strict=True)]
        assert found == pytest.approx(expected, abs=tolerance)
        if options["temperature"] == 0:
            assert answer.token_ids == [max(FEW, key=row.tolist().__getitem__) for row in rows]
    return Jobs(directory, [Job(*each) for each in zip(prompts, _OPTIONS, answers, strict=True)], tolerance)


@pytest.fixture
def cell(
    jobs_of: Callable[[str], Jobs], proposer: str, connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cell]:
    rig.ask_and_verify_always(monkeypatch)
    with ExitStack() as stack:
        options: dict[str, Any] = {"connector": connector}
        if connector == "colocated":
            options = {"connector": "shared-storage", "num_prefill": 0}
        elif connector == "redis":
            options["connector_options"] = {"url": stack.enter_context(running_redis()).url, "lookup_timeout_s": "60"}
        yield Cell(jobs_of(proposer), tmp_path, proposer, options)


@cells("undisturbed")
async def test_undisturbed(cell: Cell) -> None:
    async with cell.serving() as cluster:
        await cell.check(cell.start(cluster))
        await check_accepted(cluster)


@cells("a prefill pod is killed")
async def test_prefill_pod_killed(cell: Cell) -> None:
    """Some streams have had their KV from it, others wait for it."""
    with cell.pod("prefill") as (victim, _):
        async with cell.serving(num_prefill=0, further_prefill=[victim.address]) as cluster:
            first, others = cell.jobs[:2], cell.jobs[2:]
            await cell.check(cell.start(cluster, first), first)
            assert cluster.recomputed() == 0
            for engine in victim.processes()[1:]:
                engine.suspend()
            streams = cell.start(cluster, others)
            await wait_for(lambda: cluster.decode[0].context.admission.num_open)
            for process in victim.kill():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            await cell.check(streams, others)
            assert cluster.recomputed() > 0
            await check_accepted(cluster)


@cells("a decode pod is killed")
async def test_decode_pod_killed(cell: Cell) -> None:
    with cell.pod("decode") as (victim, figures):
        async with cell.serving(further_decode=[victim.address]) as cluster:
            while not await was_struck(cell, cluster, victim, figures):
                await asyncio.to_thread(victim.wait_gone, [])
                victim.start()
                await answers(figures)  # by when the router has noticed that the one before is gone
                await all_ready(cluster.router, len(cluster.prefill), 2)
            await check_accepted(cluster)


async def answers(figures: Metrics) -> None:
    """Returns once the pod serves its metrics."""
    async with asyncio.timeout(START_DEADLINE_S):
        while True:
            with suppress(httpx.TransportError):
                await asyncio.to_thread(figures.__getitem__, "drafts_accepted")
                return
            await asyncio.sleep(0.05)


async def was_struck(cell: Cell, cluster: Cluster, victim: ServerProcess, figures: Metrics) -> bool:
    """Whether the victim had streams when it was killed, and drafts that were right."""
    before = num_moved(cluster)
    streams = cell.start(cluster)
    accepted = 0.0
    async with asyncio.timeout(DEADLINE_S):
        while not accepted and not all(each.reading.done() for each in streams):
            accepted = await asyncio.to_thread(figures.__getitem__, "drafts_accepted")
    victim.kill()
    await cell.check(streams)
    return accepted > 0 and num_moved(cluster) > before


@cells("preempted")
async def test_preempted(cell: Cell) -> None:
    async with cell.serving(decode_blocks=SCARCE_BLOCKS) as cluster:
        while not (await cluster.decode[0].context.engine.stats()).num_preemptions:
            await cell.check(cell.start(cluster))
        await check_accepted(cluster)


@cells("migrated")
async def test_migrated(cell: Cell) -> None:
    async with cell.serving(num_decode=2, is_held=True) as cluster:
        streams = cell.start(cluster)
        await cell.until_held(streams)
        leaving = asyncio.create_task(cluster.decode.pop().stop())  # as at the end of a drain
        await asyncio.sleep(0)
        cell.let_go()
        await cell.check(streams)
        await leaving
        await check_accepted(cluster)
        assert num_moved(cluster) > 0


@cells("resumed by event id")
async def test_resumed_by_event_id(cell: Cell) -> None:
    async with cell.serving(is_held=True) as cluster:
        streams = cell.start(cluster, resumable=True)
        await cell.until_held(streams)
        for stream in streams:
            if stream.tokens:
                await stream.resume()
        cell.let_go()
        await cell.check(streams)
        await check_accepted(cluster)
