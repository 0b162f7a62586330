from __future__ import annotations

import itertools
import queue
import threading

import pytest

from common.engine.config import CacheConfig, EngineConfig
from common.engine.executor.fake import FakeExecutor
from common.engine.loop import MAX_NEW_TOKENS, EngineLoop
from common.engine.messages import AddRequest, Call, CallResult, EngineCoreOutputs, EngineReply
from common.types import RequestId, SamplingParams

CONFIG = EngineConfig(cache=CacheConfig(block_size=4, num_blocks=64))
TIMEOUT_S = 60.0


class RecordingQueue:
    """Notes how the loop asks for commands."""

    def __init__(self, inner: queue.SimpleQueue) -> None:
        self._inner = inner
        self.put = inner.put
        self.num_gets = 0
        self.blocked = threading.Semaphore(0)  # released each time the loop waits

    def get_nowait(self) -> object:
        self.num_gets += 1
        return self._inner.get_nowait()

    def get(self, timeout: float) -> object:
        self.num_gets += 1
        self.blocked.release()
        return self._inner.get(timeout=timeout)


def request(request_id: str, max_tokens: int) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return AddRequest(request_id=RequestId(request_id), prompt_token_ids=[1, 2, 3], sampling=sampling)


def test_idle_is_blocked() -> None:
    replies: list[EngineReply] = []
    executor = FakeExecutor(block_size=4)
    loop = EngineLoop(CONFIG, executor, replies.append)
    commands = RecordingQueue(loop._commands)
    loop._commands = commands
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert commands.blocked.acquire(timeout=TIMEOUT_S)
    loop.put(request("a", 5))
    assert commands.blocked.acquire(timeout=TIMEOUT_S)
    num_steps = len(executor.steps)
    assert num_steps <= 7
    assert commands.num_gets <= num_steps + 3  # one look between two steps, and no more
    loop.put(Call(1, "stats"))
    assert commands.blocked.acquire(timeout=TIMEOUT_S)
    assert len(executor.steps) == num_steps  # a question is no reason to step
    assert isinstance(replies[-1], CallResult)
    loop.stop()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    loop.close()
    assert executor.closed


def test_all_pending_commands_before_a_step() -> None:
    replies: list[EngineReply] = []
    executor = FakeExecutor(block_size=4)
    loop = EngineLoop(CONFIG, executor, replies.append)
    for name in "abc":
        loop.put(request(name, 1))
    loop.put(Call(7, "stats"))
    loop._take_commands()
    loop.stop()
    loop.run()
    assert isinstance(replies[0], CallResult)
    assert executor.steps == []  # stopped before the first step
    loop = EngineLoop(CONFIG, executor, replies.append)
    for name in "abc":
        loop.put(request(name, 1))
    loop._take_commands()
    loop._emit(loop._core.step())
    outputs = replies[-1]
    assert isinstance(outputs, EngineCoreOutputs)
    assert {output.request_id for output in outputs.outputs} == {"a", "b", "c"}


def test_streams_do_not_wait_until_a_million_tokens_of_prompts_are_taken() -> None:
    replies: list[EngineReply] = []
    length, count = 10_000, 100
    executor = FakeExecutor(block_size=16, max_model_len=2 * length)
    loop = EngineLoop(EngineConfig(cache=CacheConfig(num_blocks=8192)), executor, replies.append)
    loop.put(request("stream", 500))
    sampling = SamplingParams(temperature=0.0, max_tokens=500)  # more than there are steps: none ends
    for number in range(count):
        prompt = [number] * length
        loop.put(AddRequest(request_id=RequestId(f"{number}"), prompt_token_ids=prompt, sampling=sampling))
    loop.stop()
    loop.run()
    steps = [reply for reply in replies if isinstance(reply, EngineCoreOutputs)]
    known = [0, *(step.stats.num_waiting + step.stats.num_running for step in steps if step.stats is not None)]
    taken = [after - before for before, after in itertools.pairwise(known)]
    assert sum(taken) > count - MAX_NEW_TOKENS // length
    assert max(taken) * length <= MAX_NEW_TOKENS + 2 * length
    assert all(any(output.request_id == "stream" for output in step.outputs) for step in steps)


def test_failure_of_a_serving_thread_ends_the_loop() -> None:
    loop = EngineLoop(CONFIG, FakeExecutor(block_size=4), lambda reply: None)
    loop.fail(OSError("the input thread died"))
    with pytest.raises(OSError, match="the input thread died"):
        loop.run()
