"""A pod loads LoRA adapters, knows their names, and keeps what it was asked to forget as long as it is needed."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.engine.config import AdapterConfig
from common.engine.executor.fake import expected_tokens
from common.errors import (
    BatonError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    UnknownModelError,
)
from common.pb import pods_pb2
from common.pb.pods_pb2_grpc import PodStub
from common.rpc.errors import from_rpc_error
from common.types import AdapterName
from tests.pods import DEADLINE_S, FakeRouter, RunningPod, decode_pod, engine_request, prompt_of, wait_for

PROMPT = prompt_of(40)


def adapter(directory: Path, weights: bytes) -> tuple[str, bytes]:
    """The path of an adapter for a fake executor, and its digest."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory), hashlib.sha256(weights).digest()


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    async with decode_pod({}) as running:
        yield running


def stub_of(pod: RunningPod) -> Any:
    return PodStub(pod.channel)


async def raised(call: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def generate(router: FakeRouter, request_id: str, digest: bytes) -> list[int]:
    answer = await router.submit(engine_request(request_id, PROMPT, max_tokens=6, adapter=digest))
    await answer.wait_finished()
    assert answer.error is None
    return list(answer.tokens)


async def test_a_loaded_adapter_computes_its_own_answers_and_its_name_is_reported(pod: RunningPod, tmp_path: Path):
    path, digest = adapter(tmp_path / "a", b"weights")
    watch = stub_of(pod).WatchStats(pods_pb2.WatchStatsRequest(min_interval_ms=1), timeout=DEADLINE_S)
    first = await watch.read()
    assert first.HasField("adapters")
    assert not first.adapters.names
    loaded = await stub_of(pod).LoadAdapter(pods_pb2.LoadAdapterRequest(path=path))
    assert loaded.digest == digest
    name = pods_pb2.AdapterName(name="polite", revision=7, digest=digest, path=path)
    await stub_of(pod).NameAdapter(pods_pb2.NameAdapterRequest(name=name))
    while not (report := await watch.read()).adapters.names:
        pass
    assert (list(report.adapters.names), list(report.adapters.loaded)) == ([name], [digest])
    watch.cancel()
    async with FakeRouter(pod) as router:
        assert await generate(router, "a", digest) == expected_tokens(PROMPT, 6, adapter=digest)
        assert await generate(router, "b", b"") == expected_tokens(PROMPT, 6)


async def test_what_cannot_be_loaded_is_refused_by_the_field_at_fault(pod: RunningPod, tmp_path: Path):
    async def load(path: str, digest: bytes = b"") -> BatonError:
        return await raised(stub_of(pod).LoadAdapter(pods_pb2.LoadAdapterRequest(path=path, digest=digest)))

    for path in (str(tmp_path / "nowhere"), "./nowhere", "a/b/c", "nowhere", "~nobody/a", "0" * 4000):
        error = await load(path)
        assert isinstance(error, InvalidRequestError)
        assert error.param == "lora_path"
    path, _ = adapter(tmp_path / "a", b"weights")
    assert isinstance(await load(path, b"x" * 32), ConflictError), "its files have changed"
    error = await raised(
        stub_of(pod).NameAdapter(pods_pb2.NameAdapterRequest(name=pods_pb2.AdapterName(name="a", digest=b"y" * 32)))
    )
    assert isinstance(error, UnknownModelError)


async def test_too_many_adapters_are_refused(tmp_path: Path):
    async with decode_pod({}, adapters=AdapterConfig(max_cpu_loras=1)) as pod:
        adapters = pod.context.adapters
        path, digest = adapter(tmp_path / "a", b"a")
        await adapters.load(path)
        with pytest.raises(OverloadedError):
            await adapters.load(adapter(tmp_path / "b", b"b")[0])
        assert (await adapters.load(path)).digest == digest


async def test_the_highest_revision_of_a_name_holds(pod: RunningPod, tmp_path: Path):
    adapters = pod.context.adapters
    path, digest = adapter(tmp_path / "a", b"a")
    await adapters.load(path)
    adapters.give_name(AdapterName("x", 5, digest, path))
    adapters.give_name(AdapterName("x", 5, digest, path))  # said again
    with pytest.raises(ConflictError):
        adapters.give_name(AdapterName("x", 4, b"", ""))
    adapters.give_name(AdapterName("x", 6, b"", ""))
    with pytest.raises(ConflictError):
        adapters.give_name(AdapterName("x", 5, digest, path))
    assert adapters.names == [AdapterName("x", 6, b"", "")]


async def test_an_adapter_without_a_name_is_forgotten_after_a_while_unless_it_is_asked_for(tmp_path: Path):
    async with decode_pod({}, lora_grace_s=0.2) as pod:
        adapters = pod.context.adapters
        (path, digest), (named, kept) = adapter(tmp_path / "a", b"a"), adapter(tmp_path / "b", b"b")
        await adapters.load(path)
        await adapters.load(named)
        adapters.give_name(AdapterName("b", 1, kept, named))
        await wait_for(lambda: pod.executor.adapters.installed == {kept})
        assert adapters.loaded == [kept]
        adapters.give_name(AdapterName("b", 2, b"", ""))
        assert pod.executor.adapters.installed == {kept}, "requests may be on their way"
        await wait_for(lambda: not pod.executor.adapters.installed)
        assert (await adapters.load(path, digest)).digest == digest


async def test_adapters_of_the_settings_are_there_from_the_start_and_stay(tmp_path: Path):
    path, digest = adapter(tmp_path / "a", b"a")
    async with decode_pod({}, lora_modules={"polite": path}) as pod:
        adapters = pod.context.adapters
        assert adapters.names == [AdapterName("polite", 1, digest, path, is_permanent=True)]
        with pytest.raises(ConflictError):
            adapters.give_name(AdapterName("polite", 9, b"", ""))
        adapters.give_name(AdapterName("polite", 9, digest, path))
        assert pod.executor.adapters.installed == {digest}
    with pytest.raises(ConfigError, match=r"--lora-modules: polite=/nowhere: .*directory"):
        async with decode_pod({}, lora_modules={"polite": "/nowhere"}):
            pass
