"""Ranks over gloo, each on a thread of this process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from common.engine.devices.ranks import OneRank
from common.engine.model.ranks import GlooRanks, together
from common.errors import EngineDeadError


@pytest.fixture
def each():
    """Runs a function of a rank on each of so many ranks that have met."""

    def each(size, function, timeout_s=100.0):
        store = HashStore()

        def run(rank):
            ranks = GlooRanks(store, rank, size, timeout_s=timeout_s)
            try:
                return function(ranks)
            finally:
                ranks.close()
                ranks.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))

    return each


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums(each, size, dtype):
    def add(ranks):
        return ranks.all_reduce(torch.arange(6, dtype=dtype).view(2, 3) * (ranks.rank + 1))

    for total in each(size, add):
        assert total.dtype == dtype
        assert total.tolist() == (torch.arange(6).view(2, 3) * sum(range(1, size + 1))).tolist()


def test_sums_of_views_scalars_and_nothing(each):
    def add(ranks):
        assert ranks.all_reduce(torch.ones(0, 3)).shape == (0, 3)  # a step of a prompt's chunk alone has no logits
        columns = torch.arange(6.0).view(2, 3)[:, 1:]
        return ranks.all_reduce(columns).tolist(), float(ranks.all_reduce(torch.tensor(1.5)))

    assert each(2, add) == [([[2.0, 4.0], [8.0, 10.0]], 3.0)] * 2


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), (0, 3)])
def test_gathers_in_order_of_ranks(each, shape):
    parts = [torch.full(shape, float(rank)) for rank in range(3)]
    for gathered in each(3, lambda ranks: ranks.all_gather_last(parts[ranks.rank])):
        assert gathered.tolist() == torch.cat(parts, dim=-1).tolist()


def test_one_rank():
    ranks, tensor = OneRank(), torch.ones(2, 2)
    assert ranks.all_reduce(tensor) is tensor
    assert ranks.all_gather_last(tensor) is tensor
    ranks.wait_for_all()
    ranks.close()


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(EngineDeadError, match=r"^rank 0 and rank 2 of 3 did not join within 0\.2 s$"):
        GlooRanks(HashStore(), 1, 3, join_timeout_s=0.2)


def test_a_rank_that_left_is_an_error_at_once(each):
    def leave(ranks):
        if ranks.rank == 1:
            return 0.0
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 0 of 2 has lost another"):
            ranks.all_reduce(torch.ones(4))
        return time.monotonic() - began

    assert max(each(2, leave, timeout_s=100.0)) < 100


def test_a_rank_that_is_late_is_an_error(each):
    has_failed = threading.Event()

    def be_late(ranks):
        if ranks.rank == 1:
            assert has_failed.wait(100)
            return
        ranks._group._set_default_timeout(timedelta(seconds=0.3))
        with pytest.raises(EngineDeadError):
            ranks.all_reduce(torch.ones(4))
        has_failed.set()

    each(2, be_late)


def test_a_rank_may_take_its_time_to_load(each):
    def load(ranks):
        ranks._group._set_default_timeout(timedelta(seconds=0.2))
        for slow in range(2):
            time.sleep(0.5 if ranks.rank == slow else 0)
            ranks.wait_for_all()

    each(2, load)


def test_what_fails_on_one_rank_fails_on_all(each):
    def compile_kernels(ranks, broken):
        with together(ranks):
            if ranks.rank == broken:
                raise ValueError("no such kernel")

    def fail(ranks):
        compile_kernels(ranks, broken=None)
        with pytest.raises((ValueError, RuntimeError)) as failed:
            compile_kernels(ranks, broken=1)
        return str(failed.value)

    assert each(2, fail) == ["it failed on another rank", "no such kernel"]
