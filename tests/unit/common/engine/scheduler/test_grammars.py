"""Requests with a constraint wait for their grammar beside the queue, and end where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from common.engine.contract.step import ModelRunnerOutput, NoToken
from common.engine.grammar.base import Grammar
from common.engine.messages import RequestStarted
from common.engine.scheduler.grammars import GrammarAnswer
from common.engine.scheduler.request import Request, RequestStatus
from common.errors import BatonError, ErrorCode, InvalidRequestError, OverloadedError
from common.types import Constraint, FinishReason, RequestId
from tests.unit.common.engine.scheduler_factories import (
    FakeEngine,
    create_request,
    create_scheduler,
    expected_output,
)

DIGITS = Constraint.regex("[0-9]+")
GRAMMAR = cast("Grammar", object())


class FakeGrammars:
    """Compiles when the test says so."""

    def __init__(self) -> None:
        self.known: dict[Constraint, Grammar | BatonError] = {}
        self.asked: list[Request] = []
        self.withdrawn: list[Request] = []
        self._answers: list[GrammarAnswer] = []

    def ask(self, request: Request) -> Grammar | None:
        self.asked.append(request)
        known = self.known.get(request.sampling.structured_outputs)  # type: ignore[arg-type]
        if isinstance(known, BatonError):
            raise known
        return known

    def withdraw(self, request: Request) -> None:
        self.withdrawn.append(request)

    def settle(self, result: Grammar | BatonError = GRAMMAR) -> None:
        self._answers += [GrammarAnswer(request, result) for request in self.asked if not request.is_finished]

    @property
    def has_events(self) -> bool:
        return bool(self._answers)

    def collect(self) -> Sequence[GrammarAnswer]:
        answers, self._answers = self._answers, []
        return answers


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


def engine_with(grammars: FakeGrammars, **settings: Any) -> FakeEngine:
    return FakeEngine(create_scheduler(grammars=grammars, **settings))


def status_of(engine: FakeEngine, request_id: str) -> RequestStatus:
    return engine.scheduler._places.live[RequestId(request_id)].status


def test_it_waits_beside_the_queue_and_others_pass(grammars: FakeGrammars) -> None:
    engine = engine_with(grammars)
    bound, free = create_request("bound", structured_outputs=DIGITS), create_request("free")
    engine.add(bound, free)
    engine.run()
    assert engine.finished == {"free": FinishReason.LENGTH}
    assert status_of(engine, "bound") is RequestStatus.WAITING_FOR_GRAMMAR
    assert engine.scheduler.stats().num_waiting == 1
    assert not engine.scheduler.has_work
    assert engine.scheduler.has_unfinished
    assert engine.scheduler.check_integrity().violations == []
    grammars.settle()
    assert engine.scheduler.has_work
    engine.run()
    assert engine.outputs["bound"] == expected_output(bound)[0]


def test_a_grammar_that_is_known_costs_no_wait(grammars: FakeGrammars) -> None:
    grammars.known[DIGITS] = GRAMMAR
    engine = engine_with(grammars)
    engine.add(create_request("a", structured_outputs=DIGITS), create_request("b"))
    step = engine.step()
    grammar_of = engine.scheduler.grammar_of
    assert {new.request_id: grammar_of(new.request_id) for new in step.new_requests} == {"a": GRAMMAR, "b": None}


def test_a_constraint_that_cannot_be_compiled_ends_its_request(grammars: FakeGrammars) -> None:
    engine = engine_with(grammars)
    engine.add(create_request("a", structured_outputs=DIGITS))
    engine.step()
    grammars.settle(InvalidRequestError("no", param="structured_outputs"))
    engine.run()
    assert engine.errors == {"a": (ErrorCode.INVALID_ARGUMENT.value.number, "no")}
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.check_integrity().violations == []


@pytest.mark.parametrize("error", [InvalidRequestError("no"), OverloadedError("full")])
def test_a_refusal_at_once_changes_nothing(grammars: FakeGrammars, error: BatonError) -> None:
    grammars.known[DIGITS] = error
    scheduler = create_scheduler(grammars=grammars)
    with pytest.raises(type(error)):
        scheduler.add_request(create_request("a", structured_outputs=DIGITS), 0.0)
    assert not scheduler.has_unfinished
    assert scheduler.check_integrity().violations == []


def test_an_engine_that_cannot_constrain_refuses(grammars: FakeGrammars) -> None:
    with pytest.raises(InvalidRequestError, match="cannot constrain"):
        create_scheduler().add_request(create_request("a", structured_outputs=DIGITS), 0.0)


def test_it_can_be_aborted_while_it_waits(grammars: FakeGrammars) -> None:
    engine = engine_with(grammars)
    engine.add(create_request("a", structured_outputs=DIGITS))
    engine.step()
    assert [output.finish_reason for output in engine.abort("a")] == [FinishReason.ABORT]
    grammars.settle()
    engine.run()
    assert engine.scheduler.check_integrity().num_requests == 0


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_handoff_begins_after_the_grammar(grammars: FakeGrammars, role: str) -> None:
    engine = engine_with(grammars)
    engine.add(create_request("a", structured_outputs=DIGITS, role=role))
    engine.step()
    assert engine.events["a"] == []
    grammars.settle()
    engine.step()
    assert any(isinstance(event, RequestStarted) for event in engine.events["a"])


def test_a_preempted_request_keeps_its_grammar(grammars: FakeGrammars) -> None:
    grammars.known[DIGITS] = GRAMMAR
    engine = engine_with(grammars, num_blocks=9)
    requests = [create_request(name, 10, structured_outputs=DIGITS, max_tokens=16) for name in ("a", "b")]
    engine.add(*requests)
    introduced = []
    while engine.scheduler.has_unfinished:
        introduced += [
            (new.request_id, engine.scheduler.grammar_of(new.request_id)) for new in engine.step().new_requests
        ]
    assert engine.scheduler.stats().num_preemptions
    assert len(introduced) > 2
    assert {grammar for _, grammar in introduced} == {GRAMMAR}
    assert len(grammars.asked) == 2
    assert all(engine.outputs[request.request_id] == expected_output(request)[0] for request in requests)


@pytest.mark.parametrize(
    ("dead_end", "num_before", "reason"),
    [
        (NoToken.COMPLETE, 1, FinishReason.COMPLETE),
        (NoToken.COMPLETE, 0, FinishReason.ERROR),
        (NoToken.MISMATCH, 1, FinishReason.ERROR),
        (NoToken.CONTRADICTION, 1, FinishReason.ERROR),
    ],
)
def test_where_the_grammar_allows_nothing_the_request_ends(
    grammars: FakeGrammars, dead_end: NoToken, num_before: int, reason: FinishReason
) -> None:
    grammars.known[DIGITS] = GRAMMAR
    scheduler = create_scheduler(grammars=grammars)
    scheduler.add_request(create_request("a", structured_outputs=DIGITS, output=[5] * num_before), 0.0)
    step = scheduler.schedule(0.0)
    result = ModelRunnerOutput({RequestId("a"): dead_end})
    [output] = scheduler.update(step, result, 0.01)
    assert (output.finish_reason, output.tokens) == (reason, [])
    assert bool(output.error) == (reason is FinishReason.ERROR)
    assert not scheduler.has_unfinished
    assert scheduler.check_integrity().violations == []


def test_a_late_mask_costs_its_request_a_step_and_no_other() -> None:
    engine = FakeEngine()
    late, other = create_request("late", 5, max_tokens=3), create_request("other", 6, max_tokens=3)
    engine.add(late, other)
    engine.late.add("late")
    engine.step()
    assert (len(engine.outputs["late"]), len(engine.outputs["other"])) == (0, 1)
    step = engine.step()
    assert step.num_scheduled_tokens == {"late": 1, "other": 1}  # its last token is computed again
    engine.run()
    for request in (late, other):
        assert engine.outputs[request.request_id] == expected_output(request)[0]
    assert engine.scheduler.stats().num_late_masks == 1
    engine.assert_idle()


def test_a_grammar_that_is_too_slow_is_counted(grammars: FakeGrammars) -> None:
    grammars.known[DIGITS] = GRAMMAR
    engine = engine_with(grammars)
    request = create_request("a", structured_outputs=DIGITS)
    engine.add(request)
    step = engine.scheduler.schedule(0.0)
    result = ModelRunnerOutput({RequestId("a"): NoToken.TOO_SLOW})
    [output] = engine.scheduler.update(step, result, 0.01)[-1:]
    assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, ErrorCode.GRAMMAR_TOO_SLOW.value.number)
    assert engine.scheduler.stats().num_slow_grammars == 1
    assert [each.request_id for each in grammars.withdrawn] == ["a"]
