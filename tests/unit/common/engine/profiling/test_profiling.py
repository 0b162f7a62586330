"""A profile's file, its marks and its ends, without an engine."""

from __future__ import annotations

import gzip
import json
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.contract.step import SchedulerOutput
from common.engine.messages import CallResult, ProfileReport, StartProfile
from common.engine.phases import Phase, PhaseClock
from common.engine.profiling import TRACE_FILE
from common.engine.profiling import profile as profile_module
from common.engine.profiling.marks import describe
from common.engine.profiling.profile import Profile
from common.engine.profiling.trace_file import TraceFile
from common.types import RequestId

TIMEOUT_S = 60.0
DECODES = {RequestId("a"): 1, RequestId("b"): 1}


def step_of(num_scheduled_tokens: dict[Any, int]) -> SchedulerOutput:
    total = sum(num_scheduled_tokens.values())
    return SchedulerOutput(num_scheduled_tokens=num_scheduled_tokens, total_num_scheduled_tokens=total)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1], "1 decode"),
        ([1, 1, 1, 256], "3 decodes, 1 prompt chunk of 256 tokens"),
        ([20, 10], "2 prompt chunks of 30 tokens"),
    ],
)
def test_steps_are_described(tokens: list[int], words: str) -> None:
    assert describe(step_of({RequestId(str(index)): count for index, count in enumerate(tokens)})) == words


class Rig:
    """A profile of steps that the test makes."""

    def __init__(self, directory: Path, *, seconds: float = 60.0, max_steps: int = 0) -> None:
        self.phases = PhaseClock()
        self._answers: queue.Queue[CallResult] = queue.Queue()
        command = StartProfile(call_id=7, directory=str(directory), seconds=seconds, max_steps=max_steps)
        self.profile = Profile(command, self.phases, self._answers.put)

    def step(self, num_scheduled_tokens: dict[Any, int] = DECODES) -> bool:
        """Makes a step as an engine does. Returns whether the profile has ended."""
        observer = self.phases.observer
        assert observer is not None
        self.phases.enter(Phase.SCHEDULE)
        observer.begin_step(step_of(num_scheduled_tokens))
        self.phases.enter(Phase.FORWARD)
        torch.ones(3).add(1)
        observer.end_step()
        self.phases.enter(Phase.UPDATE)
        return self.profile.check()

    def answer(self) -> CallResult:
        answer = self._answers.get(timeout=TIMEOUT_S)
        assert answer.call_id == 7
        assert self.phases.observer is None, "no step is marked after the end"
        return answer

    def report(self) -> ProfileReport:
        answer = self.answer()
        assert isinstance(answer.result, ProfileReport), answer.error
        return answer.result


def events_of(directory: Path) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress((directory / TRACE_FILE).read_bytes()))
    assert [each.name for each in directory.iterdir()] == [TRACE_FILE], "nothing else is left"
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_a_trace_of_several_windows_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "_CPU_WINDOW_EVENTS", 1)  # each step fills one
    rig = Rig(tmp_path, max_steps=3)
    assert not rig.step()
    assert not rig.step({})  # computes nothing
    assert not rig.step()
    assert rig.step()
    report = rig.report()
    assert (report.num_steps, report.num_tokens, report.ended_by) == (3, 6, "steps")
    assert report.paused_s > 0
    events = events_of(tmp_path)
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [step["name"] for step in steps] == [f"step {number}: 2 decodes" for number in (1, 2, 3)]
    adds = [event for event in events if event["name"] == "aten::add"]
    forwards = [event for event in events if event["name"] == "forward"]
    assert (len(adds), len(forwards)) == (4, 4)
    for step in steps:  # each contains one of each, in this order
        for inner in (forwards, adds):
            assert sum(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for event in inner) == 1
    assert not any("window" in event["name"] or "/" in event["name"] for event in events)


def test_the_number_of_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "_CPU_WINDOW_EVENTS", 1)
    monkeypatch.setattr(profile_module, "MAX_EVENTS", 100)
    rig = Rig(tmp_path)
    num_steps = 1
    while not rig.step():
        num_steps += 1
    report = rig.report()
    assert (report.num_steps, report.ended_by) == (num_steps, "events")
    assert report.num_events >= 100


def test_no_steps(tmp_path: Path) -> None:
    rig = Rig(tmp_path, seconds=1e-9)
    assert rig.profile.remaining_s == 0
    assert rig.profile.check()
    report = rig.report()
    assert (report.num_steps, report.ended_by) == (0, "seconds")
    assert [event for event in events_of(tmp_path) if event["cat"] == "cpu_op"] == []


def test_a_cancelled_profile_is_answered_with_an_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.profile.cancel("it was cancelled")
    assert rig.answer().error == "no profile: it was cancelled"


def test_a_profiler_that_fails_ends_the_profile_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    rig = Rig(tmp_path)
    assert rig.profile.check()
    assert rig.answer().error == "the profiler failed: RuntimeError: no counters"


def test_a_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "none", max_steps=1)
    assert rig.step()
    assert rig.answer().error.startswith("the trace cannot be written: ")


class NoTrace:
    """What torch leaves where the disk is full: nothing, without an error."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(b'{"traceEvents": [')


def test_an_incomplete_window_is_an_error(tmp_path: Path) -> None:
    ended, errors = threading.Event(), []

    def on_end(error: str) -> None:
        errors.append(error)
        ended.set()

    file = TraceFile(tmp_path, on_end)
    file.add(NoTrace(), 1)
    file.finish()
    assert ended.wait(TIMEOUT_S)
    assert errors[0].startswith("the trace cannot be written: ")
