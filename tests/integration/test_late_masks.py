"""A grammar whose process stops, dies or takes long costs other requests nothing, and its own no token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from common.demo_model import demo_model_path
from common.engine.client.inproc import InprocClient
from common.engine.grammar import processes
from common.engine.grammar.vocabulary import load_vocabulary
from common.engine.llm import LLM
from common.engine.messages import AddRequest, RequestOutput
from common.errors import ErrorCode
from common.types import Constraint, FinishReason, RequestId, SamplingParams
from tests.architectures.models import write_model

DEADLINE_S = 120.0
FREE, BOUND = RequestId("free"), RequestId("bound")
WORDS = Constraint.regex("([a-z]{2,9} ){60}")


@pytest.fixture(scope="module", params=["demo", "qwen3_next"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InprocClient]:
    """The demo model, and one with a state, which goes back to before a token that is computed again."""
    directory = demo_model_path()
    if request.param != "demo":
        directory = tmp_path_factory.mktemp(request.param)
        write_model(request.param, directory)
    with LLM(directory, num_threads=1, max_num_seqs=8, grammar_timeout_s=0.5, num_blocks=4096) as llm:
        yield llm._client
        assert llm._client.check_integrity().violations == []


def request(request_id: RequestId, constraint: Constraint | None = None, **sampling: object) -> AddRequest:
    defaults = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 3, "structured_outputs": constraint}
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(range(5, 40)),
        sampling=SamplingParams(**{**defaults, **sampling}),  # type: ignore[arg-type]
    )


def run(client: InprocClient, *requests: AddRequest, disturb: Callable[[int], None] = lambda step: None):
    """Tokens of each request by step, and last outputs."""
    tokens: dict[RequestId, list[int]] = {each.request_id: [] for each in requests}
    steps: dict[RequestId, list[int]] = {each.request_id: [] for each in requests}
    last: dict[RequestId, RequestOutput] = {}
    for each in requests:
        client.add_request(each)
    step, deadline = 0, time.monotonic() + DEADLINE_S
    while client.has_unfinished:
        assert time.monotonic() < deadline
        if not client.has_work:
            time.sleep(0.001)  # a grammar is being compiled
            continue
        for output in client.step().outputs:
            tokens[output.request_id] += [token.token_id for token in output.tokens]
            steps[output.request_id] += [step] * len(output.tokens)
            last[output.request_id] = output
        step += 1
        disturb(step)
    return tokens, steps, last


def pids(client: InprocClient) -> list[int]:
    grammars = client._core._grammars
    assert grammars is not None
    return [kept.process.pid for kept in grammars._processes._kept.values()]


def test_a_stopped_process_changes_no_token(client: InprocClient) -> None:
    expected, _, _ = run(client, request(FREE), request(BOUND, WORDS))
    stopped_at, stopped = 12, list[int]()

    def disturb(step: int) -> None:
        if step == stopped_at:
            stopped.extend(pids(client))
        for pid in stopped if step in (stopped_at, stopped_at + 20) else ():
            os.kill(pid, signal.SIGSTOP if step == stopped_at else signal.SIGCONT)

    late = client.stats().num_late_masks
    tokens, steps, _ = run(client, request(FREE), request(BOUND, WORDS), disturb=disturb)
    assert tokens == expected
    free = steps[FREE]
    assert free == list(range(free[0], free[0] + 60))  # one with each step
    assert not set(steps[BOUND]) & set(range(stopped_at + 1, stopped_at + 19))
    assert client.stats().num_late_masks > late  # and steps go on without it


def test_a_killed_process_changes_no_token(client: InprocClient) -> None:
    expected, _, _ = run(client, request(FREE), request(BOUND, WORDS))

    def disturb(step: int) -> None:
        for pid in pids(client) if step == 9 else ():
            os.kill(pid, signal.SIGKILL)

    tokens, _, _ = run(client, request(FREE), request(BOUND, WORDS), disturb=disturb)
    assert tokens == expected


def test_a_grammar_that_is_too_slow_ends_alone(client: InprocClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows itself after some tokens only, behind a prefix that no trial finds."""
    monkeypatch.setattr(processes, "_LATE_NICENESS", 0)  # else its process's time comes late on a busy machine
    bomb = Constraint.grammar('root ::= ("qj"){40} "x" (("a"? "a"?){1,40}){1,40} "z" | "w"')
    tokens_of_model = load_vocabulary(demo_model_path(), 2048, frozenset({0, 2})).token_bytes
    biases = {tokens_of_model.index(letter): 100.0 for letter in (b"q", b"j", b"x", b"a")}
    bound = request(BOUND, bomb, max_tokens=1000, min_tokens=900, logit_bias=biases)
    free = request(FREE, max_tokens=900)
    slow = client.stats().num_slow_grammars
    tokens, steps, last = run(client, free, bound)
    assert (last[BOUND].finish_reason, last[BOUND].error_code) == (
        FinishReason.ERROR,
        ErrorCode.GRAMMAR_TOO_SLOW.value.number,
    )
    assert client.stats().num_slow_grammars == slow + 1
    assert len(tokens[FREE]) == 900
    assert steps[FREE] == list(range(steps[FREE][0], steps[FREE][0] + 900))
