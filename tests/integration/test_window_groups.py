"""Layers with a window, which slides or jumps from chunk to chunk, form KV groups of their own, whose blocks are given
back while requests run: the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.client.inproc import InprocClient
from common.engine.llm import LLM
from common.engine.messages import AddRequest
from common.types import RequestId, SamplingParams
from tests.architectures.models import model_dir
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Handoffs, create_engine, generate
from tests.tiny_models import (
    SLIDING_WINDOW,
    prompt_of,
    random_model,
    reference_generate,
    tiny_config,
    tiny_model_dir,
)

NUM_GROUPS = {"gemma2": 3, "gemma3": 3, "gpt_oss": 3, "mistral": 1, "llama": 1, "llama4": 3, "uneven": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=2 * SLIDING_WINDOW)  # so many that blocks fall out


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers without a window, and three with one: a group of two of them, and one of one."""
    directory = tmp_path_factory.mktemp("uneven")
    layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    of_layers = {"num_hidden_layers": 5, "layer_types": layer_types, "head_dim": 16, "sliding_window": SLIDING_WINDOW}
    random_model(tiny_config("Gemma2Config", **of_layers)).save_pretrained(directory)
    return directory


def directory_of(model: str, uneven: Path) -> Path:
    if model == "llama4":  # chunks of SLIDING_WINDOW tokens
        return model_dir("llama4_text")
    return uneven if model == "uneven" else tiny_model_dir(model)


def expected(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in prompts]


def kv_cache_of(engine: InprocClient) -> torch.Tensor:
    cache: Any = engine._core._executor._worker._kv_cache  # type: ignore[attr-defined]
    assert isinstance(cache, torch.Tensor)
    return cache


@pytest.mark.parametrize(
    "on",
    [
        {"cpu_kernels": "auto"},
        {"cpu_kernels": "reference"},
        pytest.param({"device": "cuda", "dtype": "float32", "block_size": 16}, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("model", NUM_GROUPS)
def test_tokens_are_those_of_transformers(model: str, on: dict[str, object], uneven: Path) -> None:
    """In chunks, beside each other, in so few blocks that some are preempted, and with prefix hits."""
    directory = directory_of(model, uneven)
    prompts = [prompt_of(length) for length in (1, 3, 4, 11, 12, 37, 38, 53)]
    settings = {"block_size": 4, "max_num_batched_tokens": 10, "num_threads": 1, **on}
    settings["num_blocks"] = 1 + 24 * NUM_GROUPS[model]
    with LLM(directory, **settings) as llm:
        assert len(llm.spec.layout.groups) == NUM_GROUPS[model]
        for _ in range(2):
            completions = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [completion.token_ids for completion in completions] == expected(directory, prompts)
        report = llm.check_integrity()
        assert report.violations == []
        assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 0, 0)


@pytest.mark.parametrize(("cpu_kernels", "kernels"), [("auto", "fused"), ("reference", "torch")])
def test_a_model_that_may_be_fused_has_one_group(cpu_kernels: str, kernels: str, tmp_path: Path) -> None:
    """Whether it is or not, as pods hand over to each other."""
    windows = {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1}
    random_model(tiny_config("Qwen2Config", **windows)).save_pretrained(tmp_path)
    prompts = [prompt_of(length) for length in (3, 37)]
    with LLM(tmp_path, block_size=4, num_blocks=64, num_threads=1, cpu_kernels=cpu_kernels) as llm:
        assert llm.spec.kernels == kernels
        assert [(group.kind, len(group.layers)) for group in llm.spec.layout.groups] == [("full", 3)]
        completions = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [completion.token_ids for completion in completions] == expected(tmp_path, prompts)


@pytest.mark.parametrize("connector", ["shared-storage", "nixl"])
@pytest.mark.parametrize("model", NUM_GROUPS)
def test_tokens_after_a_handoff(model: str, connector: str, tmp_path: Path, uneven: Path) -> None:
    directory = directory_of(model, uneven)
    prompts = [prompt_of(length) for length in (1, SLIDING_WINDOW, BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 5)]
    engines = [create_engine(directory, tmp_path / "kv", connector_name=connector, num_blocks=256) for _ in range(2)]
    handoffs = Handoffs(*engines)
    decoded = handoffs.run(prompts, GREEDY)
    assert [request.token_ids for request in decoded] == expected(directory, prompts)
    assert handoffs.consumer.stats().num_prompt_tokens == 0
    handoffs.check_integrity()
    handoffs.close()


def test_what_a_smaller_group_leaves_of_its_blocks_is_zero(uneven: Path) -> None:
    """So that it takes nothing along that was there before, of whomever."""
    with create_engine(uneven, None, num_blocks=24, max_model_len=112) as engine:
        groups = engine.spec.layout.groups
        assert [(group.kind, group.layers) for group in groups] == [
            ("full", (1, 3)),
            ("window", (0, 4)),
            ("window", (2,)),
        ]
        kv_cache = kv_cache_of(engine)
        kv_cache[:] = 7.0
        engine.add_request(
            AddRequest(request_id=RequestId("r"), prompt_token_ids=prompt_of(3 * BLOCK_SIZE + 3), sampling=GREEDY)
        )
        engine.step()
        engine.step()
        third = engine._core._scheduler._kv.block_ids(engine._core._scheduler._places.live[RequestId("r")])[2]
        ids = [block_id for block_id in third if block_id]
        assert ids
        assert not kv_cache[ids, 1].any()
        assert kv_cache[ids, 0].any()
        while engine.has_unfinished:
            engine.step()


def test_a_request_holds_a_window_of_each_such_group(uneven: Path) -> None:
    """And a block or two, as windows begin within blocks and tokens are added."""
    with create_engine(uneven, None, num_blocks=128, max_model_len=400) as engine:
        engine.add_request(
            AddRequest(
                request_id=RequestId("r"),
                prompt_token_ids=prompt_of(300),
                sampling=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            )
        )
        held = []
        while engine.has_unfinished:
            if any(output.tokens for output in engine.step().outputs):
                held.append(engine.check_integrity().num_blocks_in_use)
        most_of_window = -(-SLIDING_WINDOW // BLOCK_SIZE) + 2
        assert max(held[:-1]) <= 320 // BLOCK_SIZE + 2 * most_of_window


def test_a_store_keeps_of_a_window_what_a_request_goes_on_with(uneven: Path, tmp_path: Path) -> None:
    prompt = prompt_of(10 * BLOCK_SIZE)
    engines = [create_engine(uneven, tmp_path / "kv", num_blocks=128) for _ in range(2)]
    handoffs = Handoffs(*engines)
    handoffs.run([prompt], GREEDY)
    most_of_window = -(-(SLIDING_WINDOW - 1) // BLOCK_SIZE) + 1
    assert len(list((tmp_path / "kv").glob("*/*/*.kv"))) <= 10 + 2 * most_of_window
    assert generate(engines[1], [prompt], GREEDY) == expected(uneven, [prompt]), "from the prefix cache"
    handoffs.close()
