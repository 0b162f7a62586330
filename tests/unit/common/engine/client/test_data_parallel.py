"""Several engines behind one client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from common.engine.client import AsyncMPClient, DataParallelClient, create_client
from common.engine.client.data_parallel import data_parallel_rank_of, id_in_engine
from common.engine.client.threaded import AsyncInprocClient
from common.engine.config import AdapterConfig, CacheConfig, EngineConfig, ParallelConfig
from common.engine.contract.adapters import AdapterFacts
from common.engine.executor.fake import FakeExecutor, expected_tokens
from common.engine.messages import AddRequest, EngineStats, StepFigures, join_stats
from common.errors import ConfigError, ConflictError, EngineDeadError, InvalidRequestError
from common.types import FinishReason, RequestId, SamplingParams
from tests.unit.common.engine.fake_engines import MODULE

ROOT = Path(__file__).parents[5]
TIMEOUT_S = 60.0


def config_of(executor: str = f"{MODULE}:create_slow") -> EngineConfig:
    parallel = ParallelConfig(executor=executor, data_parallel_size=2)
    return EngineConfig(cache=CacheConfig(block_size=4, num_blocks=512), parallel=parallel)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DataParallelClient]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = create_client(config_of())
    assert isinstance(client, DataParallelClient)
    await client.start()
    yield client
    await client.close()


def request(client: DataParallelClient, number: int, max_tokens: int = 8) -> AddRequest:
    request_id = id_in_engine(RequestId("r"), number, client.least_loaded())
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return AddRequest(request_id=request_id, prompt_token_ids=[1, 2, number], sampling=sampling)


async def _read_all(client: DataParallelClient) -> None:
    async for _ in client.outputs():
        pass


def test_an_id_says_its_engine() -> None:
    for rank in (0, 1, 12):
        assert data_parallel_rank_of(id_in_engine(RequestId("a@3~7"), 5, rank)) == rank


async def test_requests_are_shared_out_and_answered(client: DataParallelClient) -> None:
    assert (await client.spec()).data_parallel_size == 2
    requests = [request(client, number) for number in range(4)]
    tokens: dict[RequestId, list[int]] = {each.request_id: [] for each in requests}
    for each in requests:
        client.add_request(each)
    unfinished = set(tokens)
    stored = {0: 0, 1: 0}
    async with asyncio.timeout(TIMEOUT_S):
        async for step in client.outputs():
            stored[step.data_parallel_rank] += len(step.kv_stored)
            for output in step.outputs:
                assert data_parallel_rank_of(output.request_id) == step.data_parallel_rank
                tokens[output.request_id] += [token.token_id for token in output.tokens]
                if output.finish_reason is not None:
                    unfinished.discard(output.request_id)
            if not unfinished:
                break
    for each in requests:
        assert tokens[each.request_id] == expected_tokens(each.prompt_token_ids, 8)
    by_engine = await client.stats_by_engine()
    assert [stats.num_generation_tokens for stats in by_engine] == [16, 16]
    assert (await client.stats()).num_generation_tokens == 32
    assert all(stored.values())
    report = await client.check_integrity()
    assert (report.violations, report.num_requests) == ([], 0)


async def test_an_abort_reaches_the_engine_of_the_request(client: DataParallelClient) -> None:
    requests = [request(client, number, max_tokens=1500) for number in range(2)]
    for each in requests:
        client.add_request(each)
    reasons: dict[RequestId, FinishReason] = {}
    client.abort_requests([each.request_id for each in requests])
    async with asyncio.timeout(TIMEOUT_S):
        async for step in client.outputs():
            reasons |= {each.request_id: each.finish_reason for each in step.outputs if each.finish_reason is not None}
            if len(reasons) == 2:
                break
    assert set(reasons.values()) == {FinishReason.ABORT}


async def test_the_least_loaded_engine_is_chosen() -> None:
    client = DataParallelClient([AsyncMPClient(config_of()), AsyncMPClient(config_of())])
    assert [client.least_loaded() for _ in range(4)] == [0, 1, 0, 1]
    client._stats = [EngineStats(num_waiting=1), EngineStats(num_running=3)]
    client._num_sent = [0, 0]
    assert [client.least_loaded() for _ in range(3)] == [1, 0, 1]


async def test_a_killed_engine_ends_the_client(client: DataParallelClient) -> None:
    client.add_request(request(client, 0, max_tokens=1500))
    second = client._engines[1]
    assert isinstance(second, AsyncMPClient)
    assert second.pid is not None
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="engine 1 of 2: the engine process was killed by SIGKILL"):
        await asyncio.wait_for(_read_all(client), TIMEOUT_S)
    with pytest.raises(EngineDeadError, match="engine 1 of 2"):
        client.add_request(request(client, 1))


async def test_an_engine_that_cannot_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = create_client(config_of(f"{MODULE}:create_unloadable"))
    with pytest.raises(ConfigError, match="has no weights"):
        await client.start()
    assert isinstance(client, DataParallelClient)
    for engine in client._engines:
        assert isinstance(engine, AsyncMPClient)
        assert engine._process is None or engine._process.returncode is not None


class _InTurn(AsyncInprocClient):
    """Reads an adapter after the earlier engine has, from what is there then."""

    def __init__(self, config: EngineConfig, executor: FakeExecutor, earlier: _InTurn | None = None) -> None:
        super().__init__(config, lambda _: executor)
        self._earlier = earlier
        self._has_read = asyncio.Event()
        self.before_load: Callable[[], object] = bool

    async def load_adapter(self, directory: str) -> AdapterFacts:
        if self._earlier is not None:
            await self._earlier._has_read.wait()
            self._earlier._has_read.clear()
        self.before_load()
        try:
            return await super().load_adapter(directory)
        finally:
            self._has_read.set()


async def test_all_engines_have_an_adapter_or_those_that_had_it(tmp_path: Path) -> None:
    config = EngineConfig(cache=CacheConfig(block_size=4, num_blocks=64), adapters=AdapterConfig(max_loras=2))
    weights, executors = tmp_path / "adapter_model.safetensors", [FakeExecutor(block_size=4) for _ in range(2)]
    first_engine = _InTurn(config, executors[0])
    last = _InTurn(config, executors[1], first_engine)
    client = DataParallelClient([first_engine, last])
    await client.start()

    def installed() -> list[set[bytes]]:
        return [executor.adapters.installed for executor in executors]

    weights.write_bytes(b"first")
    first = (await client.load_adapter(str(tmp_path))).digest
    assert installed() == [{first}, {first}]
    last.before_load = weights.unlink
    with pytest.raises(InvalidRequestError, match="has no adapter"):
        await client.load_adapter(str(tmp_path))
    assert installed() == [{first}, {first}]
    for change, error in ((weights.unlink, InvalidRequestError), (lambda: weights.write_bytes(b"3"), ConflictError)):
        weights.write_bytes(b"second")
        last.before_load = change
        with pytest.raises(error):
            await client.load_adapter(str(tmp_path))
        assert installed() == [{first}, {first}]
    await client.unload_adapter(first)
    assert installed() == [set(), set()]
    await client.close()


def test_joined_stats_are_sums() -> None:
    one = EngineStats(num_running=1, last_step_s=0.5, last_step_tokens=7, decode_steps=StepFigures(2, 3, 0.25))
    other = EngineStats(num_running=2, last_step_s=0.25, last_step_tokens=9, decode_steps=StepFigures(1, 1, 0.5))
    joined = join_stats([one, other])
    assert joined.num_running == 3
    assert joined.decode_steps == StepFigures(3, 4, 0.75)
    assert (joined.last_step_s, joined.last_step_tokens) == (0.5, 7)
    assert join_stats([one]) is one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel: there is one rank"),
        ({"data_parallel_size": 2, "rank_devices": [0]}, "but --data-parallel-size is 2"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "nnodes": 2, "master_addr": "a"}, "are on one machine"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(settings, ParallelConfig)


def test_devices_are_shared_out() -> None:
    parallel = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    assert [parallel.device_of(rank, engine) for engine in range(2) for rank in range(2)] == [0, 1, 2, 3]
