"""Both asynchronous clients keep the EngineClient contract."""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from common.engine.client import AsyncMPClient
from common.engine.client.async_base import AsyncClientBase
from common.engine.client.base import EngineProfile
from common.engine.client.threaded import AsyncInprocClient
from common.engine.config import CacheConfig, EngineConfig, KVConnectorConfig, ParallelConfig
from common.engine.executor.fake import expected_tokens
from common.engine.executor.registry import EXECUTORS
from common.engine.messages import (
    AddRequest,
    KVReceived,
    KVSaved,
    KVTransferParams,
    RequestOutput,
    RequestStarted,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.errors import ConfigError, EngineDeadError, ModelLoadError, UnavailableError
from common.types import FinishReason, RequestId, SampledToken, SamplingParams, TransferId
from tests.unit.common.engine.fake_engines import MODULE

ROOT = Path(__file__).parents[5]
CONFIG = EngineConfig(
    cache=CacheConfig(block_size=4, num_blocks=512),
    connector=KVConnectorConfig(factory="m:f", name="n", options={"a": 1, "b": "c", "d": 0.5, "e": True}),
)
FAKE = "fake"
TIMEOUT_S = 60.0


def with_executor(name: str) -> EngineConfig:
    return msgspec.structs.replace(CONFIG, parallel=ParallelConfig(executor=name))


ClientFactory = Callable[..., AsyncClientBase]


@pytest.fixture(params=["process", "thread"])
async def create(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClientFactory]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    clients: list[AsyncClientBase] = []

    def factory(executor: str = FAKE) -> AsyncClientBase:
        if request.param == "process":
            client: AsyncClientBase = AsyncMPClient(with_executor(executor), name="test")
        else:
            client = AsyncInprocClient(CONFIG, EXECUTORS.find(executor))
        clients.append(client)
        return client

    yield factory
    for client in clients:
        await client.close()


def request(request_id: str, prompt: list[int], max_tokens: int = 8) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, num_logprobs=1)
    return AddRequest(request_id=RequestId(request_id), prompt_token_ids=prompt, sampling=sampling)


async def collect(client: AsyncClientBase, num_requests: int) -> dict[str, list[RequestOutput]]:
    """Outputs per request until `num_requests` have finished."""
    outputs: dict[str, list[RequestOutput]] = {}
    async with asyncio.timeout(TIMEOUT_S):
        async for step in client.outputs():
            for output in step.outputs:
                outputs.setdefault(output.request_id, []).append(output)
            if sum(answer[-1].finish_reason is not None for answer in outputs.values()) == num_requests:
                return outputs
    raise AssertionError("the outputs ended")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


@pytest.mark.parametrize("executor", [FAKE, "fake-ranks"])
async def test_generates(create: ClientFactory, executor: str) -> None:
    client = create(executor)
    spec = await client.start()
    assert spec == await client.spec()
    assert spec.num_blocks == 512
    prompts = {f"r{n}": [n] * (3 * n + 1) for n in range(10)}
    for request_id, prompt in prompts.items():
        client.add_request(request(request_id, prompt))
    client.add_request(request("refused", []))
    outputs = await collect(client, 11)
    for request_id, prompt in prompts.items():
        assert tokens_of(outputs[request_id]) == expected_tokens(prompt, 8)
    assert outputs["r0"][0].tokens[0].logprobs is not None
    assert outputs["refused"][0].finish_reason is FinishReason.ERROR
    assert outputs["refused"][0].error_code == 1
    report = await client.check_integrity()
    assert report.violations == []
    assert report.num_blocks_in_use == 0
    assert (await client.stats()).num_generation_tokens == 80
    await client.reset_prefix_cache()


async def test_abort(create: ClientFactory) -> None:
    client = create(f"{MODULE}:create_slow")
    await client.start()
    client.add_request(request("a", [1, 2, 3], max_tokens=1000))
    client.add_request(request("b", [1, 2, 3], max_tokens=3))
    outputs = client.outputs()
    async with asyncio.timeout(TIMEOUT_S):
        await anext(outputs)  # it runs
    client.abort_requests([RequestId("a")])
    rest = await collect(client, 2)
    assert rest["a"][-1].finish_reason is FinishReason.ABORT
    assert rest["b"][-1].finish_reason is FinishReason.LENGTH
    assert (await client.check_integrity()).num_requests == 0


def carry_news(client: AsyncClientBase, address: bytes, output: RequestOutput) -> None:
    """What pods tell each other of a direct handoff. The prompt is prefilled in one step."""
    for event in output.events:
        if isinstance(event, RequestStarted) and output.request_id == "consumer":
            target = TransferTarget(
                request_id=RequestId("producer"),
                epoch=1,
                address=address,
                num_held_tokens=event.num_cached_tokens,
                block_ids=event.reserved_block_ids,
            )
            client.set_transfer_target(target)
        elif isinstance(event, KVSaved):
            update = TransferUpdate(
                request_id=RequestId("consumer"),
                epoch=1,
                num_ready_tokens=event.num_tokens,
                final=True,
                first_token=SampledToken(*expected_tokens([1, 2, 3, 4, 5], 1)),
                digests=event.digests,
            )
            client.quiesce_transfer(TransferQuiesced(request_id=update.request_id, epoch=1))
            client.update_transfer(update)


async def test_direct_handoff(create: ClientFactory) -> None:
    """Both roles in one engine, which writes into its own KV cache."""
    client = create("fake-direct")
    spec = await client.start()
    assert spec.is_direct
    for role in ("consumer", "producer"):  # in this order, none of the prompt is cached when the consumer starts
        transfer = KVTransferParams(transfer_id=TransferId("t"), epoch=1, role=role)
        client.add_request(msgspec.structs.replace(request(role, [1, 2, 3, 4, 5]), transfer=transfer))
    outputs: list[RequestOutput] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for step in client.outputs():
            outputs += step.outputs
            for output in step.outputs:
                carry_news(client, spec.connector_addresses[0], output)
            if outputs and outputs[-1].finish_reason is FinishReason.LENGTH:
                break
    consumed = [output for output in outputs if output.request_id == "consumer"]
    assert tokens_of(consumed) == expected_tokens([1, 2, 3, 4, 5], 8)
    (received,) = [event for output in consumed for event in output.events if isinstance(event, KVReceived)]
    assert (received.num_tokens, received.recompute_reason) == (5, "")
    assert (await client.check_integrity()).num_transfers == 0


@pytest.mark.parametrize(
    ("executor", "error", "message"),
    [
        (f"{MODULE}:create_unloadable", ModelLoadError, "model: /nowhere has no weights"),
        (f"{MODULE}:create_buggy", EngineDeadError, "ZeroDivisionError: a bug"),
    ],
)
async def test_start_fails(create: ClientFactory, executor: str, error: type[Exception], message: str) -> None:
    client = create(executor)
    with pytest.raises(error) as raised:
        await client.start()
    assert str(raised.value) == message
    with pytest.raises(EngineDeadError):
        client.add_request(request("a", [1]))


def steps_of(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith("step ")]


def profile_directories(root: Path) -> list[Path]:
    return list(root.rglob("profile-*"))


async def test_profile(create: ClientFactory) -> None:
    client = create(f"{MODULE}:create_slow")
    await client.start()

    async def take() -> tuple[EngineProfile, list[str]]:
        async with client.profile(seconds=TIMEOUT_S, max_steps=3) as profile:
            return profile, steps_of(profile.trace)

    taken = asyncio.create_task(take())
    await asyncio.sleep(0)  # it sends its command
    client.add_request(request("a", [1, 2, 3], max_tokens=30))
    profile, steps = await taken
    assert (profile.report.num_steps, profile.report.ended_by) == (3, "steps")
    assert [step.partition(":")[0] for step in steps] == ["step 1", "step 2", "step 3"]
    assert not profile.trace.parent.exists()
    outputs = await collect(client, 1)
    assert tokens_of(outputs["a"]) == expected_tokens([1, 2, 3], 30)


async def test_one_profile_at_a_time_which_its_caller_may_end(
    create: ClientFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = create()
    await client.start()

    async def take(seconds: float) -> int:
        async with client.profile(seconds=seconds) as profile:
            return profile.report.num_steps

    first = asyncio.create_task(take(TIMEOUT_S))
    await asyncio.sleep(0)  # it sends its command
    assert len(profile_directories(tmp_path)) == 1
    with pytest.raises(UnavailableError, match="being taken already"):
        await take(0.1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert profile_directories(tmp_path) == [], "none is left"
    assert await take(0.1) == 0, "the engine takes the next one, and is idle"


async def test_death_while_a_profile_is_taken(create: ClientFactory) -> None:
    client = create(f"{MODULE}:create_failing")
    await client.start()
    client.add_request(request("a", [1, 2, 3]))
    with pytest.raises(EngineDeadError, match="out of device memory"):
        async with client.profile(seconds=TIMEOUT_S):
            pass


async def test_death_in_a_step(create: ClientFactory) -> None:
    client = create(f"{MODULE}:create_failing")
    await client.start()
    client.add_request(request("a", [1]))
    with pytest.raises(EngineDeadError, match="MemoryError: out of device memory"):
        await collect(client, 1)
    with pytest.raises(EngineDeadError, match="out of device memory"):
        client.add_request(request("b", [1]))
    with pytest.raises(EngineDeadError, match="out of device memory"):
        await client.stats()


async def test_close_ends_outputs_and_calls(create: ClientFactory) -> None:
    client = create(f"{MODULE}:create_slow")
    await client.start()
    client.add_request(request("a", [1], max_tokens=1000))

    async def consume() -> int:
        return sum([1 async for _ in client.outputs()])

    consumer = asyncio.create_task(consume())
    await client.close()
    await client.close()
    async with asyncio.timeout(TIMEOUT_S):
        assert await consumer >= 0
    with pytest.raises(EngineDeadError, match="closed"):
        await client.stats()


async def test_close_without_start(create: ClientFactory) -> None:
    await create().close()


async def test_executor_that_does_not_exist() -> None:
    client = AsyncMPClient(with_executor("common.engine.nowhere:create"))
    with pytest.raises(ConfigError, match=r"common\.engine\.nowhere"):
        await client.start()
