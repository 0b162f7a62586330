"""Adapters of an engine, over a fake executor: loading, use, limits, unloading."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import AdapterConfig, CacheConfig, EngineConfig
from common.engine.executor.fake import FakeExecutor, expected_tokens
from common.engine.messages import AddRequest, RequestOutput
from common.errors import ErrorCode, InvalidRequestError, OverloadedError, UnknownModelError
from common.types import FinishReason, RequestId, SamplingParams

PROMPT = list(range(1, 41))


def write(directory: Path, name: str) -> str:
    path = directory / name
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(name.encode())
    return str(path)


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class Engine:
    def __init__(self, **adapters: int) -> None:
        self.executor = FakeExecutor(block_size=4)
        config = EngineConfig(cache=CacheConfig(block_size=4), adapters=AdapterConfig(**adapters))
        self.client = InprocClient(config, self.executor)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}

    def add(self, name: str, adapter: bytes = b"", num_tokens: int = 4) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        self.tokens[name] = []
        self.client.add_request(
            AddRequest(request_id=RequestId(name), prompt_token_ids=PROMPT, sampling=sampling, adapter=adapter)
        )

    def step(self) -> None:
        for output in self.client.step().outputs:
            self.tokens[output.request_id] += [token.token_id for token in output.tokens]
            if output.finish_reason is not None:
                self.ended[output.request_id] = output

    def run(self) -> None:
        while self.client.has_unfinished:
            self.step()
            assert self.client.check_integrity().violations == []


@pytest.fixture
def load(tmp_path: Path) -> Callable[[Engine, str], bytes]:
    def load(engine: Engine, name: str) -> bytes:
        path = tmp_path / name
        return engine.client.load_adapter(str(path) if path.exists() else write(tmp_path, name)).digest

    return load


def test_adapters_share_no_block_with_each_other_or_the_model(load: Callable[[Engine, str], bytes]) -> None:
    engine = Engine()
    one, two = load(engine, "one"), load(engine, "two")
    for name, adapter in {"plain": b"", "first": one, "second": two, "again": one}.items():
        engine.add(name, adapter)
        engine.run()
        assert engine.tokens[name] == expected_tokens(PROMPT, 4, adapter=adapter)
    assert engine.client.stats().prefix_cache_hits == len(PROMPT) - 4  # of the second with the first adapter


def test_as_many_adapters_at_once_as_may_be_in_order(load: Callable[[Engine, str], bytes]) -> None:
    engine = Engine(max_loras=2)
    one, two, three = (load(engine, name) for name in ("one", "two", "three"))
    for name, adapter in {"a": one, "b": two, "c": three, "d": one, "plain": b""}.items():
        engine.add(name, adapter)
    engine.step()
    engine.step()
    assert [len(engine.tokens[name]) for name in ("a", "b", "c", "d")] == [2, 2, 0, 0]
    assert engine.tokens["plain"]  # passes, as it needs none
    assert set(engine.client.stats().running_adapters) == {one, two}
    engine.run()
    for name, adapter in {"a": one, "b": two, "c": three, "d": one}.items():
        assert engine.tokens[name] == expected_tokens(PROMPT, 4, adapter=adapter)
    assert list(engine.ended) == ["a", "b", "plain", "c", "d"] or list(engine.ended)[-2:] == ["c", "d"]
    assert engine.client.stats().running_adapters == ()


def test_an_aborted_request_leaves_its_place_to_the_next(load: Callable[[Engine, str], bytes]) -> None:
    engine = Engine(max_loras=1)
    one, two, three = (load(engine, name) for name in ("one", "two", "three"))
    engine.add("a", one, num_tokens=100)
    engine.add("b", two)
    engine.add("c", three)
    engine.step()
    engine.client.abort_requests([RequestId("b")])
    engine.client.abort_requests([RequestId("a")])
    engine.run()
    assert engine.tokens["c"] == expected_tokens(PROMPT, 4, adapter=three)


def test_one_that_is_unloaded_goes_on_for_requests_that_have_it(load: Callable[[Engine, str], bytes]) -> None:
    engine = Engine(max_cpu_loras=1)
    one = load(engine, "one")
    engine.add("before", one)
    engine.step()
    engine.client.unload_adapter(one)
    engine.add("after", one)
    with pytest.raises(OverloadedError, match="max_cpu_loras"):
        load(engine, "two")
    engine.run()
    assert engine.tokens["before"] == expected_tokens(PROMPT, 4, adapter=one)
    assert engine.ended["after"].finish_reason is FinishReason.ERROR
    assert ErrorCode.from_number(engine.ended["after"].error_code) is ErrorCode.NOT_FOUND
    engine.step()
    assert engine.executor.adapters.installed == set()
    load(engine, "two")


def test_one_that_is_loaded_again_before_its_last_request_ends_stays(load: Callable[[Engine, str], bytes]) -> None:
    engine = Engine(max_cpu_loras=1)
    one = load(engine, "one")
    engine.add("before", one)
    engine.step()
    engine.client.unload_adapter(one)
    assert load(engine, "one") == one
    engine.add("after", one)
    engine.run()
    assert engine.tokens["after"] == engine.tokens["before"] == expected_tokens(PROMPT, 4, adapter=one)


def test_what_is_not_there(tmp_path: Path) -> None:
    engine = Engine()
    with pytest.raises(InvalidRequestError) as raised:
        engine.client.load_adapter(str(tmp_path / "none"))
    assert raised.value.param == "lora_path"
    with pytest.raises(UnknownModelError):
        engine.client.unload_adapter(digest("none"))
