"""LoRA adapters compute what the model with merged weights does."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from common.engine.devices.cpu import packed_linear
from common.engine.llm import LLM, LoRARequest
from common.errors import InvalidRequestError
from common.types import SamplingParams
from tests.architectures.models import model_dir
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Handoffs, create_engine
from tests.lora import ATTENTION, merged_dir, write_adapter
from tests.redis_server import running_redis
from tests.tiny_models import prompt_of, random_model, reference_generate, tiny_config, tiny_model_dir

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 16, "targets": ("q_proj", "v_proj")},
    {"rank": 5, "targets": ("gate_proj", "down_proj"), "alpha": 3},
    {"rank": 40, "targets": ATTENTION, "config": {"use_rslora": True}},
    {"rank": 8, "targets": ("o_proj", "up_proj")},
    {"rank": 1},
    {"rank": 2, "alpha": 32},
    {"rank": 3},
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    model = tiny_model_dir("qwen3")
    return [write_adapter(root / str(number), model, seed=number, **each) for number, each in enumerate(ADAPTERS)]


def named(path: Path | None) -> LoRARequest | None:
    return None if path is None else LoRARequest(path.name, 1, str(path))


def expected(model: Path, adapter: Path | None, prompt: list[int]) -> list[int]:
    return reference_generate(model if adapter is None else merged_dir(model, adapter), prompt, GREEDY.max_tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "num_blocks": 60},
        pytest.param({"cpu_kernels": "reference"}, marks=pytest.mark.matrix),
        pytest.param({"enforce_eager": True}, marks=pytest.mark.matrix),
    ],
)
def test_eight_and_none_in_a_batch(settings: dict[str, Any], adapters: list[Path]) -> None:
    """In chunks, with prefix hits, and preempted; the same prompts with each adapter."""
    model = tiny_model_dir("qwen3")
    chosen = [*adapters, None] * 3
    lengths = [(3, 21, 40)[number // 9] for number in range(len(chosen))]
    prompts = [prompt_of(length) for length in lengths]
    with LLM(model, block_size=4, **{"num_blocks": 400, **settings}) as llm:
        for _ in range(2):
            found = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[named(each) for each in chosen])
            for completion, adapter, prompt in zip(found, chosen, prompts, strict=True):
                assert completion.token_ids == expected(model, adapter, prompt), adapter
        assert llm._client.stats().num_failed_recordings == 0
        assert llm._client.stats().prefix_cache_hits or "num_blocks" in settings
        assert llm.check_integrity().violations == []


@pytest.mark.parametrize("quantization", [None, "int8-dynamic"])
def test_decode_steps_with_adapters_are_recorded(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model as wide as kernels take them, whose layers have adapters that come while it runs."""
    for limit in ("_MIN_WEIGHTS", "_MIN_WEIGHTS_FOR_ONE_TOKEN"):
        monkeypatch.setattr(packed_linear, limit, 1)
    model = tmp_path / "model"
    random_model(tiny_config("LlamaConfig", hidden_size=64, intermediate_size=128)).save_pretrained(model)
    chosen = [
        None,
        write_adapter(tmp_path / "a", model, seed=2, targets=("q_proj",)),
        write_adapter(tmp_path / "b", model, seed=3, rank=20),
    ]
    prompt = prompt_of(9)
    with LLM(model, block_size=4, num_blocks=100, quantization=quantization) as llm:
        for several in (chosen[:1], chosen[:2], chosen, chosen[::-1]):
            requests = [named(each) for each in several]
            found = llm.generate([prompt] * len(several), GREEDY, use_tqdm=False, lora_request=requests)
            if quantization is None:
                assert [each.token_ids for each in found] == [expected(model, adapter, prompt) for adapter in several]
        recorded = llm._client._core._executor._worker._runner._recorded._steps
        assert {(1, False, False), (2, False, True), (3, False, True)} <= recorded.keys()
        assert llm._client.stats().num_failed_recordings == 0


TINY = ["gpt2", "deepseek_v3", "llama", "opt", "gemma3", "phi3", "mixtral", "gpt_oss"]
OTHERS = [
    "jamba",
    "qwen3_next",
    "llama4_text",
]  # with states, of which layers get a part of a step at a time, or chunks
TARGETS = (
    *ATTENTION,
    *("fc1", "fc2", "c_attn", "c_fc", "c_proj", "qkv_proj", "gate_up_proj", "q_a_proj", "q_b_proj", "out_proj"),
    *("kv_a_proj_with_mqa", "in_proj", "x_proj", "in_proj_qkvz", "in_proj_ba"),
)


@pytest.mark.parametrize(
    "model", [*TINY[:2], *(pytest.param(each, marks=pytest.mark.matrix) for each in (*TINY[2:], *OTHERS))]
)
def test_models_that_run_their_own_code(model: str, tmp_path: Path) -> None:
    directory = tiny_model_dir(model) if model in TINY else model_dir(model)
    paths = [write_adapter(tmp_path / str(seed), directory, seed=seed, targets=TARGETS) for seed in (2, 3)]
    chosen = [None, *paths] * 2
    prompts = [prompt_of(length) for length in (5, 5, 5, 20, 20, 20)]
    with LLM(directory, block_size=4, num_blocks=600, max_num_batched_tokens=16) as llm:
        found = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[named(each) for each in chosen])
        again = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[named(each) for each in chosen])
        assert llm._client.stats().prefix_cache_hits
    for completion, adapter, prompt in zip([*found, *again], chosen * 2, prompts * 2, strict=True):
        assert completion.token_ids == expected(directory, adapter, prompt), adapter


def test_what_latent_attention_has_absorbed_is_refused(tmp_path: Path) -> None:
    model = tiny_model_dir("deepseek_v3")
    adapter = write_adapter(tmp_path / "a", model, targets=("kv_b_proj",))
    with LLM(model, block_size=4, num_blocks=64) as llm:
        assert llm.spec.layout.groups[0].value_head_dim == 0  # latents are kept
        with pytest.raises(InvalidRequestError, match=r"no layer '.*kv_b_proj'") as raised:
            llm.generate([prompt_of(5)], lora_request=named(adapter))
        assert raised.value.param == "lora_path"


def deeper(adapter: Path, directory: Path) -> Path:
    """The same for a model that has a layer more."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    own = {key: tensor for key, tensor in tensors.items() if ".layers.0.mlp.up_proj." in key}
    tensors |= {key.replace("layers.0", "layers.9"): tensor.clone() for key, tensor in own.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return directory


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"tensor_parallel_size": 2, "cpu_kernels": "reference"}, marks=pytest.mark.matrix),
        pytest.param({"pipeline_parallel_size": 2, "cpu_kernels": "reference"}, marks=pytest.mark.matrix),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.matrix),
    ],
)
def test_two_ranks_have_a_part_of_each_adapter(settings: dict[str, Any], adapters: list[Path], tmp_path: Path) -> None:
    model = tiny_model_dir("qwen3")
    chosen = [*adapters, None] * 2
    prompts = [prompt_of(length) for length in (5, 33) for _ in range(9)]
    with LLM(model, block_size=4, num_blocks=400, num_threads=1, **settings) as llm:
        if settings == {"tensor_parallel_size": 2, "cpu_kernels": "reference"}:
            # A model that runs its own code takes none on several ranks of a stage.
            with pytest.raises(InvalidRequestError, match="computes no adapters"):
                llm.generate(prompts[:1], lora_request=named(adapters[0]))
            return
        with pytest.raises(InvalidRequestError, match=r"no adapter_config\.json"):
            llm.generate(prompts[:1], lora_request=LoRARequest("none", 1, str(tmp_path)))
        with pytest.raises(InvalidRequestError, match=r"no layer 'model\.layers\.9\.mlp\.up_proj'"):
            llm.generate(prompts[:1], lora_request=named(deeper(adapters[0], tmp_path)))
        found = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[named(each) for each in chosen])
        for completion, adapter, prompt in zip(found, chosen, prompts, strict=True):
            assert completion.token_ids == expected(model, adapter, prompt), adapter
        llm._client.unload_adapter(llm._adapters.pop(str(adapters[0])))
        (again,) = llm.generate(prompts[-1:], GREEDY, use_tqdm=False, lora_request=named(adapters[0]))
        assert again.token_ids == expected(model, adapters[0], prompts[-1])
        assert llm.check_integrity().violations == []


@pytest.mark.parametrize("connector", ["shared-storage", "nixl", "redis"])
def test_adapters_are_handed_over(connector: str, adapters: list[Path], tmp_path: Path) -> None:
    """The same prompts with each adapter, also to an engine that preempts; what is in the store is not mixed up."""
    model = tiny_model_dir("qwen3")
    chosen = [None, *adapters[:3]] * 3
    prompts = [prompt_of(length) for length in (5, BLOCK_SIZE + 1, 2 * CHUNK + 5) for _ in range(4)]
    with contextlib.ExitStack() as cleanup:
        options = {"url": cleanup.enter_context(running_redis()).url} if connector == "redis" else {}
        engines = [
            create_engine(model, tmp_path / "kv", connector_name=connector, options=options, num_blocks=num_blocks)
            for num_blocks in (64, 40)
        ]
        handoffs = Handoffs(*engines)
        cleanup.callback(handoffs.close)
        digests = [[b"", *(engine.load_adapter(str(each)).digest for each in adapters[:3])] for engine in engines]
        assert digests[0] == digests[1]
        for _ in range(2):
            decoded = handoffs.run(prompts, GREEDY, digests[0] * 3)
            for each, adapter, prompt in zip(decoded, chosen, prompts, strict=True):
                assert each.token_ids == expected(model, adapter, prompt)
                assert each.received is not None
                assert each.received.recompute_reason == ""
        handoffs.check_integrity()


def test_a_thousand_requests_in_rapid_alternation(adapters: list[Path]) -> None:
    """More adapters than may be in use at once, some of which are loaded again and again."""
    model = tiny_model_dir("qwen3")
    chooses = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    with LLM(model, block_size=4, num_blocks=200, max_num_seqs=24, max_loras=3) as llm:
        for _ in range(20):
            chosen = [chooses.choice([None, *adapters]) for _ in range(50)]
            prompts = [prompt_of(chooses.choice([3, 9, 21])) for _ in chosen]
            found = llm.generate(prompts, params, use_tqdm=False, lora_request=[named(each) for each in chosen])
            for completion, adapter, prompt in zip(found, chosen, prompts, strict=True):
                assert completion.token_ids == expected(model, adapter, prompt)[:3]
            for path in chooses.sample(sorted(llm._adapters), 3):
                llm._client.unload_adapter(llm._adapters.pop(path))
            assert llm.check_integrity().violations == []
