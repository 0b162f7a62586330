"""What the router learns of the pods' speed."""

from __future__ import annotations

import math
import random

import pytest

from common.step_times import StepTimes


def learn(times, base_s, token_s, lengths, count=100, seed=1, noise=0.05, hiccups=0.0):
    choices = random.Random(seed)
    for _ in range(count):
        tokens = choices.choice(lengths)
        seconds = (base_s + tokens * token_s) * choices.uniform(1 - noise, 1 + noise)
        times.observe(seconds * (30 if choices.random() < hiccups else 1), tokens)


@pytest.mark.parametrize(("base_s", "token_s"), [(0.005, 4e-5), (0.0005, 2e-6), (1.0, 0.02), (0.001, 1e-4)])
@pytest.mark.parametrize("lengths", [(1, 8, 2048), (2048, 1024), (16, 48, 64)])
def test_steps_are_foretold_whatever_the_hardware(base_s, token_s, lengths):
    times = StepTimes(2048)
    learn(times, base_s, token_s, lengths)
    for tokens in lengths:
        assert times.predict(tokens) == pytest.approx(base_s + tokens * token_s, rel=0.1)
    assert times.line.base_s >= 0
    assert times.line.token_s > 0


def test_what_reading_kv_costs_is_told_from_what_computing_tokens_costs():
    times, choices = StepTimes(2048), random.Random(4)
    for _ in range(400):
        tokens, context = choices.choice((1, 16, 64, 2048)), choices.uniform(0, 400_000)
        times.observe((0.008 + tokens * 4e-5 + context * 5e-8) * choices.uniform(0.95, 1.05), tokens, context)
    for tokens, context in ((1, 0), (64, 0), (64, 400_000), (2048, 100_000)):
        assert times.predict(tokens, context) == pytest.approx(0.008 + tokens * 4e-5 + context * 5e-8, rel=0.1)


def test_steps_of_one_length_leave_the_shape_to_the_prior():
    times = StepTimes(2048)
    learn(times, 0.03, 3e-4, (2048,))
    assert times.predict(1) == pytest.approx(0.03, rel=0.15)


def test_measured_steps_take_the_place_of_the_prior():
    base_s, token_s = 0.02, 1.5e-3
    times = StepTimes.measured(2048, [(tokens, base_s + tokens * token_s) for tokens in (1, 64, 128, 256)])
    assert times.is_known
    assert times.predict(1) == pytest.approx(base_s, rel=0.15)
    assert times.predict(2048) == pytest.approx(2048 * token_s, rel=0.05)
    learn(times, 1.3 * base_s, 1.3 * token_s, (512,), count=500)
    assert times.predict(1) == pytest.approx(1.3 * base_s, rel=0.15), "steps of one length keep the measured shape"
    assert not StepTimes.measured(2048, []).is_known


def test_steps_that_cannot_be_are_passed_over():
    times = StepTimes(2048)
    before = times.predict(100)
    impossible = [
        (0, 5),
        (5, 0),
        (-1, 5),
        (math.nan, 5),
        (1, math.nan),
        (math.inf, 5),
        (1, math.inf),
        (5e-324, 5),
        (1e300, 5),
        (1, 2**32),
    ]
    for seconds, tokens in impossible:
        times.observe(seconds, tokens)
    assert times.predict(100) == before


def test_hiccups_change_little_and_a_lasting_change_gets_through():
    times = StepTimes(2048)
    learn(times, 0.01, 1e-4, (1, 2048), count=300, hiccups=0.03)
    assert times.predict(2048) == pytest.approx(0.21, rel=0.25)
    learn(times, 0.05, 5e-4, (1, 2048), count=500)
    assert times.predict(2048) == pytest.approx(1.07, rel=0.1)


def test_nonsense_does_no_lasting_harm():
    times = StepTimes(2048)
    learn(times, 0.01, 1e-4, (1, 2048))
    times.observe(1e-12, 2048)
    times.observe(1e12, 1)
    assert times.predict(2048) == pytest.approx(0.21, rel=0.2)
