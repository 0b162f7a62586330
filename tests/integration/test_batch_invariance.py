"""Log probabilities to the last bit, whatever else an engine computes beside a request and however it cuts it."""

from __future__ import annotations

import random

import pytest
from torch import nn

from common.demo_model import demo_model_path
from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.devices.cpu.kernels import pairs
from common.engine.devices.cpu.kernels.processor import is_x86
from common.engine.devices.cpu.kernels.tiles import has_tiles
from common.engine.devices.cpu.packed_linear import PackedLinear
from common.engine.devices.cpu.streamed_linear import blocks_of
from common.engine.messages import AddRequest
from common.errors import ConfigError
from common.types import RequestId, SampledToken
from tests.integration.batch_invariance_rig import OUTPUT_TOKENS, SAMPLING, alone, run
from tests.integration.handoff_rig import Handoffs, create_engine
from tests.tiny_models import tiny_model_dir
from tools.make_adapter import make_adapter

LAYER = nn.Linear(256, 256)
pytestmark = pytest.mark.skipif(
    blocks_of(LAYER.weight.detach(), PackedLinear(LAYER).packed) is None,
    reason="oneDNN packs weights differently on this processor",
)
NEEDS_BFLOAT16 = pytest.mark.skipif(
    not (has_tiles() or pairs.MULTIPLIES_PAIRS or is_x86()), reason="no kernels in bfloat16 for this processor"
)
WEIGHTS = [  # dtype and quantization
    ("float32", None),
    pytest.param("bfloat16", None, marks=NEEDS_BFLOAT16),
    pytest.param("float32", "int8", marks=pytest.mark.slow),
    ("float32", "int8-dynamic"),
    pytest.param("bfloat16", "int8", marks=[NEEDS_BFLOAT16, pytest.mark.slow]),
]


def create(
    dtype: DType,
    quantization: str | None = None,
    *,
    budget: int = 2048,
    num_blocks: int = 400,
    prefix_caching: bool = False,
) -> InprocClient:
    return InprocClient(
        EngineConfig(
            model=ModelConfig(
                model=str(demo_model_path()), dtype=dtype, quantization=quantization, batch_invariant=True
            ),
            cache=CacheConfig(num_blocks=num_blocks, enable_prefix_caching=prefix_caching),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, target_itl_ms=None, max_num_seqs=16),
        )
    )


def requests(seed: int) -> list[list[int]]:
    """Prompts of any length, some with a common beginning."""
    source = random.Random(seed)
    beginning = [source.randrange(3, 1000) for _ in range(50)]
    return [
        beginning * (index % 3 == 0)
        + [source.randrange(3, 1000) for _ in range(source.choice([1, 15, 16, 40, 150, 300]))]
        for index in range(9)
    ]


@pytest.mark.parametrize(("dtype", "quantization"), WEIGHTS)
def test_whatever_the_schedule(dtype, quantization):
    prompts = requests(0)
    with create(dtype, quantization) as client:
        expected = alone(client, prompts)
    for seed, (budget, num_blocks, prefix_caching) in enumerate(
        [(2048, 400, False), (37, 400, True), (130, 40, False), (300, 60, True)]
    ):
        arrivals = [random.Random(seed).randrange(12) for _ in prompts]
        options = {"budget": budget, "num_blocks": num_blocks, "prefix_caching": prefix_caching}
        with create(dtype, quantization, **options) as client:
            assert run(client, prompts, arrivals) == expected


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=[NEEDS_BFLOAT16, pytest.mark.slow])])
def test_whatever_adapters_are_beside_it(dtype, tmp_path):
    """Also beside requests without one, in chunks of more rows than kernels take otherwise."""
    paths = [tmp_path / str(seed) for seed in range(3)]
    for seed, path in enumerate(paths):
        make_adapter(path, demo_model_path(), rank=5 + 8 * seed, seed=seed)
    prompts = requests(3)
    with create(dtype) as client:
        digests = [b"", *(client.load_adapter(str(path)).digest for path in paths)]
        chosen = [digests[number % 4] for number in range(len(prompts))]
        expected = alone(client, prompts, chosen)
        plain = alone(client, prompts)
    assert [tokens == same for tokens, same in zip(expected, plain, strict=True)] == [not each for each in chosen]
    for seed, (budget, num_blocks, prefix_caching) in enumerate([(2048, 400, False), (37, 60, True), (130, 40, False)]):
        arrivals = [random.Random(seed).randrange(12) for _ in prompts]
        with create(dtype, budget=budget, num_blocks=num_blocks, prefix_caching=prefix_caching) as client:
            for path in paths:
                client.load_adapter(str(path))
            assert run(client, prompts, arrivals, chosen) == expected


@pytest.mark.parametrize(("dtype", "quantization"), WEIGHTS)
def test_from_any_token_on(dtype, quantization):
    """What another pod computes after a migration, which begins with prompt and tokens so far as one chunk."""
    (prompt, *_) = requests(1)
    with create(dtype, quantization) as client:
        (whole,) = alone(client, [prompt])
        for count in (1, 5, OUTPUT_TOKENS - 1):
            so_far = [token.token_id for token in whole[:count]]
            request_id = RequestId(f"m{count}")
            client.add_request(
                AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=SAMPLING, output_token_ids=so_far)
            )
            rest: list[SampledToken] = []
            while client.has_unfinished:
                rest += [token for output in client.step().outputs for token in output.tokens]
            assert rest == whole[count:]


def test_across_a_handoff(tmp_path):
    prompts = [prompt[:200] for prompt in requests(2)]
    handoffs = Handoffs(*(create_engine(demo_model_path(), tmp_path / "kv", batch_invariant=True) for _ in range(2)))
    try:
        decoded = handoffs.run(prompts, SAMPLING)
    finally:
        handoffs.close()
    with create("float32") as client:
        expected = alone(client, prompts)
    assert [each.tokens for each in decoded] == expected


@pytest.mark.parametrize(
    ("model", "cache", "message"),
    [
        ({"model": str(tiny_model_dir("gemma2"))}, {}, "of the Llama kind"),
        ({"cpu_kernels": "reference"}, {}, "of the Llama kind"),
        ({"model": str(tiny_model_dir("llama"))}, {}, "no kernel for a linear layer"),
        ({}, {"block_size": 8}, "--block-size"),
    ],
)
def test_refused_where_kernels_are_missing(model, cache, message):
    config = EngineConfig(
        model=ModelConfig(**{"model": str(demo_model_path()), "batch_invariant": True} | model),
        cache=CacheConfig(num_blocks=8, **cache),
    )
    with pytest.raises(ConfigError, match=message) as refusal:
        InprocClient(config)
    assert refusal.value.param == "batch_invariant"
