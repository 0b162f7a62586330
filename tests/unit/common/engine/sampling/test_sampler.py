import math

import numpy as np
import pytest
import torch

from common.engine.contract.step import NoToken
from common.engine.sampling.noise import gumbel_noise, hash_with_numpy, hash_with_torch, stream_key
from common.engine.sampling.processors import SamplingRow
from common.engine.sampling.rules import rules_of
from common.engine.sampling.sampler import Sampler, is_plain
from common.types import SamplingParams

VOCAB = 40
EOS = 7
SAMPLER = Sampler()


def row(params, tokens=(1, 2, 3), num_prompt=3):
    rules = rules_of(params, frozenset({EOS}), VOCAB)
    return SamplingRow(params, np.array(tokens, dtype=np.int64), num_prompt, rules)


def sample(logits, rows):
    return SAMPLER.sample(logits.clone(), rows)


def draw(logits, params, count=4000):
    """Tokens drawn from one distribution at `count` seeds, and their frequencies."""
    rows = [row(SamplingParams(**params, seed=seed)) for seed in range(count)]
    tokens = [token.token_id for token in sample(logits.expand(count, -1), rows)]
    return tokens, torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / count


def assert_distributed(frequencies, probabilities, count=4000):
    """Pearson's chi-squared, at about five standard deviations."""
    possible = probabilities > 0
    assert not frequencies[~possible].any()
    expected = probabilities[possible] * count
    statistic = ((frequencies[possible] * count - expected) ** 2 / expected).sum()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def logits_of(seed=0, vocab=VOCAB, scale=1.5):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_noise_is_that_of_splitmix64():
    # First outputs of SplitMix64 seeded with 0, as published with the reference implementation.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    noise = gumbel_noise(torch.tensor([[0]]), torch.tensor([1, 2, 3]))[0]
    expected = [-math.log(-math.log(((bits >> 11) + 0.5) / 2**53)) for bits in published]
    assert noise.tolist() == pytest.approx(expected, abs=1e-9)


def test_noise_is_the_same_on_all_devices():
    keys = torch.tensor([[stream_key(seed, seed)] for seed in range(3)])
    for token_ids in (torch.arange(1000), torch.arange(3000).view(3, 1000)[:, 7:900]):
        assert torch.equal(hash_with_numpy(keys, token_ids), hash_with_torch(keys, token_ids))


def test_streams_of_seeds_and_positions_differ():
    keys = [stream_key(seed, position) for seed in (0, 1, 2, 2**63, 2**64 - 1) for position in range(50)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert stream_key(2**64 + 5, 3) == stream_key(5, 3)


def test_greedy_is_argmax_and_plain():
    logits = torch.stack([logits_of(seed) for seed in range(5)])
    rows = [row(SamplingParams(temperature=0.0))] * 5
    assert [token.token_id for token in sample(logits, rows)] == logits.argmax(dim=-1).tolist()
    assert [token.token_id for token in SAMPLER.sample_plain(logits)] == logits.argmax(dim=-1).tolist()
    assert is_plain(SamplingParams(temperature=0.0, top_k=3, top_p=0.1, stop_token_ids=(4,)))
    for changed in ({"min_tokens": 1}, {"num_logprobs": 0}, {"presence_penalty": 0.1}, {"temperature": 0.1}):
        assert not is_plain(SamplingParams(**{"temperature": 0.0, **changed}))


def test_temperature_shapes_the_distribution():
    logits = logits_of()
    for temperature in (0.5, 1.0, 2.0):
        _, frequencies = draw(logits, {"temperature": temperature})
        assert_distributed(frequencies, torch.softmax(logits / temperature, dim=-1))


def test_tiny_temperature_is_almost_greedy():
    tokens, _ = draw(logits_of(), {"temperature": 1e-30}, count=50)
    assert set(tokens) == {int(logits_of().argmax())}


def test_top_k_keeps_the_k_best():
    logits = logits_of()
    _, frequencies = draw(logits, {"top_k": 5})
    expected = torch.zeros(VOCAB)
    best = logits.topk(5)
    expected[best.indices] = torch.softmax(best.values, dim=-1)
    assert_distributed(frequencies, expected)


def test_top_p_keeps_the_smallest_sufficient_set():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for top_p, kept in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (1e-6, 1)):
        _, frequencies = draw(logits, {"top_p": top_p}, count=500)
        assert int((frequencies > 0).sum()) == kept


def test_top_p_looks_at_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    _, frequencies = draw(logits, {"top_k": 2, "top_p": 0.5}, count=500)  # 0.4 / 0.7 is enough alone
    assert (frequencies > 0).tolist() == [True, False, False, False]


def test_min_p_is_relative_to_the_best():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for min_p, kept in ((0.2, 4), (0.26, 3), (0.51, 2), (1.0, 1)):
        _, frequencies = draw(logits, {"min_p": min_p}, count=500)
        assert int((frequencies > 0).sum()) == kept
    _, frequencies = draw(logits, {"min_p": 0.51, "top_k": 3}, count=500)
    assert int((frequencies > 0).sum()) == 2


def test_batched_equals_alone():
    variants = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 3},
        {"top_p": 0.6},
        {"top_k": 10, "top_p": 0.9, "min_p": 0.05},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (3, 4)},
        {"num_logprobs": 4, "top_k": 2},
        {"temperature": 0.0, "num_logprobs": 0},
    ]
    logits = torch.stack([logits_of(seed) for seed in range(len(variants))])
    rows = [
        row(SamplingParams(**variant, seed=seed), tokens=range(seed, seed + 9), num_prompt=4)
        for seed, variant in enumerate(variants)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert [token.token_id for token in together] == [token.token_id for token in alone]
    for one, other in zip(together, alone, strict=True):
        if one.logprobs is not None:
            assert one.logprobs.sampled == pytest.approx(other.logprobs.sampled, abs=1e-6)
            assert [token_id for token_id, _ in one.logprobs.top] == [token_id for token_id, _ in other.logprobs.top]


def test_many_rows_are_drawn_in_parts(monkeypatch):
    logits = torch.stack([logits_of(seed) for seed in range(10)])
    rows = [row(SamplingParams(seed=seed)) for seed in range(10)]
    whole = sample(logits, rows)
    monkeypatch.setattr("common.engine.sampling.sampler._MAX_DRAWN_LOGITS", 3 * VOCAB)
    assert sample(logits, rows) == whole


def test_position_and_seed_choose_the_draw():
    logits = torch.zeros(1, 1000)
    by_position = {sample(logits, [row(SamplingParams(seed=5), range(n), 3)])[0].token_id for n in range(3, 13)}
    by_seed = {sample(logits, [row(SamplingParams(seed=seed))])[0].token_id for seed in range(10)}
    assert len(by_position) > 5
    assert len(by_seed) > 5


def test_last_bits_of_logits_do_not_change_the_draw():
    logits = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))
    disturbed = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)))
    rows = [row(SamplingParams(seed=seed)) for seed in range(64)]
    assert sample(logits, rows) == sample(disturbed, rows)


def test_logprobs_are_those_before_truncation():
    logits = logits_of()
    token = sample(logits[None], [row(SamplingParams(temperature=0.5, top_k=1, num_logprobs=3))])[0]
    expected = torch.log_softmax(logits, dim=-1)
    best = expected.topk(3)
    assert token.token_id == int(best.indices[0])
    assert token.logprobs.sampled == pytest.approx(float(best.values[0]))
    assert [token_id for token_id, _ in token.logprobs.top] == best.indices.tolist()
    assert [value for _, value in token.logprobs.top] == pytest.approx(best.values.tolist())
    assert sample(logits[None], [row(SamplingParams(num_logprobs=0))])[0].logprobs.top == []


def test_penalties():
    logits = torch.full((1, 6), 1.0)
    logits[0, 5] = -1.0
    tokens = [0, 5, 1, 1, 2]  # prompt 0 5, output 1 1 2
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.125}
    penalised = torch.tensor([0.5, 0.5 - 0.5 - 0.125, 0.5 - 0.25 - 0.125, 1.0, 1.0, -2.0])
    rows = [row(SamplingParams(**params, seed=seed), tokens, num_prompt=2) for seed in range(4000)]
    drawn = [token.token_id for token in sample(logits.expand(4000, -1), rows)]
    frequencies = torch.bincount(torch.tensor(drawn), minlength=6) / 4000
    assert_distributed(frequencies, torch.softmax(penalised, dim=-1))


def test_logprobs_are_those_before_biases_penalties_and_masks():
    logits = logits_of()
    best = logits.topk(3)
    first, second, _ = best.indices.tolist()
    params = SamplingParams(
        temperature=0.0, num_logprobs=3, presence_penalty=1.0, logit_bias={5: 3.0}, bad_word_token_ids=((first,),)
    )
    (token,) = sample(logits[None], [row(params, (second, 2), num_prompt=1)])
    expected = torch.log_softmax(logits, dim=-1)
    assert token.token_id != first
    assert token.logprobs.sampled == pytest.approx(float(expected[token.token_id]))
    assert [token_id for token_id, _ in token.logprobs.top] == best.indices.tolist()


@pytest.mark.parametrize(
    ("params", "output", "kept"),
    [
        ({"allowed_token_ids": (9, 4)}, (), {4, 9}),
        ({"bad_word_token_ids": ((8,), (3, 6), (5, 3, 2), (4, 3, 1))}, (5, 3), set(range(VOCAB)) - {8, 6, 2}),
        ({"bad_word_token_ids": ((3, 6),)}, (), set(range(VOCAB))),  # the prompt ends with 3, but is no output
        ({"logit_bias": {11: 100.0, 12: 100.0}}, (), {11, 12}),
        ({"logit_bias": {11: 100.0, 12: 100.0}, "allowed_token_ids": (12, 13)}, (), {12}),
    ],
)
def test_only_tokens_that_the_rules_leave_are_drawn(params, output, kept):
    logits = torch.zeros(VOCAB)
    rows = [row(SamplingParams(**params, seed=seed), (1, 2, 3, *output)) for seed in range(1500)]
    drawn = {token.token_id for token in sample(logits.expand(1500, -1), rows)}
    assert drawn == kept
    plain = row(SamplingParams(temperature=0.0))
    (_, other) = sample(torch.stack([logits, logits_of()]), [rows[0], plain])
    assert other.token_id == int(logits_of().argmax())  # rows beside it are left alone


@pytest.mark.parametrize(
    ("opening", "closing", "output", "forced"),
    [
        ((), (9,), (1, 2), None),
        ((), (9,), (1, 2, 3), 9),
        ((), (9,), (1, 2, 9), None),  # it has ended on its own
        ((), (9,), (1, 2, 3, 9), None),
        ((), (9,), (1, 2, 3, 4), None),  # as after another budget: what was missed is not made up for
        ((), (7, 8, 9), (1, 2, 3), 7),
        ((), (7, 8, 9), (1, 2, 3, 7), 8),
        ((), (7, 8, 9), (1, 2, 3, 7, 8), 9),
        ((), (7, 8, 9), (1, 2, 3, 7, 8, 9), None),
        ((), (7, 8, 9), (1, 2, 7), 8),  # it was about to end
        ((), (7, 8, 9), (1, 2, 7, 8), 9),
        ((), (7, 8, 9), (1, 2, 7, 8, 9), None),
        ((5,), (9,), (1, 2, 3, 4), None),
        ((5,), (9,), (1, 5, 3, 4), None),
        ((5,), (9,), (1, 5, 3, 4, 6), 9),
        ((4, 5), (9,), (4, 4, 5, 1, 2, 3), 9),
        ((5,), (9,), (*[1] * 80, 5, 1, 2, 3), None),  # an answer that mentions a tag
    ],
)
def test_reasoning_is_closed_after_its_budget(opening, closing, output, forced):
    logits = logits_of()[None]
    params = {"thinking_token_budget": 3, "thinking_start_token_ids": opening, "thinking_end_token_ids": closing}
    tokens = (1, 5, 9, *output)
    expected = int(logits.argmax()) if forced is None else forced
    assert not is_plain(SamplingParams(temperature=0.0, **params))
    for more in ({}, {"allowed_token_ids": (expected, 30)} if forced is None else {"allowed_token_ids": (30,)}):
        (token,) = sample(logits, [row(SamplingParams(temperature=0.0, **params, **more), tokens)])
        assert token.token_id == expected
    broken = torch.full_like(logits, math.nan)
    assert sample(broken, [row(SamplingParams(temperature=0.0, **params), tokens)]) == [NoToken.NON_FINITE]


def test_stop_tokens_are_masked_until_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 4], logits[0, 9] = 3.0, 2.0, 1.0
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (4, VOCAB + 1)}

    def sampled(num_output, **changes):
        tokens = range(3 + num_output)
        return sample(logits, [row(SamplingParams(**{**params, **changes}), tokens, num_prompt=3)])[0].token_id

    assert [sampled(0), sampled(1), sampled(2)] == [9, 9, EOS]
    assert sampled(0, ignore_eos=True) == EOS


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0, "num_logprobs": 5}])
def test_equal_logits_are_ranked_by_token_id_whatever_the_batch(params):
    """Rounded logits tie often, and kernels return equal values in an order that depends on the shape."""
    vocab, wide = 3000, {"top_k": 200, "num_logprobs": 20}
    rounded = torch.stack([logits_of(seed, vocab).bfloat16().float().round(decimals=1) for seed in range(64)])
    for seed, logits in enumerate(rounded):
        own = row(SamplingParams(**params, seed=seed))
        alone = sample(logits[None], [own])
        neighbours = [row(SamplingParams(**wide, seed=index)) for index in range(40)]
        assert sample(torch.cat([logits[None], rounded[:40]]), [own, *neighbours])[0] == alone[0]
        if "num_logprobs" in params:
            ranked = torch.sort(logits, descending=True, stable=True).indices[:5].tolist()
            assert [token_id for token_id, _ in alone[0].logprobs.top] == ranked


def test_more_ties_than_are_looked_at():
    logits = torch.zeros(1, 5000)
    token = sample(logits, [row(SamplingParams(temperature=0.0, num_logprobs=3))])[0]
    assert [token_id for token_id, _ in token.logprobs.top] == [0, 1, 2]
    assert {draw(logits[0], {"top_k": 2}, count=50)[0][i] for i in range(50)} == {0, 1}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"num_logprobs": 2}, {"repetition_penalty": 2.0}, {"top_k": 3, "min_tokens": 1}]
)
def test_a_row_without_finite_logits_has_no_token_and_its_neighbours_do(broken, params):
    logits = torch.stack([logits_of(0), logits_of(1), logits_of(2)])
    expected = sample(logits[[0, 2]], [row(SamplingParams(**params, seed=seed)) for seed in (0, 2)])
    logits[1, 3] = broken
    rows = [row(SamplingParams(**params, seed=seed)) for seed in range(3)]
    assert sample(logits, rows) == [expected[0], NoToken.NON_FINITE, expected[1]]
    if is_plain(rows[0].params):
        assert SAMPLER.sample_plain(logits) == [expected[0], NoToken.NON_FINITE, expected[1]]


def test_no_token_where_all_are_masked():
    params = SamplingParams(min_tokens=5, stop_token_ids=tuple(range(VOCAB)), num_logprobs=1)
    assert sample(logits_of()[None], [row(params)]) == [NoToken.MASKED]
    assert sample(torch.full((1, VOCAB), torch.nan), [row(params)]) == [NoToken.NON_FINITE]


@pytest.mark.parametrize("repetition_penalty", [0.01, 100.0])
def test_penalties_within_their_bounds_leave_every_log_probability_finite(repetition_penalty):
    logits = torch.tensor([[3e38, -3e38, 1e30, -1e30, 0.0, 5.0]])
    params = SamplingParams(
        repetition_penalty=repetition_penalty, presence_penalty=-2.0, frequency_penalty=2.0, num_logprobs=6
    )
    (token,) = sample(logits, [row(params, tokens=range(6), num_prompt=2)])
    assert not math.isnan(token.logprobs.sampled)
    assert all(value <= 0.0 for _, value in token.logprobs.top)


def reference_draw(logits, params, position=0):
    """The token drawn after a full sort, by numpy."""
    scores = (logits - logits.max()) / params.temperature
    order = torch.sort(scores, descending=True, stable=True).indices
    ranked = scores[order].double().numpy()
    if params.top_k:
        ranked[params.top_k :] = -np.inf
    mass = np.exp(ranked).cumsum()
    if params.top_p < 1.0:
        ranked[1:][mass[:-1] / mass[-1] >= params.top_p] = -np.inf
    if params.min_p:
        ranked[ranked < math.log(params.min_p)] = -np.inf
    noise = gumbel_noise(torch.tensor([[stream_key(params.seed, position)]]), order)[0].numpy()
    return int(order[(ranked + noise).argmax()])


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.3},
        {"top_p": 0.6},
        {"top_p": 0.9999},
        {"min_p": 1e-4},
        {"top_p": 0.95, "min_p": 0.05},
        {"top_k": 1000},
        {"top_k": 3000, "top_p": 0.9},
        {"top_k": 10**6},
    ],
)
def test_draws_are_those_of_a_full_sort(params):
    """Whether few tokens are kept or most, also where equal ones are at the end."""
    vocab = 20_000
    peaked, flat = logits_of(1, vocab, scale=3.0), logits_of(2, vocab, scale=0.01)
    tied = logits_of(3, vocab).round(decimals=1)
    masked = torch.where(torch.arange(vocab) % 7 == 0, peaked, -torch.inf)
    two_levels = torch.arange(vocab) % 2 * -0.001
    shapes = [peaked, flat, tied, two_levels, masked, logits_of(4, vocab, scale=8.0).bfloat16().float()]
    logits = torch.stack([shapes[seed % len(shapes)] for seed in range(48)])
    chosen = [SamplingParams(**params, seed=seed) for seed in range(len(logits))]
    tokens = [token.token_id for token in sample(logits, [row(sampling) for sampling in chosen])]
    assert tokens == [reference_draw(one, sampling) for one, sampling in zip(logits, chosen, strict=True)]
