"""Compiling beside the step loop, with the demo model's vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.demo_model import demo_model_path
from common.engine.config import GrammarConfig
from common.engine.grammar.base import CompiledGrammar
from common.engine.grammar.compiler import GrammarCache, GrammarCompiler, TokenizerSource
from common.engine.scheduler.grammars import GrammarAnswer
from common.engine.scheduler.request import Request
from common.errors import BatonError, InvalidRequestError
from common.types import Constraint
from tests.unit.common.engine.scheduler_factories import create_request

SOURCE = TokenizerSource(demo_model_path(), 2048, frozenset({0, 2}))
BOMB = Constraint.regex("(.{1,60000}x|.{1,50000}y|.{1,40000}z){4}")  # takes seconds
LARGE = Constraint.choice([f"{number:030d}" for number in range(3000)])  # takes megabytes
DEADLINE_S = 120.0


class Compiling:
    """A compiler and what it has answered."""

    def __init__(self, **settings: Any) -> None:
        self._noted = threading.Event()
        self.compiler = GrammarCompiler(GrammarConfig(**settings), SOURCE, self._noted.set)

    def ask(self, constraint: Constraint) -> Request:
        request = Request(
            create_request("a", structured_outputs=constraint), added_at=0.0, max_model_len=64, eos=frozenset()
        )
        assert self.compiler.ask(request) is None
        return request

    def answers(self) -> list[GrammarAnswer]:
        assert self._noted.wait(DEADLINE_S)
        self._noted.clear()
        return list(self.compiler.collect())

    def result(self, constraint: Constraint) -> CompiledGrammar | BatonError:
        self.ask(constraint)
        [answer] = self.answers()
        return answer.result


@pytest.fixture(scope="module")
def compiling() -> Iterator[Compiling]:
    compiling = Compiling(grammar_timeout_s=60)
    yield compiling
    compiling.compiler.close()


def test_equal_constraints_are_compiled_once(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_one = compiling.compiler._compile
    monkeypatch.setattr(compiling.compiler, "_compile", lambda each: compiled.append(each) or compile_one(each))
    requests = [compiling.ask(Constraint.regex("[0-9]{3}")) for _ in range(3)]
    answers = compiling.answers()
    assert [answer.request for answer in answers] == requests
    assert len({id(answer.result) for answer in answers}) == 1
    request = requests[0]
    assert compiling.compiler.ask(request) is answers[0].result
    assert compiled == [Constraint.regex("[0-9]{3}")]


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        (Constraint.regex("(a[b"), "position 5"),
        (Constraint.json_schema({"type": "strin"}), "strin"),
        (Constraint.json_schema({"$ref": "#/$defs/missing"}), "missing"),
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Constraint.grammar('root ::= "a" |\n other ::= ['), "line 2"),
        (Constraint.grammar("root ::= missing"), "missing"),
        (Constraint.structural_tag({"format": {"type": "no such type"}}), "no such type"),
        (Constraint.structural_tag({"structures": [{"begin": "x"}]}), "schema"),
        (Constraint.regex("(" * 20000 + "a" + ")" * 20000), ""),
    ],
)
def test_what_is_wrong_is_said(compiling: Compiling, constraint: Constraint, problem: str) -> None:
    result = compiling.result(constraint)
    assert isinstance(result, InvalidRequestError)
    assert result.param == "structured_outputs"
    assert problem in result.message
    assert "Check failed" not in result.message  # of the library's C++
    request = Request(create_request(structured_outputs=constraint), added_at=0.0, max_model_len=64, eos=frozenset())
    with pytest.raises(InvalidRequestError, match="cannot be constrained"):
        compiling.compiler.ask(request)  # known by now


@pytest.mark.parametrize(
    ("bomb", "limit"),
    [(BOMB, {"grammar_timeout_s": 0.05}), (LARGE, {"grammar_memory": 2**20, "grammar_timeout_s": 60})],
)
def test_a_bomb_is_put_out_and_the_next_one_is_compiled(bomb: Constraint, limit: dict[str, float]) -> None:
    compiling = Compiling(**limit)
    try:
        result = compiling.result(bomb)
        assert isinstance(result, InvalidRequestError)
        assert "to compile" in result.message
        assert not isinstance(compiling.result(Constraint.choice(["a", "b"])), BatonError)
    finally:
        compiling.compiler.close()


def test_requests_that_have_ended_get_no_answer(compiling: Compiling) -> None:
    request = compiling.ask(Constraint.regex("x{7}"))
    from common.engine.scheduler.request import RequestStatus

    request.status = RequestStatus.FINISHED
    assert compiling.answers() == []


def test_closing_ends_what_is_under_way() -> None:
    compiling = Compiling(grammar_timeout_s=60)
    compiling.ask(BOMB)
    compiling.compiler.close()
    compiling.compiler.close()


def test_a_model_without_a_tokenizer(tmp_path: Any) -> None:
    noted = threading.Event()
    source = TokenizerSource(tmp_path, 256, frozenset())
    compiler = GrammarCompiler(GrammarConfig(), source, noted.set)
    request = Request(create_request(structured_outputs=BOMB), added_at=0.0, max_model_len=64, eos=frozenset())
    assert compiler.ask(request) is None
    assert noted.wait(DEADLINE_S)
    [answer] = compiler.collect()
    assert isinstance(answer.result, InvalidRequestError)
    assert "tokenizer" in answer.result.message
    compiler.close()


class _Sized:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def test_the_cache_is_bounded_in_entries_and_bytes() -> None:
    cache = GrammarCache(max_entries=2, max_bytes=1000)
    first, second, third = (Constraint.regex(letter) for letter in "abc")
    cache.put(first, _Sized(100))  # type: ignore[arg-type]
    cache.put(second, _Sized(100))  # type: ignore[arg-type]
    assert cache.get(first) is not None  # used last from now on
    cache.put(third, _Sized(100))  # type: ignore[arg-type]
    assert (cache.get(second), len(cache)) == (None, 2)
    cache.put(second, _Sized(950))  # type: ignore[arg-type]
    assert len(cache) == 1
    cache.put(first, _Sized(2000))  # type: ignore[arg-type]
    assert (cache.get(first), cache.num_bytes <= 1000) == (None, True)
