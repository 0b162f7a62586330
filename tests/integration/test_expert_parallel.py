"""Engines of one pod that share the experts of a mixture, each a process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.engine.client import AsyncMPClient, DataParallelClient, create_client
from common.engine.client.data_parallel import data_parallel_rank_of, id_in_engine
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from common.engine.messages import AddRequest
from common.errors import EngineDeadError
from common.types import Constraint, FinishReason, RequestId, SamplingParams
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)  # it is ended before
DRAWN = SamplingParams(temperature=1.2, seed=3, max_tokens=10, ignore_eos=True)


@asynccontextmanager
async def engines(model: str) -> AsyncIterator[DataParallelClient]:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_model_dir(model)), num_threads=1),
        cache=CacheConfig(block_size=4, num_blocks=128),
        scheduler=SchedulerConfig(max_num_batched_tokens=32),
        parallel=ParallelConfig(data_parallel_size=2, enable_expert_parallel=True),
    )
    client = create_client(config)
    assert isinstance(client, DataParallelClient)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


class Answers:
    """Requests, and what they have so far."""

    def __init__(self, client: DataParallelClient) -> None:
        self._client = client
        self._outputs = client.outputs()  # iterated once: what was read and not taken would be lost
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, FinishReason] = {}

    def __len__(self) -> int:
        return sum(map(len, self.tokens.values()))

    def ask(self, prompt: list[int], engine: int, sampling: SamplingParams = GREEDY) -> RequestId:
        request_id = id_in_engine(RequestId("r"), len(self.tokens), engine)
        self.tokens[request_id] = []
        self._client.add_request(AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
        return request_id

    async def until(self, num_ended: int, num_tokens: int = 0) -> None:
        """As many requests have ended, and there are as many tokens."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.ends) < num_ended or len(self) < num_tokens:
                step = await anext(self._outputs)
                for output in step.outputs:
                    assert data_parallel_rank_of(output.request_id) == step.data_parallel_rank
                    self.tokens[output.request_id] += [token.token_id for token in output.tokens]
                    if output.finish_reason is not None:
                        self.ends[output.request_id] = output.finish_reason


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.cell(feature="experts of mixtral over engines", degrees="2 engines", fault="an engine is killed")
async def test_tokens_failures_of_one_engine_and_its_end() -> None:
    """One start of four processes for all of it."""
    directory = tiny_model_dir("mixtral")
    async with engines("mixtral") as client:
        answers = Answers(client)
        await check_tokens(answers, directory)

        stream, dropped = answers.ask(prompt_of(5), 0, LONG), answers.ask(prompt_of(9), 1, ENDLESS)
        await answers.until(5, num_tokens=68)
        client.abort_requests([dropped])
        too_long = answers.ask(prompt_of(5000), 1)
        invalid = SamplingParams(temperature=0.0, max_tokens=4, structured_outputs=Constraint.regex("("))
        broken = answers.ask(prompt_of(3), 1, invalid)
        await answers.until(9)
        assert answers.ends[dropped] is FinishReason.ABORT
        assert answers.ends[too_long] is answers.ends[broken] is FinishReason.ERROR
        assert answers.tokens[stream] == reference_generate(directory, prompt_of(5), 60)

        same = [answers.ask(prompt_of(7), engine, DRAWN) for engine in (0, 1)]
        await answers.until(11)
        assert answers.tokens[same[0]] == answers.tokens[same[1]]
        report = await client.check_integrity()
        assert (report.violations, report.num_requests) == ([], 0)

        answers.ask(prompt_of(5), 0, ENDLESS)
        await answers.until(11, num_tokens=len(answers) + 4)
        second = client._engines[1]
        assert isinstance(second, AsyncMPClient)
        assert second.pid is not None
        began = time.monotonic()
        os.kill(second.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="engine"):
            await answers.until(12)
        assert time.monotonic() - began < ParallelConfig().step_timeout_s


@pytest.mark.cell(feature="experts of qwen3_moe over engines", degrees="2 engines")
@pytest.mark.slow
async def test_tokens_of_another_mixture() -> None:
    async with engines("qwen3_moe") as client:
        await check_tokens(Answers(client), tiny_model_dir("qwen3_moe"))


async def check_tokens(answers: Answers, directory: Path) -> None:
    """Prompts on both engines, of which one has less to do."""
    prompts = [prompt_of(length) for length in (1, 5, 33, 18, 5)]
    ids = [answers.ask(prompt, engine) for prompt, engine in zip(prompts, (0, 1, 1, 1, 0), strict=True)]
    await answers.until(5)
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert answers.tokens[request_id] == reference_generate(directory, prompt, 12)
