"""Engines that step together."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from common.engine.config import CacheConfig, DataParallelMember, EngineConfig, ParallelConfig
from common.engine.executor.fake import FakeExecutor, expected_tokens
from common.engine.lockstep import Lockstep
from common.engine.loop import EngineLoop
from common.engine.messages import AbortRequests, AddRequest, Call, CallResult, EngineCoreOutputs, EngineReply
from common.errors import EngineDeadError
from common.types import FinishReason, RequestId, SamplingParams

TIMEOUT_S = 60.0


class Engine:
    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float = TIMEOUT_S) -> None:
        self.sockets = sockets
        self.awaited: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.lockstep = Lockstep(rank, sockets, timeout_s, lambda: self.awaited.put(True), self.failures.put)

    def begin(self, num_tokens: int) -> queue.SimpleQueue[list[int] | Exception]:
        """Joins a step on a thread."""
        outcome: queue.SimpleQueue[list[int] | Exception] = queue.SimpleQueue()

        def join() -> None:
            try:
                outcome.put(self.lockstep.join(num_tokens))
            except EngineDeadError as error:
                outcome.put(error)

        threading.Thread(target=join, daemon=True).start()
        return outcome


def sockets_of(num_engines: int) -> list[dict[int, socket.socket]]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_engines)]
    for one in range(num_engines):
        for other in range(one):
            sockets[one][other], sockets[other][one] = socket.socketpair(type=socket.SOCK_SEQPACKET)
    return sockets


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    engines = [Engine(rank, sockets) for rank, sockets in enumerate(sockets_of(3))]
    yield engines
    for engine in engines:
        engine.lockstep.close()


def test_all_learn_the_tokens_of_all(engines: list[Engine]) -> None:
    for step in range(50):
        outcomes = [engine.begin(10 * step + rank) for rank, engine in enumerate(engines)]
        for outcome in outcomes:
            assert outcome.get(timeout=TIMEOUT_S) == [10 * step, 10 * step + 1, 10 * step + 2]


def test_an_idle_engine_is_woken_and_joins(engines: list[Engine]) -> None:
    assert not any(engine.lockstep.is_awaited for engine in engines)
    first = engines[0].begin(7)
    for engine in engines[1:]:
        assert engine.awaited.get(timeout=TIMEOUT_S)
        assert engine.lockstep.is_awaited
    assert first.empty()
    others = [engine.begin(0) for engine in engines[1:]]
    for outcome in (first, *others):
        assert outcome.get(timeout=TIMEOUT_S) == [7, 0, 0]
    assert not any(engine.lockstep.is_awaited for engine in engines)


def test_an_engine_that_is_gone_ends_a_wait(engines: list[Engine]) -> None:
    waiting = engines[0].begin(1)
    assert engines[1].awaited.get(timeout=TIMEOUT_S)
    engines[2].sockets[0].shutdown(socket.SHUT_RDWR)
    error = waiting.get(timeout=TIMEOUT_S)
    assert isinstance(error, EngineDeadError)
    assert error.message == "engine 2 is gone"
    assert "engine 2 is gone" in str(engines[0].failures.get(timeout=TIMEOUT_S))


def test_a_failure_of_its_own_ends_a_wait(engines: list[Engine]) -> None:
    waiting = engines[0].begin(1)
    assert engines[1].awaited.get(timeout=TIMEOUT_S)
    engines[0].lockstep.fail(EngineDeadError("a rank is gone"))
    assert "a rank is gone" in str(waiting.get(timeout=TIMEOUT_S))


def test_an_engine_that_does_not_join_is_named() -> None:
    sockets = sockets_of(2)
    engine = Engine(0, sockets[0], timeout_s=0.05)
    error = engine.begin(1).get(timeout=TIMEOUT_S)
    assert "engine 1 did not join step 1 within 0.05 s (step_timeout_s)" in str(error)
    engine.lockstep.close()
    sockets[1][0].close()


def test_leaving_fails_only_those_who_want_to_step(engines: list[Engine]) -> None:
    engines[2].lockstep.close()
    error = engines[0].begin(1).get(timeout=TIMEOUT_S)
    assert isinstance(error, EngineDeadError)
    assert engines[0].failures.empty()


def test_engines_that_part_ways_fail() -> None:
    sockets = sockets_of(2)
    engine = Engine(0, sockets[0])
    sockets[1][0].send((5).to_bytes(8) + (1).to_bytes(4))
    assert "parted ways: engine 1 joins step 5 after 0" in str(engine.failures.get(timeout=TIMEOUT_S))
    engine.lockstep.close()
    sockets[1][0].close()


class Loop:
    """An engine on a thread."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        config = EngineConfig(
            cache=CacheConfig(block_size=4, num_blocks=64),
            parallel=ParallelConfig(executor="fake", data_parallel_size=2, enable_expert_parallel=True),
            data_parallel=DataParallelMember(
                rank=rank, sockets={other: each.detach() for other, each in sockets.items()}
            ),
        )
        self.executor = FakeExecutor(block_size=4, step_s=0.01)  # so that an abort finds its request
        self.replies: queue.SimpleQueue[EngineReply] = queue.SimpleQueue()
        self.loop = EngineLoop(config, self.executor, self.replies.put)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def ask(self, max_tokens: int, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = AddRequest(request_id=RequestId("r"), prompt_token_ids=list(prompt), sampling=sampling)
        self.loop.put(request)

    def answer(self) -> tuple[list[int], FinishReason]:
        """Of the next request that ends."""
        tokens: list[int] = []
        while True:
            reply = self.replies.get(timeout=TIMEOUT_S)
            assert isinstance(reply, EngineCoreOutputs)
            for output in reply.outputs:
                tokens += [token.token_id for token in output.tokens]
                if output.finish_reason is not None:
                    return tokens, output.finish_reason

    def common_steps(self) -> list[list[int]]:
        """Tokens of each engine in the steps so far, once the loop has nothing to do."""
        self.loop.put(Call(1, "stats"))
        while not isinstance(self.replies.get(timeout=TIMEOUT_S), CallResult):
            pass
        return [step.tokens_by_engine for step in self.executor.steps if step.tokens_by_engine]


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    loops = [Loop(rank, sockets) for rank, sockets in enumerate(sockets_of(2))]
    yield loops
    for each in loops:
        each.loop.stop()
    for each in loops:
        each.thread.join(TIMEOUT_S)
        each.loop.close()


def test_an_engine_without_work_attends_and_says_nothing(loops: list[Loop]) -> None:
    loops[0].ask(5)
    assert loops[0].answer() == (expected_tokens([1, 2, 3], 5), FinishReason.LENGTH)
    assert loops[1].replies.empty()
    steps = [each.common_steps() for each in loops]
    assert steps[0] == steps[1] == [[3, 0], [1, 0], [1, 0], [1, 0], [1, 0]]
    assert [each.common_steps() for each in loops] == steps  # idle engines make none


def test_what_ends_requests_of_one_engine_leaves_the_other_its_tokens(loops: list[Loop]) -> None:
    loops[0].ask(20)
    loops[1].ask(40, prompt=tuple(range(300)))  # more than the cache holds
    assert loops[1].answer() == ([], FinishReason.ERROR)
    loops[1].ask(200)
    loops[1].loop.put(AbortRequests([RequestId("r")]))
    assert loops[1].answer()[1] is FinishReason.ABORT
    assert loops[0].answer() == (expected_tokens([1, 2, 3], 20), FinishReason.LENGTH)
    assert loops[0].common_steps() == loops[1].common_steps()
