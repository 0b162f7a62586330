"""How much of prompts a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.step_budget import (
    KNEE_LOSS,
    PromptRoom,
    auto_target_s,
    knee_tokens,
    measured_knee,
    prefill_work,
    tokens_within,
)
from common.step_times import Line

LINE = Line(base_s=0.010, token_s=0.0001, context_s=0.0)  # its knee: 4,900 tokens

tokens = st.integers(1, 100_000)
contexts = st.integers(0, 200_000)


def beside(*, step_s: float = 0.010, target_s: float = 0.050, least: int = 64) -> PromptRoom:
    return PromptRoom.beside_streams(LINE, step_s=step_s, target_s=target_s, least=least)


@given(contexts, tokens)
def test_tokens_within_is_the_inverse_of_prefill_work(num_context_tokens: int, num_tokens: int) -> None:
    work = prefill_work(float(num_tokens), float(num_context_tokens))
    assert num_tokens - 1 <= tokens_within(work, num_context_tokens) <= num_tokens


@given(contexts, tokens, tokens)
def test_work_in_chunks_is_the_work_at_once(num_context_tokens: int, first: int, second: int) -> None:
    in_chunks = prefill_work(first, num_context_tokens) + prefill_work(second, num_context_tokens + first)
    assert in_chunks == pytest.approx(prefill_work(first + second, num_context_tokens))


def test_knee_leaves_so_little_throughput() -> None:
    knee = knee_tokens(LINE)
    throughput = knee / (LINE.base_s + knee * LINE.token_s)
    assert throughput == pytest.approx((1 - KNEE_LOSS) / LINE.token_s)


def test_a_measured_knee_is_the_shortest_step_that_is_all_but_the_best() -> None:
    """Weights are read while others are computed: below 1000 tokens reading binds, above it computing."""
    steps = [(tokens, max(0.030, tokens * 0.030 / 1000)) for tokens in (1, 64, 128, 256, 512, 1024, 2048)]
    assert measured_knee(steps) == 1024
    assert measured_knee(steps[:5]) == 512, "what longer steps would gain is not known"
    assert measured_knee(steps[:2]) == 512, "smaller chunks would read the context too often"
    assert measured_knee([]) is None


@pytest.mark.parametrize(
    ("base_s", "token_s", "target_s"),
    [
        (0.0005, 0.00002, 0.05),  # a step of 50 ms is long, as machines go
        (0.010, 0.0002, 0.0823),
        (0.200, 0.0050, 0.2),  # a step of 2 s would be needed, in which no stream moves
    ],
)
def test_the_target_of_an_engine_leaves_prompts_most_of_their_rate(
    base_s: float, token_s: float, target_s: float
) -> None:
    steps = [(tokens, base_s + token_s * tokens) for tokens in (1, 64, 128, 256, 512, 1024, 2048)]
    assert auto_target_s(steps) == pytest.approx(target_s, rel=0.01)
    if 0.05 < target_s < 0.2:
        num_tokens = (target_s - base_s) / token_s
        assert num_tokens / target_s == pytest.approx(0.9 * 2048 / steps[-1][1], rel=0.01)


def test_the_target_of_an_engine_that_has_measured_nothing() -> None:
    assert auto_target_s([]) == 0.05
    assert auto_target_s([(1, 0.08)]) == 0.08


@given(st.floats(0.0, 0.1), st.floats(0.001, 0.2), st.integers(1, 512), tokens, contexts)
def test_beside_streams_the_target_is_kept_or_the_least_is_taken(
    step_s: float, target_s: float, least: int, num_tokens: int, num_context_tokens: int
) -> None:
    room = beside(step_s=step_s, target_s=target_s, least=least)
    chunk = room.chunk(num_tokens, num_context_tokens)
    assert min(num_tokens, least) <= chunk <= num_tokens
    predicted = step_s + prefill_work(chunk, num_context_tokens) * LINE.token_s
    assert chunk <= least or predicted <= target_s + 1e-9
    room.take(chunk, num_context_tokens)
    if chunk < num_tokens:
        assert room.chunk(num_tokens - chunk, num_context_tokens + chunk) <= 1, "only what rounding left"


def test_prompts_share_the_room() -> None:
    room = beside()  # 40 ms: 400 tokens without context
    assert room.chunk(100, 0) == 100
    room.take(100, 0)
    assert room.chunk(1000, 0) == pytest.approx(300, abs=4)
    room.take(300, 0)
    assert room.chunk(1000, 0) == 0
    assert room.is_full


def test_the_least_is_of_all_prompts_together() -> None:
    room = beside(step_s=1.0)
    assert room.chunk(40, 0) == 40
    room.take(40, 0)
    assert room.chunk(1000, 0) == 24
    room.take(24, 0)
    assert room.is_full


def test_alone_prompts_come_one_after_the_other() -> None:
    room = PromptRoom.alone(knee_tokens(LINE))
    assert room.chunk(3000, 0) == 3000
    room.take(3000, 0)
    assert not room.is_full, "a step of so few tokens wastes throughput"
    assert room.chunk(3000, 0) == 3000
    room.take(3000, 0)
    assert room.is_full
    assert room.chunk(3000, 0) == 0


@pytest.mark.parametrize(("num_tokens", "chunk"), [(7000, 7000), (8000, 4000), (14_700, 4900), (16_000, 5334)])
def test_alone_a_long_prompt_is_cut_into_equal_chunks_of_about_the_knee(num_tokens: int, chunk: int) -> None:
    assert PromptRoom.alone(knee_tokens(LINE)).chunk(num_tokens, 0) == chunk


def test_where_a_token_costs_as_much_as_a_step_the_knee_is_still_a_token() -> None:
    room = PromptRoom.alone(knee_tokens(Line(base_s=0.0, token_s=1.0, context_s=0.0)))
    assert room.chunk(10, 0) == 1


def test_rooms_without_figures() -> None:
    assert PromptRoom.unlimited().chunk(123_456, 0) == 123_456
    assert PromptRoom.least(64).chunk(1000, 0) == 64
