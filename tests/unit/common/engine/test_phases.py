"""Where the time of the step loop goes, by a clock that moves only where the test says."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import msgspec
import pytest

from common.engine.config import CacheConfig, EngineConfig
from common.engine.contract.masks import MaskSource
from common.engine.contract.step import ModelRunnerOutput, RunningStep, SchedulerOutput
from common.engine.executor.fake import FakeExecutor, MemoryConnector
from common.engine.loop import IDLE_REPORT_S, EngineLoop
from common.engine.messages import (
    AddRequest,
    EngineCommand,
    EngineCoreOutputs,
    EngineReply,
    KVTransferParams,
    PhaseSeconds,
    TransferUpdate,
)
from common.engine.phases import Phase
from common.types import RequestId, SampledToken, SamplingParams, TransferId

CONFIG = EngineConfig(cache=CacheConfig(block_size=4, num_blocks=64))
READ_S = 0.001  # that each reading of the clock takes
TIMEOUT_S = 60.0


class Clock:
    """Each reading takes a moment, so that no phase of a loop takes no time at all."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += READ_S
        return self.now


class TimedExecutor(FakeExecutor):
    """A step with tokens takes a second to prepare, two to run, three to sample, and five until the device is done."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(block_size=4, connector=MemoryConnector())
        self._clock = clock

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        if not step.num_scheduled_tokens:
            return super().submit(step, masks)
        self._clock.now += 1
        self._phases.enter(Phase.FORWARD)
        self._clock.now += 2
        self._phases.enter(Phase.SAMPLE)
        self._clock.now += 3
        return _OnDevice(self.execute(step), self._clock)


class _OnDevice:
    def __init__(self, outcome: ModelRunnerOutput, clock: Clock) -> None:
        self._outcome, self._clock = outcome, clock

    def result(self) -> ModelRunnerOutput:
        self._clock.now += 5
        return self._outcome


class ScriptedQueue:
    """Commands that arrive while the loop waits, after so many seconds of the clock; then those of other threads."""

    def __init__(
        self,
        clock: Clock,
        receive: Callable[[EngineCommand], None],
        arrivals: Sequence[tuple[float, AddRequest | TransferUpdate]],
    ) -> None:
        self._clock = clock
        self._receive = receive
        self._arrivals = list(arrivals)
        self._puts: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.put = self._puts.put
        self.get_nowait = self._puts.get_nowait

    def get(self, timeout: float) -> object:
        if not self._arrivals:
            return self._puts.get(timeout=TIMEOUT_S)
        seconds, command = self._arrivals.pop(0)
        if seconds > timeout:
            self._clock.now += timeout
            self._arrivals.insert(0, (seconds - timeout, command))
            raise queue.Empty
        self._clock.now += seconds
        self._receive(command)
        return command


def run(arrivals: Sequence[tuple[float, AddRequest | TransferUpdate]]) -> tuple[list[PhaseSeconds], float]:
    """Runs a loop until its request ends. Returns what it told of its phases, and for how long it ran until then."""
    clock, told, ended_at = Clock(), [], 0.0

    def emit(reply: EngineReply) -> None:
        nonlocal ended_at
        if isinstance(reply, EngineCoreOutputs) and reply.phases is not None:
            told.append(reply.phases)
            ended_at = clock.now
            if any(output.finish_reason for output in reply.outputs):
                loop.stop()

    began = clock.now + READ_S  # the first reading
    loop = EngineLoop(CONFIG, TimedExecutor(clock), emit, clock=clock)
    loop._commands = ScriptedQueue(clock, loop._core.receive, arrivals)  # type: ignore[assignment]
    loop.run()
    loop.close()
    return told, ended_at - began


def request(transfer: KVTransferParams | None = None) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    return AddRequest(request_id=RequestId("a"), prompt_token_ids=[1, 2, 3], sampling=sampling, transfer=transfer)


def test_phases_add_up_to_the_time_of_the_loop() -> None:
    told, seconds = run([(4.0, request())])
    assert len(told) == 3, "a step for each token"
    last = told[-1]
    assert sum(msgspec.structs.astuple(last)) == pytest.approx(seconds)
    assert (last.prepare, last.forward, last.sample, last.device) == pytest.approx((3, 6, 9, 15), abs=0.1)
    assert last.wait == pytest.approx(4, abs=0.1)
    assert last.transfer == 0
    assert 0 < last.schedule < 0.1
    assert 0 < last.update < 0.1


def test_an_idle_loop_tells_how_long_it_has_waited() -> None:
    told, seconds = run([(2.5 * IDLE_REPORT_S, request())])
    assert [phases.wait for phases in told[:2]] == pytest.approx([IDLE_REPORT_S, 2 * IDLE_REPORT_S], abs=0.1)
    assert told[-1].wait == pytest.approx(2.5 * IDLE_REPORT_S, abs=0.1)
    assert sum(msgspec.structs.astuple(told[-1])) == pytest.approx(seconds)


def test_waiting_for_kv_is_not_idleness() -> None:
    """A consumer whose KV comes after three seconds, with nothing else to compute."""
    transfer = KVTransferParams(transfer_id=TransferId("t"), epoch=1, role="consumer")
    update = TransferUpdate(
        request_id=RequestId("a"),
        epoch=1,
        num_ready_tokens=0,
        final=True,
        first_token=SampledToken(1),
        failure="prefill_failed",
    )

    told, seconds = run([(1.0, request(transfer)), (3.0, update)])
    assert told[-1].wait == pytest.approx(1, abs=0.1)
    assert told[-1].transfer == pytest.approx(3, abs=0.1)
    assert sum(msgspec.structs.astuple(told[-1])) == pytest.approx(seconds)
