"""Steps that a device has not finished, by their numbers."""

from __future__ import annotations

import pytest
import torch

from common.engine.devices.gpu.fences import DeviceFences
from common.engine.kv_connector import BlockTransfer
from common.types import BlockHash, RequestId
from kv_store.nixl.jobs import Job


class FakeEvent:
    """The end of a step on a device that is told how far it has come."""

    created: list[FakeEvent]

    def __init__(self) -> None:
        self.is_recorded = self.is_reached = False
        self.num_waits = 0
        self.created.append(self)

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        assert self.is_recorded
        return self.is_reached

    def wait(self) -> None:
        assert self.is_recorded
        self.num_waits += 1


@pytest.fixture
def events() -> list[FakeEvent]:
    FakeEvent.created = []
    return FakeEvent.created


def test_steps_are_numbered_and_end_in_order(events: list[FakeEvent]) -> None:
    fences = DeviceFences(FakeEvent)
    assert [fences.record(), fences.record()] == [1, 2]
    assert not fences.is_over(1)
    events[0].is_reached = True
    assert (fences.is_over(1), fences.is_over(2)) == (True, False)
    fences.wait(2)
    assert [event.num_waits for event in events] == [0, 1]
    assert fences.is_over(0), "no step"
    fences.wait(0)


def test_only_steps_under_way_are_kept(events: list[FakeEvent]) -> None:
    fences = DeviceFences(FakeEvent)
    for number in range(1, 50):
        assert fences.record() == number
        for event in events[: number - 2]:
            event.is_reached = True
    assert len(fences._events) <= 3
    assert fences.is_over(10)
    fences.wait(10)
    assert events[9].num_waits == 0
    assert not fences.is_over(49)


def test_a_save_may_start_when_its_step_is_over(events: list[FakeEvent]) -> None:
    fences = DeviceFences(FakeEvent)
    transfer = BlockTransfer(1, RequestId("r"), (1,), (BlockHash(b"h"),), 4, fence=fences.record())
    job = Job(transfer, due=5.0, fences=fences)
    assert not job.is_ready
    events[0].is_reached = True
    assert job.is_ready


@pytest.mark.gpu
def test_a_device_is_waited_for() -> None:
    fences = DeviceFences()
    big = torch.rand(4096, 4096, device="cuda")
    for _ in range(40):
        big = big @ big / 4096
    fence = fences.record()
    copy, copied = torch.cuda.Stream(), torch.empty(16, pin_memory=True)
    with torch.cuda.stream(copy):
        fences.wait(fence)
        copied.copy_(big[0, :16], non_blocking=True)
    copy.synchronize()
    assert fences.is_over(fence)
    assert torch.equal(copied, big[0, :16].cpu())
