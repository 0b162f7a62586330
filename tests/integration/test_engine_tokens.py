"""The engine generates what transformers does, token for token, whatever the batch, the chunks and the cache do.

Blocks of 4 tokens and steps of 10 put every prompt length of interest around a block or chunk boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from common.engine.llm import LLM
from common.types import SamplingParams
from tests.tiny_models import TINY_MODELS, prompt_of, reference_generate, tiny_model_dir

BLOCK_SIZE = 4
TOKEN_BUDGET = 10  # of a step: neither a multiple of the block size nor a divisor
LENGTHS = (1, 3, 4, 5, 10, 11, 37)  # 1, block - 1, block, block + 1, chunk, chunk + 1, several chunks
MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def make_llm(name: str, **options: object) -> LLM:
    return LLM(
        tiny_model_dir(name),
        **{"block_size": BLOCK_SIZE, "num_blocks": 128, "max_num_batched_tokens": TOKEN_BUDGET, "num_threads": 1}
        | options,
    )


def generate(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    completions = llm.generate(prompts, params, use_tqdm=False)
    report = llm.check_integrity()
    assert report.violations == []
    assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 0, 0)
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module", params=TINY_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def prompts(name: str) -> list[list[int]]:
    return [prompt_of(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(name: str, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_generate(tiny_model_dir(name), prompt, MAX_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    with make_llm(name) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _cold_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()


def test_alone_then_from_the_prefix_cache(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert [generate(llm, [prompt])[0] for prompt in prompts] == expected
    again = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [completion.token_ids for completion in again] == expected
    # All full blocks are found, but the last token must be computed to have something to sample from.
    hits = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
    assert [completion.num_cached_tokens for completion in again] == hits


def test_batched(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert generate(llm, prompts) == expected
    assert generate(llm, prompts[::-1]) == expected[::-1]  # in another order, from the cache


def test_shared_prefix(name: str, llm: LLM, prompts: list[list[int]]) -> None:
    """Prompts that part ways at the last token of a block and at its end; the first is still being computed."""
    shared = prompts[-1]
    family = [shared, shared[:23] + prompts[4], shared[:24] + prompts[3], shared[:24]]
    expected = [reference_generate(tiny_model_dir(name), prompt, MAX_TOKENS) for prompt in family]
    hits = llm._client.stats().prefix_cache_hits
    assert generate(llm, family) == expected
    assert generate(llm, family) == expected
    assert llm._client.stats().prefix_cache_hits > hits


def test_preempted(name: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """The KV cache holds the longest request, and two others now and then."""
    num_groups = 3 if name in ("gemma2", "gemma3", "gpt_oss") else 1
    for caching in (True, False):
        with make_llm(name, num_blocks=1 + 13 * num_groups, enable_prefix_caching=caching) as llm:
            assert len(llm.spec.layout.groups) == num_groups
            assert generate(llm, prompts) == expected
            assert llm._client.stats().num_preemptions > 0


def test_seeded_sampling_alone_and_batched(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, seed=42, max_tokens=MAX_TOKENS)
    batched = generate(llm, prompts, params)
    assert [generate(llm, [prompt], params)[0] for prompt in prompts] == batched
    other = SamplingParams(temperature=0.9, seed=43, max_tokens=MAX_TOKENS)
    assert generate(llm, prompts, other) != batched
