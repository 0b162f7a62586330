"""What breaks while requests run, and that nobody's answer shows it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from common.demo_model import DEMO_MODEL_NAME
from tests.e2e.cluster import SETTLE_DEADLINE_S, Cluster, running_cluster, wait_gone
from tests.e2e.metrics import pod_metrics
from tests.e2e.reference import PROMPTS, greedy_completion

NUM_STREAMS = 20
MAX_TOKENS = 96


class Streams:
    """Greedy streams of `MAX_TOKENS` tokens each, running at once."""

    def __init__(self, cluster: Cluster, prompts: list[str]) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=150)
        self._num_started = 0
        self._progress = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._stream(prompt)) for prompt in prompts]

    async def until_started(self, count: int) -> None:
        """`count` streams have given their first piece."""
        async with asyncio.timeout(120), self._progress:
            await self._progress.wait_for(lambda: self._num_started >= count)

    async def answers(self) -> list[str]:
        """All texts, when all have ended."""
        try:
            return await asyncio.gather(*self._tasks)
        finally:
            await self._client.close()

    async def _stream(self, prompt: str) -> str:
        stream = await self._client.completions.create(
            model=DEMO_MODEL_NAME,
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            if chunk.choices:
                if not text:
                    async with self._progress:
                        self._num_started += 1
                        self._progress.notify_all()
                text += chunk.choices[0].text
        return text


def prompts_and_answers() -> tuple[list[str], list[str]]:
    """Prompts of some ten blocks that share nothing, so that prefill has a backlog."""
    prompts = [f"{index}. " + "The sun is a star and the sky is blue. " * 14 for index in range(NUM_STREAMS)]
    prompts = [prompt + PROMPTS[index % len(PROMPTS)] for index, prompt in enumerate(prompts)]
    return prompts, [greedy_completion(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]


@pytest.mark.slow
async def test_killed_pods_come_back_on_their_ports_and_cost_nobody_an_answer() -> None:
    """As `baton up` starts them. Every stage and connector is in tests/e2e/faults."""
    prompts, expected = prompts_and_answers()
    with running_cluster("--decode", "2") as cluster:
        streams = Streams(cluster, prompts)
        for name, num_started in (("prefill-0", 1), ("decode-0", NUM_STREAMS // 2)):
            await streams.until_started(num_started)
            os.kill(cluster.pid_of(name), signal.SIGKILL)
        assert await streams.answers() == expected
        for _ in range(2):
            await asyncio.to_thread(cluster.wait_line, lambda line: "ready again" in line, 120)
        assert await Streams(cluster, prompts[:4]).answers() == expected[:4]
        cluster.check_integrity()


@pytest.mark.slow
async def test_streams_of_a_stopped_engine_go_on_elsewhere_without_a_canary(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text("router: {canary_interval_s: 0, decode_policy: round_robin}\n")
    prompts, expected = prompts_and_answers()
    with running_cluster("--prefill", "0", "--decode", "2", "--config", str(config)) as cluster:
        assert await Streams(cluster, prompts[:4]).answers() == expected[:4]  # shows how long steps take
        streams = Streams(cluster, prompts)
        await streams.until_started(NUM_STREAMS // 2)
        (engine,) = psutil.Process(cluster.pid_of("decode-0")).children()
        engine.suspend()
        try:
            assert await streams.answers() == expected
            assert _metric(f"{cluster.url}/metrics", "baton_router_pod_ejections_total", "stall") == 1
        finally:
            engine.resume()
        cluster.check_integrity()


@pytest.mark.slow
@pytest.mark.cell(feature="streams go on elsewhere", degrees="2", fault="{victim} of a {role} pod gets {number.name}")
@pytest.mark.parametrize(
    ("role", "victim", "number", "said"),
    [
        ("decode", "rank 1", signal.SIGKILL, "rank 1 of 2 was ended by SIGKILL"),
        ("decode", "rank 1", signal.SIGSTOP, "rank 1 of 2 is stopped"),
        ("prefill", "rank 0", signal.SIGKILL, "rank 0 of 2 was ended by SIGKILL"),
        ("decode", "driver", signal.SIGKILL, "the engine process"),
        ("decode", "rank 0", signal.SIGKILL, "rank 0 of 2 was ended by"),
        ("prefill", "rank 1", signal.SIGKILL, "rank 1 of 2 was ended by"),
        ("prefill", "driver", signal.SIGKILL, "the engine process"),
        ("prefill", "rank 0", signal.SIGSTOP, "rank 0 of 2 is stopped"),
    ],
)
async def test_a_lost_rank_costs_nobody_an_answer(
    tmp_path: Path, role: str, victim: str, number: signal.Signals, said: str
) -> None:
    config = tmp_path / "baton.yaml"
    policies = "{decode_policy: round_robin, remote_prefill: prefer}"
    config.write_text(f"router: {policies}\n{role}: {{tensor_parallel_size: 2, step_timeout_s: 5}}\n")
    num_prefill = int(role == "prefill")
    prompts, expected = prompts_and_answers()
    with running_cluster("--prefill", str(num_prefill), "--decode", "2", "--config", str(config)) as cluster:
        streams = Streams(cluster, prompts[:8])
        await streams.until_started(4)
        (driver,) = psutil.Process(cluster.pid_of(f"{role}-0")).children()
        ranks = {each.cmdline()[-1]: each for each in driver.children()}
        (driver if victim == "driver" else ranks[victim]).send_signal(number)
        assert await streams.answers() == expected[:8]
        await asyncio.to_thread(cluster.wait_line, lambda line: said in line, SETTLE_DEADLINE_S)
        await asyncio.to_thread(wait_gone, [driver, *ranks.values()])
        await asyncio.to_thread(cluster.wait_line, lambda line: "ready again" in line, 120)
        assert await Streams(cluster, prompts[:4]).answers() == expected[:4]
        cluster.check_integrity()


@pytest.mark.slow
async def test_a_killed_engine_of_several_costs_nobody_an_answer(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    policies = "{decode_policy: round_robin, prefill_policy: round_robin, remote_prefill: prefer}"
    config.write_text(f"router: {policies}\nprefill: {{data_parallel_size: 2}}\ndecode: {{data_parallel_size: 2}}\n")
    prompts, expected = prompts_and_answers()
    with running_cluster("--decode", "2", "--config", str(config)) as cluster:
        streams = Streams(cluster, prompts[:8])
        await streams.until_started(4)
        engines = psutil.Process(cluster.pid_of("decode-0")).children()
        assert len(engines) == 2
        engines[1].kill()
        assert await streams.answers() == expected[:8]
        await asyncio.to_thread(cluster.wait_line, lambda line: "was killed by SIGKILL" in line, 5)
        await asyncio.to_thread(cluster.wait_line, lambda line: "ready again" in line, 120)
        cluster.check_integrity()


@pytest.mark.slow
async def test_corrupt_blocks_are_noticed_recomputed_and_counted(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    # The decode pod must fetch the second request's blocks again: its own prefix cache is off.
    config.write_text("router: {remote_prefill: prefer}\ndecode: {enable_prefix_caching: false}\n")
    prompt = PROMPTS[-1]
    expected = greedy_completion(prompt, MAX_TOKENS, ignore_eos=True)
    with running_cluster("--config", str(config)) as cluster:
        assert await Streams(cluster, [prompt]).answers() == [expected]
        assert _recomputes(cluster) == 0
        damaged = _damage_every_block(cluster)
        assert damaged > 0
        assert await Streams(cluster, [prompt]).answers() == [expected]
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            while _recomputes(cluster) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        cluster.check_integrity()


def _damage_every_block(cluster: Cluster) -> int:
    """Flips the last byte of every block file in the shared directory."""
    command = psutil.Process(cluster.pid_of("decode-0")).cmdline()
    directory = Path(command[command.index("--connector-path") + 1])
    damaged = 0
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size > 0:
            data = bytearray(path.read_bytes())
            data[-1] ^= 0xFF
            path.write_bytes(data)
            damaged += 1
    return damaged


def _recomputes(cluster: Cluster) -> float:
    return _metric(pod_metrics(cluster, "decode-0").url, "baton_pod_kv_recompute_total", "block_corrupt")


def _metric(url: str, name: str, label: str) -> float:
    """Sum of the metric's samples that have a label of this value."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in httpx.get(url).text.splitlines()
        if line.startswith(f"{name}{{") and f'"{label}"' in line
    )
