"""Engines with quantised KV generate what transformers does in float32 over keys and values that are rounded alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.demo_model import demo_model_path
from common.engine.config import KVCacheDType
from common.engine.contract.layout import map_layouts
from common.engine.llm import LLM
from common.errors import ConfigError, IncompatiblePeerError
from common.types import SamplingParams
from tests.architectures.models import model_dir
from tests.extensions.device import ExampleAttention, ExampleDevice, ExampleOperators
from tests.integration.cluster import running_cluster
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Handoffs, create_engine, generate
from tests.redis_server import RedisServer, running_redis
from tests.tiny_models import prompt_of, random_model, tiny_config, tiny_model_dir

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
LENGTHS = (1, 3, 4, 11, 37, 64, 70)
PROMPTS = [prompt_of(length) for length in LENGTHS]
KINDS: tuple[KVCacheDType, ...] = ("int8", "fp8")
DTYPES: dict[str, KVCacheDType] = {
    "float32": "auto",
    "int8": "int8",
    "float8_e4m3fn": "fp8",
}  # settings, by type in blocks
MODEL = "qwen3"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def rounded(vectors: torch.Tensor, kind: str) -> torch.Tensor:
    """Vectors [..., head_dim] in 8 bits, each with a scale of its own."""
    scale = (vectors.abs().amax(-1, keepdim=True) / (127 if kind == "int8" else 448)).bfloat16().float()
    scaled = vectors / scale
    return (scaled.round() if kind == "int8" else scaled.to(torch.float8_e4m3fn).float()) * scale


def reference(directory: Path, prompts: Sequence[Sequence[int]], kind: str) -> list[list[int]]:
    """Greedy tokens of transformers over rounded keys and values."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **arguments: Any) -> Any:
        return sdpa_attention_forward(module, query, rounded(key, kind), rounded(value, kind), mask, **arguments)

    AttentionInterface.register("rounded", attend)
    AttentionMaskInterface.register("rounded", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="rounded").eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
            )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("model", "num_blocks", "settings"),
    [
        ("llama", 33, {}),
        ("gemma3", 70, {}),
        pytest.param("qwen3", 33, {"tensor_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param("qwen3", 33, {}, marks=pytest.mark.matrix),
        pytest.param("llama", 33, {"cpu_kernels": "reference"}, marks=pytest.mark.matrix),
        pytest.param("gemma3", 70, {"cpu_kernels": "reference"}, marks=pytest.mark.matrix),
    ],
)
def test_tokens_are_those_of_rounded_keys_and_values(
    kind: KVCacheDType, model: str, num_blocks: int, settings: dict[str, Any]
) -> None:
    """In chunks, beside each other, in so few blocks that some are preempted, and with prefix hits."""
    directory = tiny_model_dir(model)
    expected = reference(directory, PROMPTS, kind)
    options = {"block_size": 4, "num_blocks": num_blocks, "max_num_batched_tokens": CHUNK, "num_threads": 1}
    with LLM(directory, kv_cache_dtype=kind, **options, **settings) as llm:
        assert not llm.spec.kernels_failed
        together = [each.token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert together == expected
        assert llm._client.stats().num_preemptions > 0
        (again,) = llm.generate(PROMPTS[-1:], GREEDY, use_tqdm=False)
        assert again.token_ids == expected[-1]
        assert llm._client.stats().prefix_cache_hits > 0
        assert llm.check_integrity().violations == []


@pytest.mark.parametrize("kind", KINDS)
def test_states_stay_as_they_are_beside_quantised_keys(kind: KVCacheDType) -> None:
    with LLM(model_dir("qwen3_next"), block_size=4, num_blocks=512, num_threads=1, kv_cache_dtype=kind) as llm:
        assert any(group.kind == "state" for group in llm.spec.layout.groups)
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids for prompt in PROMPTS]
        llm.reset_prefix_cache()
        assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == alone
    assert alone == reference(model_dir("qwen3_next"), PROMPTS, kind)


@pytest.mark.parametrize("connector", ["shared-storage", "redis", "nixl"])
@pytest.mark.parametrize("kind", KINDS)
def test_handed_over_equals_colocated(
    kind: KVCacheDType, connector: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    options = {"url": redis_server.url} if connector == "redis" else {}
    prompts = [prompt_of(length) for length in (1, 2, BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 5)]
    producer, consumer = (
        create_engine(
            tiny_model_dir(MODEL), tmp_path / "kv", connector_name=connector, options=options, kv_cache_dtype=kind
        )
        for _ in range(2)
    )
    handoffs = Handoffs(producer, consumer)
    try:
        decoded = handoffs.run(prompts, GREEDY)
        assert {each.received.recompute_reason for each in decoded if each.received} == {""}
        handoffs.check_integrity()
    finally:
        handoffs.close()
    with create_engine(tiny_model_dir(MODEL), None, kv_cache_dtype=kind) as colocated:
        assert [each.token_ids for each in decoded] == generate(colocated, prompts, GREEDY)


def test_pods_that_differ_in_their_kv_share_nothing(tmp_path: Path) -> None:
    """Neither fingerprint nor store, and a pairing names what differs."""
    specs = {}
    for dtype, kind in DTYPES.items():
        with create_engine(tiny_model_dir(MODEL), None, kv_cache_dtype=kind) as engine:
            specs[dtype] = engine.spec
    assert len({spec.fingerprint for spec in specs.values()}) == 3
    assert len({spec.layout.digest for spec in specs.values()}) == 3
    for one, other in itertools.permutations(DTYPES, 2):
        with pytest.raises(IncompatiblePeerError) as caught:
            map_layouts(specs[one].layout, specs[other].layout)
        assert caught.value.message == f"dtype differs: {one} at the producer, {other} at the consumer"
        path = tmp_path / f"{one}-{other}"
        engines = [create_engine(tiny_model_dir(MODEL), path, kv_cache_dtype=DTYPES[each]) for each in (one, other)]
        handoffs = Handoffs(*engines)
        try:
            (decoded,) = handoffs.run([prompt_of(100)], GREEDY)
            assert decoded.received is not None
            assert decoded.received.num_tokens == 0
        finally:
            handoffs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_same_however_a_prompt_is_cut(kind: KVCacheDType, tmp_path: Path) -> None:
    """To the last bit where logits are, by the files in which a producer hands them over."""
    prompts, found, tokens = [prompt_of(150), prompt_of(90)], [], []
    for budget in (16, 40, 200):
        path = tmp_path / str(budget)
        engines = [
            create_engine(demo_model_path(), path, kv_cache_dtype=kind, budget=each, batch_invariant=True)
            for each in (budget, CHUNK)
        ]
        handoffs = Handoffs(*engines)
        try:
            tokens.append([each.token_ids for each in handoffs.run(prompts, GREEDY)])
        finally:
            handoffs.close()
        found.append({file.name: file.read_bytes() for file in path.rglob("*.kv")})
    assert len(found[0]) >= 16
    assert found[0] == found[1] == found[2]
    assert tokens[0] == tokens[1] == tokens[2]


async def test_a_cluster_answers_as_an_engine_alone(tmp_path: Path) -> None:
    with LLM(tiny_model_dir(MODEL), num_blocks=256, num_threads=1, kv_cache_dtype="int8") as llm:
        expected = [each.token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    async with running_cluster(tmp_path, MODEL, kv_cache_dtype="int8") as cluster:
        assert await cluster.tokens(PROMPTS, max_tokens=MAX_TOKENS) == expected
        assert cluster.recomputed() == 0
        (family,) = (
            each for each in cluster.decode[0].context.metrics.registry.collect() if each.name.endswith("config_info")
        )
        assert family.samples[0].labels["kv_dtype"] == "int8"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM keeps latents, which are not quantised"),
        ("mamba", "MambaForCausalLM keeps no keys and values"),
    ],
)
def test_models_without_keys_and_values_are_refused(model: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model_dir(model), kv_cache_dtype="int8")
    assert (caught.value.message, caught.value.param) == (f"--kv-cache-dtype: int8, but {reason}", "kv_cache_dtype")


def test_types_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*int4"):
        LLM(tiny_model_dir(MODEL), kv_cache_dtype="int4")


def test_devices_that_do_not_know_quantised_kv_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(self: object, kv_cache: torch.Tensor, *others: object) -> ExampleAttention:
        return ExampleAttention(kv_cache.float())

    def of_device(self: object, kv_cache: torch.Tensor, kernels: str, dtype: torch.dtype) -> ExampleAttention:
        return attention(self, kv_cache)

    monkeypatch.setattr(ExampleOperators, "attention", attention)
    monkeypatch.setattr(ExampleDevice, "attention", of_device)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype: the attention of this device \(example\) does not take"):
        LLM(tiny_model_dir(MODEL), device="tests.extensions.device:ExampleDevice", kv_cache_dtype="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_about_twice_as_many_blocks_fit_as_in_bfloat16(kind: KVCacheDType, tmp_path: Path) -> None:
    """A head of 64 numbers takes 66 bytes instead of 128."""
    random_model(tiny_config("LlamaConfig", head_dim=64)).save_pretrained(tmp_path)
    num_blocks = []
    for settings in ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"kv_cache_dtype": kind}):
        with LLM(tmp_path, kv_cache_memory=1 << 24, max_num_seqs=1024, num_threads=1, **settings) as llm:
            num_blocks.append(llm.spec.num_blocks)
    plain, wide, quantized = num_blocks
    assert quantized / plain == pytest.approx(128 / 66, abs=0.01)
    assert quantized / wide == pytest.approx(256 / 66, abs=0.01)


def test_the_program_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "kv_quantization.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(program, page, "exec"), {})
    assert " ".join(capsys.readouterr().out.split()[-2:-1]) == "int8"
