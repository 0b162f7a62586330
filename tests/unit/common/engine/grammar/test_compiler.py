"""Compiling beside the step loop, with the demo model's vocabulary."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from common.demo_model import demo_model_path
from common.engine.config import GrammarConfig
from common.engine.grammar.base import Grammar, GrammarKey, ProcessSource
from common.engine.grammar.cache import Kept, ProblemCache, ProcessCache
from common.engine.grammar.compile_queue import MAX_PENDING, CompileQueue
from common.engine.grammar.compiler import GrammarCompiler, TokenizerSource
from common.engine.grammar.processes import GrammarProcess
from common.engine.grammar.protocol import Masks
from common.engine.grammar.vocabulary import load_vocabulary
from common.engine.scheduler.grammars import GrammarAnswer
from common.engine.scheduler.request import Request
from common.errors import BatonError, GrammarTooSlowError, InvalidRequestError, OverloadedError
from common.types import Constraint
from tests.unit.common.engine.scheduler_factories import create_request

SOURCE = TokenizerSource(demo_model_path(), 2048, frozenset({0, 2}))
BOMB = Constraint.regex("(.{1,60000}x|.{1,50000}y|.{1,40000}z){4}")  # takes seconds
LARGE = Constraint.choice([f"{number:030d}" for number in range(3000)])  # takes megabytes
DEADLINE_S = 120.0
TOKEN_A = load_vocabulary(SOURCE.directory, SOURCE.vocab_size, SOURCE.eos_token_ids).token_bytes.index(b"a")
NOWHERE = cast("ProcessSource", None)


class Compiling:
    """A compiler and what it has answered."""

    def __init__(self, source: TokenizerSource = SOURCE, **settings: Any) -> None:
        self._noted = threading.Event()
        self.failures: list[Exception] = []
        self.compiler = GrammarCompiler(GrammarConfig(**settings), source, self._noted.set, self.failures.append)

    def ask(self, constraint: Constraint, tenant: str = "") -> Request:
        request = new_request(constraint, tenant)
        assert self.compiler.ask(request) is None
        return request

    def answers(self) -> list[GrammarAnswer]:
        """The next ones."""
        while not (answers := list(self.compiler.collect())):
            assert self._noted.wait(DEADLINE_S)
            self._noted.clear()
        return answers

    def result(self, constraint: Constraint, tenant: str = "") -> Grammar | BatonError:
        self.ask(constraint, tenant)
        [answer] = self.answers()
        return answer.result

    def process(self, grammar: Grammar) -> GrammarProcess:
        """The grammar's process, which may have to be started again."""
        deadline = time.monotonic() + DEADLINE_S
        while (process := grammar.process()) is None:
            assert time.monotonic() < deadline
            self._noted.wait(0.1)
            self._noted.clear()
        return process


def new_request(constraint: Constraint, tenant: str = "") -> Request:
    message = msgspec.structs.replace(create_request(structured_outputs=constraint), tenant=tenant)
    return Request(message, added_at=0.0, max_model_len=64, eos=frozenset())


def states(process: GrammarProcess) -> list[str]:
    """States of the matchers whose masks come next."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answers := process.receive()) and not process.is_gone:
        assert time.monotonic() < deadline
        select.select([process], [], [], 1.0)
    return [state for masks in answers for _, _, state, _ in process.take(cast("Masks", masks))]


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def compiling() -> Iterator[Compiling]:
    compiling = Compiling(grammar_timeout_s=60)
    yield compiling
    compiling.compiler.close()
    assert not compiling.failures


def test_equal_constraints_are_compiled_once(compiling: Compiling) -> None:
    constraint = Constraint.regex("[0-9]{3}")
    requests = [compiling.ask(constraint) for _ in range(3)]
    answers = compiling.answers()
    assert [answer.request for answer in answers] == requests
    grammars = [answer.result for answer in answers]
    known = compiling.compiler.ask(requests[0])
    assert known is not None
    processes = {compiling.process(cast("Grammar", grammar)).pid for grammar in [*grammars, known]}
    assert len(processes) == 1
    for grammar in [*grammars, known]:
        cast("Grammar", grammar).release()


def test_tenants_share_no_process(compiling: Compiling) -> None:
    """One would slow down or end the other's matchers, and learn by timing which grammars the other uses."""
    constraint = Constraint.regex("[0-9]{4}")
    grammars = [cast("Grammar", compiling.result(constraint, tenant)) for tenant in "ab"]  # neither is known
    assert len({compiling.process(grammar).pid for grammar in grammars}) == 2
    for grammar in grammars:
        grammar.release()
        known = compiling.compiler.ask(new_request(constraint, grammar.tenant))
        assert known is not None


def test_tenants_share_no_problem(compiling: Compiling) -> None:
    for tenant in "ab":
        assert isinstance(compiling.result(Constraint.regex("(a[c"), tenant), InvalidRequestError)


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
    with pytest.raises(InvalidRequestError, match="cannot be constrained"):
        compiling.compiler.ask(new_request(constraint))  # known by now


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


def test_a_grammar_whose_states_grow_is_refused_before_its_request_is_admitted() -> None:
    compiling = Compiling(grammar_timeout_s=60)
    result = compiling.result(Constraint.grammar('root ::= (("a"? "a"?){1,40}){1,40} "z"'))
    assert isinstance(result, GrammarTooSlowError)
    assert result.param == "structured_outputs"
    assert "too much time or memory" in result.message
    compiling.compiler.close()


def test_bounds_of_a_library_are_named(compiling: Compiling) -> None:
    names = {f"p{number}": {"type": "string", "maxLength": 400} for number in range(900)}
    result = compiling.result(Constraint.json_schema({"type": "object", "properties": names}))
    assert isinstance(result, GrammarTooSlowError)
    assert "max is 2000" in result.message


def test_a_request_that_has_ended_gets_no_answer_and_ends_the_compiling() -> None:
    compiling = Compiling(grammar_timeout_s=60)
    waits, runs = [compiling.ask(Constraint.regex(f"({'a?' * 300}){{{n}}}z")) for n in (299, 300)]
    other = compiling.ask(Constraint.choice(["x"]))
    compiling.compiler.withdraw(runs)
    compiling.compiler.withdraw(waits)
    assert [answer.request for answer in compiling.answers()] == [other]
    compiling.compiler.close()


def test_tenants_take_turns_and_a_place_is_kept_for_others() -> None:
    queue = CompileQueue(max_per_tenant=2)
    grammars = [Grammar(Constraint.regex(f"{n}"), tenant, NOWHERE) for n, tenant in enumerate("aaaabc")]
    for grammar in grammars:
        queue.add(grammar)
    first, second, third = (queue.next() for _ in range(3))
    assert queue.next() is None
    assert first is not None
    assert second is not None
    assert third is not None
    assert [job.tenant for job in (first, second, third)] == ["a", "b", "c"]
    queue.settle(second)
    fourth = queue.next()
    assert fourth is not None
    assert fourth.tenant == "a"
    queue.settle(third)
    assert queue.next() is None  # two of a run
    assert queue.settle(first) == [grammars[0]]
    queue.remove(grammars[2])
    last = queue.next()
    assert last is not None
    assert list(last.waiting) == [grammars[3]]
    assert len(queue) == 2


def test_a_tenant_has_a_share_of_the_queue() -> None:
    queue = CompileQueue(max_per_tenant=2)
    for n in range(MAX_PENDING):
        queue.add(Grammar(Constraint.regex(f"{n}"), "a", NOWHERE))
    with pytest.raises(OverloadedError, match="this tenant"):
        queue.add(Grammar(Constraint.regex("x"), "a", NOWHERE))
    queue.add(Grammar(Constraint.regex("1"), "a", NOWHERE))  # shares a job
    queue.add(Grammar(Constraint.regex("x"), "b", NOWHERE))


def test_a_small_grammar_is_compiled_beside_slow_ones_of_another_tenant() -> None:
    compiling = Compiling(grammar_timeout_s=60)
    slow = [compiling.ask(Constraint.regex(f"(.{{1,{50_000 + n}}}x){{9}}"), "slow") for n in range(8)]
    small = compiling.ask(Constraint.regex("[a-z]+"), "small")
    assert [answer.request for answer in compiling.answers()] == [small]
    assert all(not request.is_finished for request in slow)
    compiling.compiler.close()


def test_a_process_that_is_gone_is_started_again(compiling: Compiling) -> None:
    grammar = compiling.result(Constraint.choice(["abc"]))
    assert isinstance(grammar, Grammar)
    process = compiling.process(grammar)
    os.kill(process.pid, signal.SIGKILL)
    process.open(1, [], 1.0)
    process.flush()
    assert states(process) == []
    assert process.is_gone
    grammar.release()
    assert compiling.process(grammar).pid != process.pid
    grammar.release()
    wait_until_gone(process.pid)


def test_an_idle_process_that_others_kill_is_reaped(compiling: Compiling) -> None:
    grammar = compiling.result(Constraint.choice(["abcd"]))
    assert isinstance(grammar, Grammar)
    process = compiling.process(grammar)
    grammar.release()
    os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(process.pid)
    assert compiling.process(grammar).pid != process.pid
    grammar.release()


def test_a_matcher_that_takes_too_long_ends(compiling: Compiling) -> None:
    """By its CPU time: a share of none, and little beyond it."""
    slow = Compiling(grammar_timeout_s=0.3)
    grammar = slow.result(Constraint.regex("((a|aa|aaa|a?a?a?)*)*z"))
    assert isinstance(grammar, Grammar)
    process = slow.process(grammar)
    process.open(7, [], 0.0)
    process.flush()
    seen: list[str] = []
    while not process.is_gone and "too_slow" not in seen:
        seen += states(process)
        process.accept([(7, [TOKEN_A])], 0.0)
        process.flush()
    assert set(seen) <= {"following", "too_slow"}
    slow.compiler.close()
    assert not slow.failures


def test_a_grammar_is_dropped_when_others_were_used_later(compiling: Compiling) -> None:
    small = Compiling(grammar_cache_entries=2)
    grammars = [small.result(Constraint.regex(letter)) for letter in "abc"]
    first, second, third = (cast("Grammar", grammar) for grammar in grammars)
    assert small.compiler.ask(new_request(first.constraint)) is None  # compiled again
    assert small.answers()
    assert small.compiler.ask(new_request(third.constraint)) is not None
    assert small.compiler.ask(new_request(second.constraint)) is None
    small.compiler.close()


def test_closing_ends_what_is_under_way() -> None:
    compiling = Compiling(grammar_timeout_s=60)
    compiling.ask(BOMB)
    compiling.compiler.close()
    compiling.compiler.close()


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    compiling = Compiling(TokenizerSource(tmp_path, 256, frozenset()))
    result = compiling.result(BOMB)
    assert isinstance(result, InvalidRequestError)
    assert "tokenizer" in result.message
    compiling.compiler.close()


def test_refused_constraints_are_kept_within_bounds() -> None:
    cache = ProblemCache(max_entries=2, max_bytes=3000)
    first, second, third = (GrammarKey("", Constraint.regex(letter)) for letter in "abc")
    problem = InvalidRequestError("no")
    cache.put(first, problem)
    cache.put(second, problem)
    assert cache.get(first) is problem  # used last from now on
    cache.put(third, problem)
    assert (cache.get(second), len(cache)) == (None, 2)
    cache.put(GrammarKey("", Constraint.regex("x" * 1500)), problem)
    assert cache.num_bytes <= 3000
    assert len(cache) == 1


@dataclass(eq=False)
class FakeProcess:
    resident_bytes: int
    is_gone: bool = False
    is_late: bool = False


class Cache:
    """A cache of fake processes."""

    def __init__(self, **bounds: int) -> None:
        self.processes = ProcessCache(**{"max_entries": 9, "max_bytes": 1000, "max_used_bytes": 100} | bounds)

    def put(self, name: str, num_bytes: int, *, is_used: bool = True) -> tuple[Grammar, FakeProcess]:
        """Adds a process of the tenant with which `name` begins, which shares 50 bytes with others."""
        grammar, process = Grammar(Constraint.regex(name), name[0], NOWHERE), FakeProcess(num_bytes + 50)
        users = {grammar} if is_used else set()
        self.ended(self.processes.put(grammar.key, Kept(cast("GrammarProcess", process), num_bytes, users)))
        return grammar, process

    def ended(self, processes: list[GrammarProcess]) -> None:
        for process in processes:
            process.is_gone = True


def test_a_tenant_uses_as_much_memory_as_it_leaves_to_others() -> None:
    cache = Cache()
    first, _ = cache.put("a1", 30)
    assert cache.processes.full_tenants() == set()
    cache.put("a2", 20)
    assert cache.processes.full_tenants() == {"a"}
    cache.put("b1", 10)
    assert cache.processes.full_tenants() == {"a"}
    cache.put("b2", 10)
    cache.put("c1", 5)
    assert cache.processes.full_tenants() == {"a"}
    cache.put("b3", 10)
    assert cache.processes.full_tenants() == {"a", "b"}
    cache.processes.release(first)
    assert cache.processes.full_tenants() == set()
    assert cache.processes.excess() == []


def test_what_outgrows_the_memory_for_all_is_the_largest_of_the_tenant_that_holds_most() -> None:
    cache = Cache()
    (_, grows), (_, small), (_, other) = (cache.put(name, 20) for name in ("a1", "a2", "b1"))
    cache.put("c1", 90, is_used=False)
    assert cache.processes.excess() == []
    grows.resident_bytes, other.resident_bytes = 50 + 45, 50 + 40
    for kept in cache.processes.all():
        kept.measure()
    assert cache.processes.excess() == [grows]
    small.resident_bytes = 50 + 200
    for kept in cache.processes.all():
        kept.measure()
    assert cache.processes.excess() == [small]


def test_processes_in_use_take_no_place_of_those_that_are_kept() -> None:
    cache = Cache(max_entries=2, max_bytes=20)
    kept = [cache.put(name, 10, is_used=False)[1] for name in ("a1", "a2")]
    used = [cache.put(name, 20)[1] for name in ("b1", "b2", "b3")]
    assert not any(process.is_gone for process in kept + used)
    cache.put("b4", 10, is_used=False)
    assert [process.is_gone for process in kept + used] == [True] + [False] * 4


def test_a_full_tenant_waits() -> None:
    queue = CompileQueue(max_per_tenant=2)
    for tenant in "aab":
        queue.add(Grammar(Constraint.regex("x"), tenant, NOWHERE))
    jobs = [queue.next({"a"}) for _ in range(2)]
    assert [job and job.tenant for job in jobs] == ["b", None]
    job = queue.next()
    assert job is not None
    assert job.tenant == "a"


def test_grammars_wait_while_their_tenant_has_much_memory_in_use(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Kept.measure
    known = compiling.result(Constraint.regex("[a-z]{7}"))
    assert isinstance(known, Grammar)
    kept = compiling.compiler._processes.find(known.key)
    assert kept is not None
    small = Compiling(grammar_used_bytes=kept.num_bytes * 3 // 2)
    first = cast("Grammar", small.result(known.constraint))
    process = small.process(first)
    waits = small.ask(Constraint.regex("[a-z]{8}"))
    other = small.ask(Constraint.regex("[a-z]{8}"), "other")
    assert [answer.request for answer in small.answers()] == [other]
    measured = threading.Event()
    monkeypatch.setattr(Kept, "measure", lambda kept: (measure(kept), measured.set()))
    for _ in range(2):  # what the first has led to is done by the second
        measured.clear()
        assert measured.wait(DEADLINE_S)
    assert not small.compiler.has_events
    assert not process.receive()
    assert not process.is_gone
    first.release()
    assert [answer.request for answer in small.answers()] == [waits]
    small.compiler.close()
    assert not small.failures


def test_a_process_that_outgrows_the_memory_for_all_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    small = Compiling(grammar_used_bytes=2**20)
    grammar = cast("Grammar", small.result(LARGE))
    process = small.process(grammar)
    assert states(process) == []
    assert process.is_gone
    assert process.has_outgrown
    assert "grammar_used_bytes" in caplog.text
    small.compiler.close()
    assert not small.failures


def test_grammars_outlive_no_fork_server_and_another_one_takes_over() -> None:
    compiling = Compiling(grammar_cache_entries=2)
    grammars = [compiling.result(Constraint.regex(letter)) for letter in "ab"]
    first = cast("Grammar", grammars[0])
    process = compiling.process(first)
    server = compiling.compiler._server._process
    assert server is not None
    server.kill()
    process.open(1, [], 1.0)
    process.flush()
    while not process.is_gone:  # it may have answered before
        states(process)
    first.release()
    servers = set()
    for number in range(5):  # evicts what the first server had started
        assert isinstance(compiling.result(Constraint.regex(f"x{number}")), Grammar)
        servers.add(compiling.compiler._server._process)
    assert len(servers) == 1
    assert compiling.process(first).pid != process.pid
    compiling.compiler.close()
    assert not compiling.failures


def test_closing_does_not_wait_for_a_fork_server_that_is_stopped() -> None:
    compiling = Compiling()
    grammar = compiling.result(Constraint.regex("a"))
    process = compiling.process(cast("Grammar", grammar))
    server = compiling.compiler._server._process
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)
    compiling.ask(Constraint.regex("b"))
    compiling.compiler.close()
    assert server.poll() is not None
    wait_until_gone(process.pid)


def test_a_process_that_others_kill_is_not_its_constraints_fault() -> None:
    compiling = Compiling(grammar_timeout_s=60)
    constraint = Constraint.regex(f"({'a?' * 300}){{300}}z")
    compiling.ask(constraint)
    deadline = time.monotonic() + DEADLINE_S
    while not compiling.compiler._compiling:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    [process] = compiling.compiler._compiling
    os.kill(process.pid, signal.SIGKILL)
    [answer] = compiling.answers()
    assert isinstance(answer.result, OverloadedError)
    assert compiling.compiler.ask(new_request(constraint)) is None  # it is tried again
    compiling.compiler.close()
