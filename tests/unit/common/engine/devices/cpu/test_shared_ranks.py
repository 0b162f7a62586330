"""Ranks over shared memory, each on a thread of this process."""

import itertools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from common.engine.devices.cpu import shared_ranks
from common.engine.devices.cpu.kernels.program import Program, Workspace, recording
from common.engine.devices.cpu.kernels.reduction import SLOT_BYTES, TIMEOUT_MS
from common.engine.devices.cpu.shared_ranks import SharedRanks, share_memory
from common.engine.model.ranks import GlooRanks
from common.errors import EngineDeadError

SLOT = SLOT_BYTES // 4  # numbers in float32


@pytest.fixture
def each():
    """Runs a function of a rank on each of so many ranks, which are `expected` to share memory."""

    def each(size, function, expected=SharedRanks):
        store = HashStore()

        def run(rank):
            ranks = share_memory(GlooRanks(store, rank, size, timeout_s=100.0))
            assert type(ranks) is expected
            try:
                return function(ranks)
            finally:
                ranks.close()
                ranks.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))

    return each


def part(rank, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_order(size, *shape, dtype=torch.float32):
    total = part(0, *shape, dtype=dtype).float()
    for rank in range(1, size):
        total = total + part(rank, *shape, dtype=dtype).float()
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_the_order_of_ranks(each, size, dtype):
    shapes = [(1,), (3, 7), (16, 1024), (5, 4099), (1, SLOT), (SLOT + 1,), (3, SLOT + 5)]

    def add(ranks):
        return [ranks.all_reduce(part(ranks.rank, *shape, dtype=dtype)) for shape in shapes]

    for totals in each(size, add):
        for shape, total in zip(shapes, totals, strict=True):
            assert torch.equal(total, in_order(size, *shape, dtype=dtype)), shape


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 5), (0, 3), (64, 1001), (2, SLOT), (3, 2 * SLOT + 9)])
def test_gathers_in_order_of_ranks(each, shape):
    expected = torch.cat([part(rank, *shape) for rank in range(3)], dim=-1)
    for gathered in each(3, lambda ranks: ranks.all_gather_last(part(ranks.rank, *shape))):
        assert torch.equal(gathered, expected)


def test_views_scalars_nothing_and_other_types(each):
    def add(ranks):
        assert ranks.all_reduce(torch.ones(0, 3)).shape == (0, 3)
        columns = torch.arange(6.0).view(2, 3)[:, 1:]
        doubles = ranks.all_reduce(torch.tensor([1e300, 1e-300], dtype=torch.float64))
        return ranks.all_reduce(columns).tolist(), float(ranks.all_reduce(torch.tensor(1.5))), doubles.tolist()

    assert each(2, add) == [([[2.0, 4.0], [8.0, 10.0]], 3.0, [2e300, 2e-300])] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_recorded_collectives(each, size):
    def record(ranks):
        own, found = torch.zeros(3, SLOT), []
        with recording(Workspace(3)) as recorded:
            gathered = ranks.all_gather_last(ranks.all_reduce(own))
        program = Program(recorded)
        for factor in (1.0, 2.0, 3.0):
            own.copy_(part(ranks.rank, 3, SLOT) * factor)
            program.run()
            found.append(gathered.clone())
        return found

    with recording(Workspace(1)) as nothing:  # what runs programs is compiled once, not by two threads at a time
        pass
    Program(nothing).run()
    total = in_order(size, 3, SLOT)
    for found in each(size, record):
        for factor, gathered in zip((1.0, 2.0), found, strict=False):
            assert torch.equal(gathered, torch.cat([total * factor] * size, dim=1))


def test_a_rank_that_left_is_an_error_at_once(each):
    def leave(ranks):
        ranks.all_reduce(torch.ones(4))
        if ranks.rank == 1:
            return 0.0
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 0 of 2 has lost another: rank 1 "):
            ranks.all_reduce(torch.ones(4))
        return time.monotonic() - began

    assert max(each(2, leave)) < 100


def test_a_rank_that_is_late_is_an_error(each):
    has_failed = threading.Event()

    def be_late(ranks):
        if ranks.rank:
            return has_failed.wait(100)
        ranks._state[TIMEOUT_MS] = 300
        with pytest.raises(EngineDeadError, match="rank 0 of 3 has lost another: rank 1 "):
            ranks.all_reduce(torch.ones(4))
        has_failed.set()
        return True

    assert each(3, be_late) == [True] * 3


def test_what_a_rank_cannot_do_none_does(each, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    map_, difference = shared_ranks._map, SharedRanks.difference
    calls = itertools.count(1)

    def elsewhere(offer, num_bytes):
        if next(calls) == 2:
            raise OSError("the first rank is on another host")
        return map_(offer, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(shared_ranks, "_map", elsewhere)
        add = each(2, lambda ranks: float(ranks.all_reduce(torch.tensor(1.0))), expected=GlooRanks)
    assert add == [2.0, 2.0]
    with monkeypatch.context() as patch:
        patch.setattr(SharedRanks, "difference", lambda ranks: difference(ranks) or "sums differ" * ranks.rank)
        assert each(2, lambda ranks: None, expected=GlooRanks) == [None, None]
    start = "ranks meet over the network instead of shared memory: "
    assert sorted(record.getMessage().removeprefix(start) for record in caplog.records) == [
        "another rank cannot",
        "another rank cannot",
        "sums differ",
        "the first rank is on another host",
    ]


def test_wrong_sums_are_seen(each, monkeypatch, caplog):
    run_add = shared_ranks._Calls._run_add

    def add_less(calls, call, out, start, stop):
        run_add(calls, call, out, start, stop - (stop > 1000))

    monkeypatch.setattr(shared_ranks._Calls, "_run_add", add_less)
    each(2, lambda ranks: None, expected=GlooRanks)
    assert "numbers in torch.float32 differ by" in caplog.text
