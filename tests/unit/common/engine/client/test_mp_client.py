"""What can happen to an engine process and to its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from common.engine.client import AsyncMPClient, create_client, mp
from common.engine.config import CacheConfig, EngineConfig, ParallelConfig
from common.engine.executor.fake import expected_tokens
from common.engine.messages import AddRequest
from common.errors import ConfigError, EngineDeadError
from common.types import RequestId, SamplingParams
from tests.unit.common.engine.fake_engines import MODULE

ROOT = Path(__file__).parents[5]
CONFIG = EngineConfig(cache=CacheConfig(block_size=4, num_blocks=512))
FAKE = "fake"
TIMEOUT_S = 60.0


def with_executor(name: str) -> EngineConfig:
    return msgspec.structs.replace(CONFIG, parallel=ParallelConfig(executor=name))


@pytest.fixture
async def slow_client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncMPClient]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(mp, "_STOP_TIMEOUT_S", TIMEOUT_S)
    client = AsyncMPClient(with_executor(f"{MODULE}:create_slow"))
    await client.start()
    yield client
    await client.close()


def request(max_tokens: int) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return AddRequest(request_id=RequestId("r"), prompt_token_ids=[1, 2, 3], sampling=sampling)


async def next_tokens(client: AsyncMPClient, num_tokens: int) -> list[int]:
    token_ids: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for step in client.outputs():
            token_ids += [token.token_id for output in step.outputs for token in output.tokens]
            if len(token_ids) >= num_tokens:
                break
    return token_ids


def has_ended(process: psutil.Process) -> bool:
    """Also if it has not been reaped."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.001)


async def test_killed_process(slow_client: AsyncMPClient) -> None:
    slow_client.add_request(request(1000))
    await next_tokens(slow_client, 1)
    pending_call = asyncio.create_task(slow_client.stats())
    await asyncio.sleep(0)
    assert slow_client.pid is not None
    os.kill(slow_client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await next_tokens(slow_client, 1000)
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait([pending_call])  # answered before the kill, or failed by it; never left hanging
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        slow_client.abort_requests([RequestId("r")])


@pytest.fixture
async def client_of_ranks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncMPClient]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    parallel = ParallelConfig(executor="fake-multiproc", tensor_parallel_size=2)
    client = AsyncMPClient(msgspec.structs.replace(CONFIG, parallel=parallel))
    await client.start()
    yield client
    await client.close()


def ranks_of(client: AsyncMPClient) -> list[psutil.Process]:
    assert client.pid is not None
    return [
        each for each in psutil.Process(client.pid).children() if any("multiproc" in word for word in each.cmdline())
    ]


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_killed_rank_ends_the_engine(client_of_ranks: AsyncMPClient, is_idle: bool) -> None:
    if not is_idle:
        client_of_ranks.add_request(request(2000))
        await next_tokens(client_of_ranks, 1)
    ranks = ranks_of(client_of_ranks)
    assert len(ranks) == 2
    ranks[1].kill()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was ended by SIGKILL"):
        await next_tokens(client_of_ranks, 2000)
    await until(lambda: all(map(has_ended, ranks)))


async def test_ranks_end_with_the_engine(client_of_ranks: AsyncMPClient) -> None:
    client_of_ranks.add_request(request(2000))
    await next_tokens(client_of_ranks, 1)
    ranks = ranks_of(client_of_ranks)
    assert client_of_ranks.pid is not None
    os.kill(client_of_ranks.pid, signal.SIGKILL)
    await until(lambda: all(map(has_ended, ranks)))


async def test_sigterm_ends_it_cleanly(slow_client: AsyncMPClient) -> None:
    slow_client.add_request(request(1000))
    await next_tokens(slow_client, 1)
    assert slow_client.pid is not None
    os.kill(slow_client.pid, signal.SIGTERM)
    with pytest.raises(EngineDeadError, match="exited with code 0"):
        await next_tokens(slow_client, 1000)


async def test_an_idle_process_stops_at_once(slow_client: AsyncMPClient, caplog: pytest.LogCaptureFixture) -> None:
    await slow_client.stats()
    await slow_client.close()
    assert slow_client._process is not None
    assert slow_client._process.returncode == 0
    assert caplog.text == ""


async def test_sigint_is_the_parents_matter(slow_client: AsyncMPClient) -> None:
    assert slow_client.pid is not None
    os.kill(slow_client.pid, signal.SIGINT)
    slow_client.add_request(request(3))
    assert await next_tokens(slow_client, 3) == expected_tokens([1, 2, 3], 3)


async def test_reader_that_lags_holds_the_engine_up(
    slow_client: AsyncMPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mp, "_MAX_BACKLOG", 4)
    slow_client.add_request(request(40))
    await until(lambda: slow_client._held_up)
    assert len(slow_client._outputs) == 4
    assert await next_tokens(slow_client, 40) == expected_tokens([1, 2, 3], 40)


async def test_close_while_held_up(slow_client: AsyncMPClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mp, "_MAX_BACKLOG", 4)
    slow_client.add_request(request(40))
    await until(lambda: slow_client._held_up)
    await slow_client.close()
    assert slow_client._process is not None
    assert slow_client._process.returncode == 0


async def test_cancelled_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = AsyncMPClient(with_executor(FAKE))
    start = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    assert not psutil.pid_exists(client.pid)
    assert os.listdir(tmp_path) == []


async def test_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = create_client(with_executor(FAKE))
    await client.start()
    (name,) = os.listdir(tmp_path)
    assert os.stat(tmp_path / name).st_mode & 0o777 == 0o700
    await client.close()
    assert os.listdir(tmp_path) == []


async def test_directory_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(ConfigError, match="TMPDIR"):
        await AsyncMPClient(with_executor(FAKE)).start()


PARENT = f"""
import asyncio, os
from common.engine.client import AsyncMPClient
from common.engine.config import EngineConfig, ParallelConfig

async def main():
    client = AsyncMPClient(EngineConfig(parallel=ParallelConfig(executor={FAKE!r})))
    await client.start()
    print(client.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while not has_ended(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []
