"""Steps that are scheduled before the outcome of the one that runs is known."""

import pytest

from common.types import FinishReason, SamplingParams
from tests.unit.common.engine.scheduler_factories import FakeEngine, create_request, create_scheduler, expected_output


def run_ahead(*requests, **settings):
    engine = FakeEngine(create_scheduler(**settings), runs_ahead=True)
    engine.add(*requests)
    engine.run()
    engine.assert_idle()
    return engine


def test_answers_are_the_same():
    requests = [create_request(f"r{i}", 3 + i, max_tokens=4 + 2 * i) for i in range(4)]
    engine = run_ahead(*requests)
    assert engine.outputs == {request.request_id: expected_output(request)[0] for request in requests}
    assert engine.num_ahead > 8


def test_a_request_that_ends_early_leaves_nothing_behind():
    stopped = create_request("stopped", 5, max_tokens=30)
    at = expected_output(stopped)[0][6]
    stopped = create_request("stopped", 5, max_tokens=30, stop_token_ids=(at,))
    other = create_request("other", 7, max_tokens=20)
    engine = run_ahead(stopped, other)
    assert engine.finished["stopped"] is FinishReason.STOP
    assert engine.outputs["stopped"] == expected_output(stopped)[0]
    assert engine.outputs["other"] == expected_output(other)[0]


def test_an_abort_while_the_next_step_runs_already():
    engine = FakeEngine(create_scheduler(), runs_ahead=True)
    engine.add(create_request("a", 5, max_tokens=30), create_request("b", 6, max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.add(create_request("a", 9, max_tokens=3))  # another of the same id
    engine.run()
    engine.assert_idle()
    assert engine.outputs["a"] == expected_output(create_request("a", 9, max_tokens=3))[0]
    assert engine.outputs["b"] == expected_output(create_request("b", 6, max_tokens=12))[0]


def test_an_arrival_is_not_kept_waiting():
    engine = FakeEngine(create_scheduler(), runs_ahead=True)
    engine.add(create_request("a", 5, max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.add(create_request("b", 5, max_tokens=2))
    assert "b" not in engine.step().num_scheduled_tokens  # that one runs already
    assert "b" in engine.step().num_scheduled_tokens


def test_one_without_finite_logits_fails_alone():
    engine = FakeEngine(create_scheduler(), runs_ahead=True)
    engine.add(create_request("bad", 5, max_tokens=30), create_request("good", 6, max_tokens=9))
    for _ in range(3):
        engine.step()
    engine.broken.add("bad")
    engine.run()
    engine.assert_idle()
    assert engine.finished["bad"] is FinishReason.ERROR
    assert engine.outputs["good"] == expected_output(create_request("good", 6, max_tokens=9))[0]


def test_full_blocks_are_not_run_into():
    """With too few blocks for one more token each, the step waits for the outcome, and then preempts."""
    requests = [create_request(f"r{i}", 4, max_tokens=12) for i in range(3)]
    engine = run_ahead(*requests, num_blocks=8, max_model_len=24)
    assert engine.outputs == {request.request_id: expected_output(request)[0] for request in requests}
    assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"num_logprobs": 1},
        {"repetition_penalty": 1.2},
        {"min_tokens": 2},
        {"bad_word_token_ids": ((3, 4),)},
        {"logit_bias": {5: 1.0}},
    ],
    ids=str,
)
def test_what_depends_on_tokens_before_waits_for_them(sampling):
    request = create_request("a", 5, max_tokens=8)
    assert SamplingParams(max_tokens=8).is_simple
    engine = FakeEngine(create_scheduler(), runs_ahead=True)
    engine.add(create_request("a", 5, max_tokens=8, **sampling))
    engine.run()
    assert engine.num_ahead == 0
    assert len(engine.outputs["a"]) == len(expected_output(request)[0])
