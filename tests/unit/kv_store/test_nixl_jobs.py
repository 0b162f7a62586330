"""Who may settle a job of the nixl connector, and that each settles once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.types import RequestId
from kv_store.nixl import jobs
from kv_store.nixl.jobs import Job, JobTable


@pytest.fixture
def settled() -> list[str]:
    return []


@pytest.fixture
def table(settled: list[str]) -> JobTable:
    return JobTable(lambda: settled.append("settled"))


def added(table: JobTable, job_id: int = 1) -> Job:
    job = Job(BlockTransfer(job_id, RequestId("r"), (), (), 1), due=5.0)
    table.add(job)
    return job


def test_a_job_settles_once(table, settled):
    job = added(table)
    assert table.settle(job, "", 3, (b"digest",))
    assert not table.settle(job, "late")
    assert table.poll() == [TransferResult(1, 3, "", (b"digest",))]
    assert table.poll() == []
    assert settled == ["settled"]


def test_a_job_that_is_cancelled_first_is_not_for_the_transport(table):
    job = added(table)
    table.cancel(1)
    assert table.poll() == [TransferResult(1, 0, "transfer_cancelled")]
    assert not table.begin(job)
    table.cancel(1)
    assert table.poll() == []


def test_a_job_that_the_transport_has_is_settled_by_it(table):
    job = added(table)
    assert table.begin(job)
    table.cancel(1)
    assert table.poll() == []
    assert job.is_unwanted
    assert table.settle(job, "transfer_cancelled")


def test_all_that_has_not_settled_is_ended(table, settled):
    table.settle(added(table, 1))
    added(table, 2)
    table.begin(added(table, 3))
    table.settle_all("closed")
    assert [(result.job_id, result.error) for result in table.poll()] == [(1, ""), (2, "closed"), (3, "closed")]
    assert len(settled) == 3


@pytest.mark.parametrize(("now", "is_overdue"), [(4.9, False), (5.0, True), (5.1, True)])
def test_a_job_is_overdue_from_its_deadline_on(table, monkeypatch, now, is_overdue):
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now))
    assert added(table).is_overdue == is_overdue
