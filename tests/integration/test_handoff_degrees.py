"""Handoffs and tiers between engines of different tensor-parallel degrees, over real connectors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import (
    CacheConfig,
    EngineConfig,
    KVCacheDType,
    KVConnectorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from common.engine.executor.fake import TWO_GROUPS, FakeExecutor, expected_tokens
from common.engine.executor.multiproc.fake import create_fake_multiproc_executor
from common.types import SamplingParams
from kv_store.registry import create_connector
from tests.architectures.models import model_dir
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Handoffs, check_integrity, generate
from tests.redis_server import RedisServer, running_redis
from tests.tiny_models import (
    SLIDING_WINDOW,
    prompt_of,
    random_model,
    reference_generate,
    tiny_config,
    tiny_model_dir,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)  # so many that blocks fall out of the window
LENGTHS = (1, BLOCK_SIZE, 3 * CHUNK - 1, 5 * CHUNK + 5)
DEGREES = [(1, 2), (2, 1), (2, 2), (4, 2), (1, 8), (8, 2)]
NUM_KV_HEADS = 4  # of ranks of degree 8, two have the same one
OpenEngine = Callable[..., InprocClient]
CUTS = [
    pytest.param((1, (2, 1)), (1, ()), marks=pytest.mark.cell(degrees="1x2 to 1")),
    pytest.param((1, ()), (1, (2, 1)), marks=pytest.mark.cell(degrees="1 to 1x2")),
    pytest.param((2, ()), (1, (1, 2)), marks=pytest.mark.cell(degrees="2 to 1x2")),
    pytest.param((2, (1, 1, 1)), (4, (1, 2)), marks=pytest.mark.cell(degrees="2x3 to 4x2")),
]
FOUR_LAYERS = {  # of which every other has a window
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": SLIDING_WINDOW,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(params=["memory", "shared-storage", "redis", "nixl", "nixl with a store"])
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenEngine]:
    """Makes engines of some degree on one medium; at the end all must be sound."""
    medium = uuid4().hex
    name, options = {
        "memory": lambda: ("memory", {"store": medium, "offload": True}),
        "shared-storage": lambda: (
            "shared-storage",
            {"path": str(tmp_path), "max_bytes": 1 << 28, "host_bytes": 1 << 20},
        ),
        "redis": lambda: (
            "redis",
            {"url": request.getfixturevalue("redis_server").url, "lookup_timeout_s": 60, "offload": True},
        ),
        "nixl": lambda: ("nixl", {}),
        "nixl with a store": lambda: ("nixl", {"store": "memory", "store.store": medium, "offload": True}),
    }[request.param]()
    opened: list[InprocClient] = []

    def open_one(num_ranks: int, layers_by_stage: tuple[int, ...] = ()) -> InprocClient:
        config = EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE), scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK)
        )
        first, *others = [create_connector(name, options) for _ in range(num_ranks * max(1, len(layers_by_stage)))]
        executor = FakeExecutor(
            block_size=BLOCK_SIZE,
            connector=first,
            connectors_of_others=others,
            groups=TWO_GROUPS,
            num_ranks=num_ranks,
            num_kv_heads=NUM_KV_HEADS,
            num_layers=3,
            layers_by_stage=layers_by_stage,
        )
        opened.append(InprocClient(config, executor))
        return opened[-1]

    yield open_one
    for engine in opened:
        check_integrity(engine)
        engine.close()


def expected(prompt: list[int]) -> list[int]:
    return expected_tokens(prompt, GREEDY.max_tokens or 0, groups=TWO_GROUPS)


@pytest.mark.cell(feature="handoff (fake)", connector="{open_engine}", degrees="{of_producer} to {of_consumer}")
@pytest.mark.parametrize(("of_producer", "of_consumer"), DEGREES)
def test_all_kv_arrives(open_engine: OpenEngine, of_producer: int, of_consumer: int) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    handoffs = Handoffs(open_engine(of_producer), open_engine(of_consumer))
    for request, prompt in zip(handoffs.run(prompts, GREEDY), prompts, strict=True):
        assert request.token_ids == expected(prompt)
        assert request.received is not None
        assert (request.received.num_tokens, request.received.recompute_reason) == (len(prompt), "")
    assert handoffs.consumer.stats().num_prompt_tokens == 0


@pytest.mark.cell(feature="handoff (fake)", connector="{open_engine}")
@pytest.mark.parametrize(("of_producer", "of_consumer"), CUTS)
def test_all_kv_arrives_between_stages(
    open_engine: OpenEngine, of_producer: tuple[int, tuple[int, ...]], of_consumer: tuple[int, tuple[int, ...]]
) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    handoffs = Handoffs(open_engine(*of_producer), open_engine(*of_consumer))
    for request, prompt in zip(handoffs.run(prompts, GREEDY), prompts, strict=True):
        assert request.token_ids == expected(prompt)
        assert request.received is not None
        assert (request.received.num_tokens, request.received.recompute_reason) == (len(prompt), "")
    assert handoffs.consumer.stats().num_prompt_tokens == 0


@pytest.mark.cell(
    feature="blocks kept in a store (fake)", connector="{open_engine}", degrees="{of_first} to {of_second}"
)
@pytest.mark.parametrize(("of_first", "of_second"), [(1, 2), (2, 1), (4, 2)])
def test_what_an_engine_of_another_degree_kept_is_restored(
    open_engine: OpenEngine, of_first: int, of_second: int
) -> None:
    prompt = prompt_of(5 * CHUNK + 5)
    first, second = open_engine(of_first), open_engine(of_second)
    for engine in (first, second):
        assert generate(engine, [prompt], GREEDY) == [expected(prompt)]
    stats = second.stats()
    assert not stats.tier_queries or stats.tier_hits == 10 * BLOCK_SIZE


@pytest.fixture(params=["shared-storage", "redis", "nixl", "nixl with host memory"])
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> KVConnectorConfig:
    name, options = {
        "shared-storage": lambda: ("shared-storage", {"path": str(tmp_path), "max_bytes": 1 << 28}),
        "redis": lambda: ("redis", {"url": request.getfixturevalue("redis_server").url}),
        "nixl": lambda: ("nixl", {}),
        "nixl with host memory": lambda: ("nixl", {"host_bytes": 1 << 20}),
    }[request.param]()
    return KVConnectorConfig(factory="kv_store.registry:create_connector", name=name, options=options)


def config_of(
    connector: KVConnectorConfig | None,
    num_ranks: int,
    model: str = "",
    num_stages: int = 1,
    kv_cache_dtype: KVCacheDType = "auto",
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, dtype="float32", max_model_len=256),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=128, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages),
        connector=connector,
    )


@pytest.mark.cell(feature="handoff (fake)", connector="{connector}", degrees="{of_producer} to {of_consumer}")
@pytest.mark.parametrize(
    ("connector", "of_producer", "of_consumer"),
    [
        ("shared-storage", 1, 2),
        *(
            pytest.param(connector, *degrees, marks=pytest.mark.matrix)
            for connector, degrees in (
                ("nixl", (2, 1)),
                ("shared-storage", (2, 1)),
                ("nixl", (1, 2)),
                ("nixl with host memory", (1, 2)),
                ("nixl with host memory", (2, 1)),
            )
        ),
    ],
    indirect=["connector"],
)
def test_ranks_in_processes_of_their_own(connector: KVConnectorConfig, of_producer: int, of_consumer: int) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    configs = [config_of(connector, num_ranks) for num_ranks in (of_producer, of_consumer)]
    producer, consumer = (InprocClient(config, create_fake_multiproc_executor(config)) for config in configs)
    with producer, consumer:
        decoded = handed_over(producer, consumer, prompts)
    assert decoded == [expected_tokens(prompt, GREEDY.max_tokens or 0) for prompt in prompts]


@pytest.mark.cell(
    feature="handoff",
    connector="{connector}",
    degrees="{of_producer[0]}x{of_producer[1]} to {of_consumer[0]}x{of_consumer[1]}",
)
@pytest.mark.parametrize(
    ("connector", "of_producer", "of_consumer"),
    [
        ("nixl", (2, 1), (1, 1)),
        *(
            pytest.param(connector, *cuts, marks=pytest.mark.matrix)
            for connector, cuts in (
                ("shared-storage", ((1, 1), (2, 1))),
                ("shared-storage", ((2, 1), (1, 1))),
                ("nixl", ((1, 1), (2, 1))),
                ("nixl", ((1, 2), (1, 1))),
                ("shared-storage", ((1, 2), (1, 1))),
                ("shared-storage", ((2, 1), (1, 2))),
                ("nixl", ((2, 1), (1, 2))),
            )
        ),
    ],
    indirect=["connector"],
)
def test_tokens_of_models_are_those_of_transformers(
    connector: KVConnectorConfig, of_producer: tuple[int, int], of_consumer: tuple[int, int]
) -> None:
    """Cuts are of ranks that share heads, and stages."""
    directory = tiny_model_dir("llama")
    prompts = [prompt_of(length) for length in LENGTHS]
    producer, consumer = (
        InprocClient(config_of(connector, num_ranks, str(directory), num_stages))
        for num_ranks, num_stages in (of_producer, of_consumer)
    )
    with producer, consumer:
        decoded = handed_over(producer, consumer, prompts)
    assert decoded == [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in prompts]


@pytest.mark.matrix
@pytest.mark.cell(
    feature="handoff of int8 KV",
    connector="{connector}",
    degrees="{of_producer} to {of_consumer}",
)
@pytest.mark.parametrize(
    ("connector", "of_producer", "of_consumer"),
    [
        ("nixl", 2, 1),
        ("shared-storage", 1, 2),
        ("nixl", 1, 2),
        ("shared-storage", 2, 1),
    ],
    indirect=["connector"],
)
def test_quantised_kv(connector: KVConnectorConfig, of_producer: int, of_consumer: int) -> None:
    """Each head's scales go with its numbers."""
    directory = str(tiny_model_dir("llama"))
    prompts = [prompt_of(length) for length in LENGTHS]
    producer, consumer, alone = (
        InprocClient(config_of(kept, num_ranks, directory, kv_cache_dtype="int8"))
        for kept, num_ranks in ((connector, of_producer), (connector, of_consumer), (None, 1))
    )
    with producer, consumer, alone:
        assert handed_over(producer, consumer, prompts) == generate(alone, prompts, GREEDY)


@pytest.mark.cell(
    feature="handoff of latents",
    connector="{connector}",
    degrees="{of_producer[0]}x{of_producer[1]} to {of_consumer[0]}x{of_consumer[1]}",
)
@pytest.mark.parametrize(
    ("connector", "of_producer", "of_consumer"),
    [
        *(
            pytest.param(connector, *cuts, marks=pytest.mark.matrix)
            for connector, cuts in (
                ("nixl", ((2, 1), (1, 1))),
                ("shared-storage", ((1, 1), (2, 1))),
                ("shared-storage", ((2, 1), (1, 1))),
                ("nixl", ((1, 1), (2, 1))),
                ("nixl", ((4, 1), (2, 1))),
                ("nixl with host memory", ((2, 1), (2, 1))),
                ("shared-storage", ((1, 3), (2, 1))),
                ("nixl", ((1, 1), (1, 3))),
            )
        ),
    ],
    indirect=["connector"],
)
def test_latents(connector: KVConnectorConfig, of_producer: tuple[int, int], of_consumer: tuple[int, int]) -> None:
    """Every rank has the latents of all heads, and those of one are sent."""
    directory = tiny_model_dir("deepseek_v3")
    prompts = [prompt_of(length) for length in LENGTHS]
    producer, consumer = (
        InprocClient(config_of(connector, num_ranks, str(directory), num_stages))
        for num_ranks, num_stages in (of_producer, of_consumer)
    )
    with producer, consumer:
        decoded = handed_over(producer, consumer, prompts)
        wholes = {engine.spec.bytes_per_whole_block for engine in (producer, consumer)}
    assert decoded == [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in prompts]
    assert wholes == {BLOCK_SIZE * 3 * (16 + 8) * 4}  # tokens, layers, latent and rotary part, bytes


@pytest.mark.cell(feature="handoff of states", connector="{connector}", degrees="between {cuts}")
@pytest.mark.parametrize(
    ("connector", "cuts"),
    [
        *(
            pytest.param(connector, cuts, marks=pytest.mark.matrix)
            for connector, cuts in (
                ("nixl", "2x1 and 1x2"),
                ("shared-storage", "1x1 and 2x1 and 1x2"),
                ("redis", "1x1 and 2x1 and 1x2"),
                ("nixl", "1x1 and 2x1 and 2x1"),
                ("nixl", "1x1 and 2x2 and 4x1"),
            )
        ),
    ],
    indirect=["connector"],
)
def test_states(connector: KVConnectorConfig, cuts: str) -> None:
    """Each engine hands prompts over to each other one, and goes on itself from the states that it has kept of them; so
    does the other, with the next turn of an answer."""
    directory = model_dir("qwen3_next", times=2)
    degrees = [tuple(map(int, cut.split("x"))) for cut in cuts.split(" and ")]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(InprocClient(config_of(connector, num_ranks, str(directory), num_stages)))
            for num_ranks, num_stages in degrees
        ]
        assert len({engine.spec.fingerprint for engine in engines}) == 1
        for seed, (producer, consumer) in enumerate(itertools.permutations(engines, 2)):
            prompts = [prompt_of(length, seed=seed) for length in LENGTHS]
            before = consumer.stats().num_prompt_tokens
            answers = handed_over(producer, consumer, prompts)
            assert answers == [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in prompts]
            assert consumer.stats().num_prompt_tokens == before
            for engine, known in ((producer, prompts), (consumer, [[*prompts[-1], *answers[-1]]])):
                hits = engine.stats().prefix_cache_hits
                found = generate(engine, known, GREEDY)
                assert found == [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in known]
                assert engine.stats().prefix_cache_hits > hits
                check_integrity(engine)


@pytest.mark.matrix
@pytest.mark.parametrize("connector", ["shared-storage", "nixl"], indirect=True)
def test_window_groups_over_stages(connector: KVConnectorConfig, tmp_path: Path) -> None:
    """Alone, and from two stages to one and back."""
    directory = tmp_path / "model"
    random_model(tiny_config("Gemma2Config", **FOUR_LAYERS)).save_pretrained(directory)
    first, second = (InprocClient(config_of(connector, 1, str(directory), num_stages)) for num_stages in (1, 2))
    prompts = [[prompt_of(length, seed=seed) for length in LENGTHS] for seed in range(3)]
    with first, second:
        assert [len(engine.spec.layout.groups) for engine in (first, second)] == [2, 2]
        found = [
            generate(second, prompts[0], GREEDY),
            handed_over(first, second, prompts[1]),
            handed_over(second, first, prompts[2]),
        ]
    assert found == [
        [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in some] for some in prompts
    ]


def handed_over(producer: InprocClient, consumer: InprocClient, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of handoffs that bring all KV."""
    handoffs = Handoffs(producer, consumer)
    answers = handoffs.run(prompts, GREEDY)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.received is not None
        assert (answer.received.num_tokens, answer.received.recompute_reason) == (len(prompt), "")
    handoffs.check_integrity()
    return [answer.token_ids for answer in answers]
