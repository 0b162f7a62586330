"""Layers that keep a state in place of KV: the tokens of transformers, whose oracle is the whole text at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from common.engine.client.inproc import InprocClient
from common.engine.devices.cpu.device import CpuDevice
from common.engine.devices.decode_inputs import DecodeLimits, Forward
from common.engine.devices.gpu.decode_graphs import DecodeGraphs
from common.engine.devices.host_memory import HostMemory
from common.engine.llm import LLM
from common.engine.messages import AddRequest
from common.engine.model import kv_groups
from common.engine.worker.state_cache import StateCache
from common.errors import ConfigError
from common.types import RequestId, SampledToken, SamplingParams
from tests.architectures.models import model_dir
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Decoded, Handoffs, create_engine, generate, note_decoded
from tests.integration.speculation_rig import ask_and_verify_always
from tests.redis_server import RedisServer, running_redis
from tests.tiny_models import prompt_of, random_model, reference_generate

# Gated delta nets, Mamba, Mamba 2, short convolutions, lightning attention; and no attention at all.
MODELS = ("qwen3_next", "jamba", "bamba", "lfm2", "minimax", "mamba")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def expected(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in prompts]


def num_states(engine: InprocClient | LLM) -> int:
    return sum(group.kind == "state" for group in engine.spec.layout.groups)


@pytest.mark.parametrize("on", [{}, pytest.param({"device": "cuda", "dtype": "float32"}, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_transformers(model: str, on: dict[str, str]) -> None:
    """In chunks, beside each other, in so few blocks that some are preempted, and with prefix hits."""
    directory = model_dir(model)
    prompts = [prompt_of(length) for length in (1, 3, 4, 11, 37, 38, 53)]
    settings: dict[str, Any] = {"block_size": 4, "num_threads": 1, **on}
    with LLM(directory, num_blocks=512, **settings) as llm:
        num_groups, of_states = len(llm.spec.layout.groups), num_states(llm)
    num_blocks = 1 + 24 * (num_groups - of_states) + 6 * of_states
    with LLM(directory, num_blocks=num_blocks, max_num_batched_tokens=10, **settings) as llm:
        for _ in range(2):
            completions = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [completion.token_ids for completion in completions] == expected(directory, prompts)
        assert llm._client.stats().num_preemptions or of_states > 4 or num_groups == of_states
        report = llm.check_integrity()
        assert report.violations == []
        assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 0, 0)


@pytest.mark.cell(feature="states of {model}", degrees="{num_ranks}x{num_stages}")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "num_ranks", "num_stages", "settings"),
    [
        ("qwen3_next", 2, 1, {}),
        ("qwen3_next", 2, 1, {"enable_expert_parallel": True}),
        ("qwen3_next", 1, 2, {"speculative": "ngram:min=1"}),
        ("qwen3_next", 2, 2, {}),
        ("qwen3_next", 4, 1, {}),  # of which two have the same KV head
        ("minimax", 2, 2, {}),
        ("kimi_linear", 2, 2, {}),
        ("olmo_hybrid", 2, 2, {}),
        ("jamba", 2, 1, {}),
    ],
)
def test_ranks_say_what_transformers_says(
    model: str, num_ranks: int, num_stages: int, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, beside each other, in so few blocks that some may be preempted, and with prefix hits."""
    ask_and_verify_always(monkeypatch)
    directory = model_dir(model, times=num_stages)
    prompts = [prompt_of(length) for length in (1, 11, 37, 38, 53)]
    with LLM(directory, block_size=16, num_blocks=512, num_threads=1) as llm:
        num_groups, of_states = len(llm.spec.layout.groups), num_states(llm)
    cuts = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    num_blocks = 1 + 8 * (num_groups - of_states) + 6 * of_states
    limits = {"block_size": 16, "num_blocks": num_blocks, "max_num_batched_tokens": 10}
    with LLM(directory, **limits, **cuts, **settings) as llm:
        for some in (prompts, prompts[-1:], prompts[-1:]):
            completions = llm.generate(some, GREEDY, use_tqdm=False)
            assert [completion.token_ids for completion in completions] == expected(directory, some)
        assert llm._client.stats().prefix_cache_hits
        assert llm.check_integrity().violations == []


def test_blocks_are_as_large_as_states_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_groups, "_MOST_PARTS", 1)
    directory, prompts = model_dir("qwen3_next"), [prompt_of(length) for length in (5, 70)]
    with LLM(directory, num_blocks=64, num_threads=1) as llm:
        assert (llm.spec.block_size, num_states(llm)) == (64, 1)
        completions = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [completion.token_ids for completion in completions] == expected(directory, prompts)
        assert llm.check_integrity().violations == []


def test_recorded_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded as on a GPU, by running the work again; until there are more states than had room when that was done."""
    num_replays: list[int] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            num_replays.append(1)
            work()

        return replay

    def record_decodes(device: Any, forward: Forward, kernels: str, limits: DecodeLimits) -> DecodeGraphs:
        return DecodeGraphs(forward, record, limits, sizes=(2, 4), device=torch.device("cpu"))

    monkeypatch.setattr(CpuDevice, "record_decodes", record_decodes)
    directory, prompts = model_dir("mamba"), [prompt_of(length) for length in (5, 11, 18)]
    with LLM(directory, block_size=4, num_blocks=256, num_threads=1, max_num_seqs=4) as llm:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # from here on, so that the rest is a CPU's
        for _ in range(2):
            num_replays.clear()
            completions = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [completion.token_ids for completion in completions] == expected(directory, prompts)
            assert len(num_replays) >= 15
        core: Any = llm._client
        states = core._core._executor._worker._runner._states
        states._fixed, fixed = states._fixed[:, :2], states._fixed  # as if there were more decodes than were recorded
        num_replays.clear()
        completions = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [completion.token_ids for completion in completions] == expected(directory, prompts)
        states._fixed = fixed
        states._free.clear()
        states._released.clear()
        num_replays.clear()
        completions = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [completion.token_ids for completion in completions] == expected(directory, prompts)
        assert not num_replays


def test_too_few_blocks_for_any_request_are_named() -> None:
    directory, prompt = model_dir("qwen3_next"), prompt_of(6)
    with pytest.raises(ConfigError, match="2 KV blocks hold no request") as caught:
        LLM(directory, block_size=16, num_blocks=2, num_threads=1)
    least = int(str(caught.value).rpartition("--num-blocks ")[2].rstrip(")"))
    with LLM(directory, block_size=16, num_blocks=least, num_threads=1) as llm:
        assert llm.spec.max_model_len == 16
        (completion,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=10), use_tqdm=False)
        assert completion.token_ids == reference_generate(directory, prompt, 10)


def test_measuring_memory_keeps_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with memory of its own, where a step is run before what is left is measured."""
    monkeypatch.setattr(HostMemory, "is_own", True)
    made: list[weakref.ref[StateCache]] = []
    create = StateCache.__init__

    def note(self: StateCache, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        create(self, *args, **options)

    def free_bytes(self: HostMemory) -> int:
        gc.collect()
        assert [each() for each in made] == [None]
        return 10**9

    monkeypatch.setattr(StateCache, "__init__", note)
    monkeypatch.setattr(HostMemory, "free_bytes", free_bytes)
    with LLM(model_dir("qwen3_next"), num_threads=1, max_num_seqs=4):
        assert len(made) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["bamba", "lfm2", "mamba"])  # others have experts, whose code waits for the GPU
def test_decode_steps_are_cuda_graphs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda self, inputs: sizes.append(len(inputs.tokens)) or run(self, inputs))
    directory, prompts = model_dir(model), [prompt_of(length) for length in (5, 11, 37)]
    limits = {"block_size": 16, "num_blocks": 128, "max_num_seqs": 4, "device": "cuda", "dtype": "float32"}
    with LLM(directory, **limits) as llm:
        for _ in range(2):
            sizes.clear()
            completions = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [completion.token_ids for completion in completions] == expected(directory, prompts)
            assert len(sizes) >= 15


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.mark.parametrize(
    ("model", "connector"),
    [
        pytest.param(model, connector, marks=() if number % 3 == place else pytest.mark.matrix)
        for number, model in enumerate(MODELS)
        for place, connector in enumerate(["shared-storage", "redis", "nixl"])
    ],
)
def test_nothing_is_computed_again_after_a_handoff(
    model: str, connector: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    directory = model_dir(model)
    prompts = [prompt_of(length) for length in (1, BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 5)]
    options = {"url": redis_server.url} if connector == "redis" else {}
    engines = [
        create_engine(directory, tmp_path / "kv", connector_name=connector, options=options, num_blocks=256)
        for _ in range(2)
    ]
    handoffs = Handoffs(*engines)
    decoded = handoffs.run(prompts, GREEDY)
    assert [each.token_ids for each in decoded] == expected(directory, prompts)
    assert {each.received.recompute_reason for each in decoded if each.received} == {""}
    assert handoffs.consumer.stats().num_prompt_tokens == 0
    assert generate(engines[1], prompts, GREEDY) == expected(directory, prompts), "from the prefix cache"
    handoffs.check_integrity()
    handoffs.close()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_prompt_without_its_state_is_computed_again(is_lost: bool, tmp_path: Path) -> None:
    """Whatever there is of its KV: a state cannot be made from that."""
    directory, prompt = model_dir("qwen3_next"), prompt_of(3 * BLOCK_SIZE + 5)
    engines = [create_engine(directory, tmp_path / "kv", num_blocks=256) for _ in range(2)]
    handoffs = Handoffs(*engines)
    handoffs.prefill("r", prompt, GREEDY)
    newest = max((tmp_path / "kv").glob("*/*/*.kv"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if is_lost:
        newest.unlink()
    else:
        content = bytearray(newest.read_bytes())
        content[-1] ^= 1
        newest.write_bytes(content)
    decoded = handoffs.decode("r")
    assert decoded.token_ids == expected(directory, [prompt])[0]
    assert decoded.received is not None
    assert decoded.received.recompute_reason == ("block_missing" if is_lost else "block_corrupt")
    assert handoffs.consumer.stats().num_prompt_tokens == len(prompt)
    handoffs.check_integrity()
    handoffs.close()


def test_a_stream_goes_on_elsewhere(tmp_path: Path) -> None:
    """With the tokens that it has, after a prefix that is cached there."""
    directory, prompt = model_dir("qwen3_next"), prompt_of(2 * BLOCK_SIZE + 3)
    (answer,) = expected(directory, [prompt])
    with create_engine(directory, None, num_blocks=256) as engine:
        assert generate(engine, [prompt], GREEDY) == [answer]
        for num_known in (1, 7, 15):
            decoded = {RequestId("r"): Decoded([SampledToken(token_id) for token_id in answer[:num_known]])}
            engine.add_request(
                AddRequest(
                    request_id=RequestId("r"),
                    prompt_token_ids=prompt,
                    output_token_ids=answer[:num_known],
                    sampling=GREEDY,
                )
            )
            while engine.has_unfinished:
                note_decoded(engine.step(), decoded)
            assert decoded[RequestId("r")].token_ids == answer
        assert engine.stats().prefix_cache_hits


def test_a_common_prefix_has_a_state_once_it_was_seen_twice() -> None:
    """States are kept at the ends of prompts, and where a prompt leaves one that is known."""
    directory, common = model_dir("qwen3_next"), prompt_of(4 * BLOCK_SIZE)
    prompts = [[*common, *prompt_of(2 * BLOCK_SIZE, seed=number)] for number in range(3)]
    with create_engine(directory, None, num_blocks=256) as engine:
        hits = []
        for prompt in prompts:
            assert generate(engine, [prompt], GREEDY) == expected(directory, [prompt])
            hits.append(engine.stats().prefix_cache_hits)
        assert hits == [0, 0, 4 * BLOCK_SIZE]


def test_a_request_holds_few_blocks_of_states(tmp_path: Path) -> None:
    """However long it is."""
    with create_engine(model_dir("qwen3_next"), None, num_blocks=256) as engine:
        of_states = num_states(engine)
        sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        engine.add_request(AddRequest(request_id=RequestId("r"), prompt_token_ids=prompt_of(150), sampling=sampling))
        held = []
        while engine.has_unfinished:
            engine.step()
            held.append(engine.check_integrity().num_blocks_in_use)
        assert max(held) <= -(-200 // BLOCK_SIZE) + 2 * of_states


@pytest.mark.parametrize("method", ["ngram:min=1", "suffix"])
def test_wrong_drafts_leave_the_state_as_it_was(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_and_verify_always(monkeypatch)
    directory = model_dir("jamba")
    prompts = [prompt_of(length) for length in (1, 11, 33)]
    with LLM(directory, block_size=4, num_blocks=1024, num_threads=1, speculative=method) as llm:
        for _ in range(2):
            completions = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [completion.token_ids for completion in completions] == expected(directory, prompts)
        drafts = llm._client.stats().drafts
        assert drafts.num_accepted < drafts.num_verified


def test_a_state_takes_as_many_blocks_as_keys_can_name(tmp_path: Path) -> None:
    settings = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 16}
    config = AutoConfig.from_pretrained(model_dir("qwen3_next"), **settings)
    random_model(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--block-size: a state of \d+ bytes .* at least 9"):
        LLM(tmp_path, block_size=1, num_threads=1)


def test_states_of_all_requests_fit_beside_the_kv_cache() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-seqs: states of 10000000 running requests take [\d.]+ GiB"):
        LLM(model_dir("lfm2"), max_num_seqs=10_000_000, max_num_batched_tokens=10_000_000, num_threads=1)


def test_a_draft_model_has_no_state() -> None:
    model = str(model_dir("qwen3_next"))
    with pytest.raises(ConfigError, match=r"draft:model: .* layers that keep a state"):
        LLM(model, speculative=f"draft:model={model}", num_threads=1)
