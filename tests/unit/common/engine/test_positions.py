"""Prompts whose tokens have positions of three dimensions: through the engine, over prefix hits and preemptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.executor.fake import FakeExecutor, expected_tokens
from common.engine.messages import AddRequest, RequestOutput, RequestStarted
from common.engine.model.loader import LoadedModel, load_model
from common.engine.scheduler.request import Request
from common.engine.worker import worker
from common.types import PromptPositions, RequestId, SamplingParams
from tests.tiny_models import prompt_of, reference_model, tiny_model_dir

BLOCK_SIZE = 4
PROMPT = prompt_of(22)
# After 5 tokens of text an image of 3 x 4 tokens, then 5 tokens more.
IMAGE = [
    [*range(5), *[5] * 12, *range(9, 14)],
    [*range(5), *[5 + row for row in range(3) for _ in range(4)], *range(9, 14)],
    [*range(5), *[5 + column for _ in range(3) for column in range(4)], *range(9, 14)],
]
ELSEWHERE = [[*each[:5], *(position + 1 for position in each[5:])] for each in IMAGE]


def request(name: str, values: list[list[int]] | None, prompt: list[int] = PROMPT, num_tokens: int = 9) -> AddRequest:
    return AddRequest(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        positions=None if values is None else PromptPositions.of(values),
    )


def config(num_blocks: int = 64, max_num_batched_tokens: int = 7) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(tiny_model_dir("llama")), device="cpu", cpu_kernels="reference", num_threads=1),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens),
    )


class Engine:
    def __init__(self, client: InprocClient) -> None:
        self.client = client
        self.outputs: dict[str, list[RequestOutput]] = {}

    def run(self, *requests: AddRequest) -> list[list[int]]:
        for each in requests:
            self.outputs[each.request_id] = []
            self.client.add_request(each)
        while self.client.has_unfinished:
            for output in self.client.step().outputs:
                self.outputs[output.request_id].append(output)
        assert not self.client.check_integrity().violations
        return [[t.token_id for o in self.outputs[each.request_id] for t in o.tokens] for each in requests]

    def num_cached(self, name: str) -> int:
        (started,) = [e for o in self.outputs[name] for e in o.events if isinstance(e, RequestStarted)]
        return started.num_cached_tokens


def with_three_dimensions(loaded: LoadedModel) -> LoadedModel:
    """The model with each token where the last dimension says."""
    model = loaded.model

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        assert position_ids.shape == (3, *input_ids.shape)
        return model(input_ids=input_ids, position_ids=position_ids[2], **options)

    return dataclasses.replace(loaded, model=forward, position_dims=3)


def reference(values: list[list[int]] | None, num_tokens: int = 9) -> list[int]:
    """Greedy tokens of transformers, which computes everything anew for each."""
    model, tokens = reference_model(tiny_model_dir("llama")), list(PROMPT)
    positions = list(range(len(PROMPT))) if values is None else list(values[2])
    delta = 0 if values is None else max(map(max, values)) + 1 - len(PROMPT)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens]), position_ids=torch.tensor([positions])).logits
            positions.append(len(tokens) + delta)
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture(params=["fake", "model"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Starts an engine, and says what it must generate."""
    clients = []

    def start(**settings: Any) -> Engine:
        engine_config = config(**settings)
        executor = FakeExecutor(block_size=BLOCK_SIZE, position_dims=3) if request.param == "fake" else None
        clients.append(InprocClient(engine_config, executor))
        return Engine(clients[-1])

    def expected_of_fake(values: list[list[int]] | None) -> list[int]:
        positions = PromptPositions.of(values or [range(len(PROMPT))] * 3)
        return expected_tokens(PROMPT, 9, positions=positions)

    monkeypatch.setattr(
        worker, "load_model", lambda *args, **settings: with_three_dimensions(load_model(*args, **settings))
    )
    yield start, expected_of_fake if request.param == "fake" else reference
    for client in clients:
        client.close()


def test_the_oracle_sees_positions(side) -> None:
    _, expected = side
    assert len({tuple(expected(values)) for values in (None, IMAGE, ELSEWHERE)}) == 3


def test_chunks_decodes_and_batches(side) -> None:
    start, expected = side
    engine = start()
    assert engine.client.spec.position_dims == 3
    prompts = {"text": None, "image": IMAGE, "elsewhere": ELSEWHERE}
    found = engine.run(*(request(name, values) for name, values in prompts.items()))
    assert found == [expected(values) for values in prompts.values()]


@pytest.mark.parametrize(("values", "num_cached"), [(IMAGE, 20), (ELSEWHERE, 4), (None, 4)])
def test_only_blocks_of_equal_positions_are_shared(side, values, num_cached: int) -> None:
    start, expected = side
    engine = start()
    engine.run(request("first", IMAGE))
    assert engine.run(request("second", values)) == [expected(values)]
    assert engine.num_cached("second") == num_cached


def test_the_next_turn_finds_what_was_generated(side) -> None:
    start, expected = side
    engine = start()
    (answer,) = engine.run(request("first", IMAGE))
    prompt = [*PROMPT, *answer[:6]]
    values = PromptPositions.of(IMAGE).of_tokens(0, len(prompt))
    assert engine.run(request("second", values, prompt, 3)) == [expected(IMAGE)[6:]]
    assert engine.num_cached("second") == 24


def test_preemption(side) -> None:
    start, expected = side
    engine = start(num_blocks=15, max_num_batched_tokens=64)
    found = engine.run(request("a", IMAGE), request("b", ELSEWHERE))
    assert engine.client.stats().num_preemptions
    assert found == [expected(IMAGE), expected(ELSEWHERE)]


def test_the_partial_block_of_a_handoff_has_them_too() -> None:
    last_elsewhere = [[*each[:-1], 40] for each in IMAGE]
    hashes, others = (
        Request(request("r", values), added_at=0.0, max_model_len=64, eos=frozenset()).prompt_block_hashes(4, 0, 6)
        for values in (IMAGE, last_elsewhere)
    )
    assert hashes[:5] == others[:5]
    assert hashes[5] != others[5]
