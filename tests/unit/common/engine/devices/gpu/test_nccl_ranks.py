"""Ranks over NCCL, for which gloo stands in, each on a thread of this process."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from common.engine.devices.gpu import nccl_ranks
from common.engine.devices.gpu.nccl_ranks import NcclRanks, meet_over_nccl
from common.engine.model.ranks import GlooRanks
from common.errors import EngineDeadError

CPU = torch.device("cpu")


@pytest.fixture
def each(monkeypatch):
    monkeypatch.setattr(
        nccl_ranks,
        "_process_group",
        lambda group: ProcessGroupGloo(group.open_store("nccl"), group.rank, group.size),
    )

    def each(function):
        store = HashStore()

        def run(rank):
            ranks = meet_over_nccl(GlooRanks(store, rank, 2, timeout_s=100.0), CPU)
            try:
                return function(ranks)
            finally:
                ranks.close()

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, range(2)))

    return each


def test_sums_and_gathers(each):
    def meet(ranks):
        assert type(ranks) is NcclRanks
        part = torch.full((2, 3), float(ranks.rank))
        return ranks.all_reduce(part.clone() + 1).tolist(), ranks.all_gather_last(part).tolist()

    assert each(meet) == [([[3.0] * 3] * 2, [[0.0] * 3 + [1.0] * 3] * 2)] * 2


def test_the_group_takes_tensors_of_other_devices():
    class Group(GlooRanks):
        def __init__(self):
            self.rank, self.size, self.timeout_s, self.sums_in_order = 0, 2, 1.0, True

        def all_reduce(self, tensor):
            return tensor * 2

        def all_gather_last(self, tensor):
            return tensor * 3

    ranks = NcclRanks(Group(), None, torch.device("cuda"))
    assert ranks.all_reduce(torch.ones(1)).tolist() == [2.0]
    assert ranks.all_gather_last(torch.ones(1)).tolist() == [3.0]


def test_a_failure_names_the_rank():
    class Failing:
        def allreduce(self, tensors):
            raise RuntimeError("[/src/nccl.cc:12] NCCL error. This is typically caused by something.\nmore")

    group = GlooRanks(HashStore(), 0, 1)
    with pytest.raises(EngineDeadError, match=r"^rank 0 of 1 has lost another: NCCL error$"):
        NcclRanks(group, Failing(), CPU).all_reduce(torch.ones(1))


def test_where_one_rank_cannot_none_does(each, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    open_group = nccl_ranks._process_group

    def no_group(group):
        opened = open_group(group)  # which takes both
        if group.rank:
            raise RuntimeError("Duplicate GPU detected")
        return WrongSums(opened)

    class WrongSums:
        def __init__(self, group):
            self._group = group

        def allreduce(self, tensors):
            return self

        def wait(self):
            pass

    monkeypatch.setattr(nccl_ranks, "_process_group", no_group)
    assert each(type) == [GlooRanks] * 2
    start = "ranks do not use NCCL: "
    messages = sorted(record.getMessage().removeprefix(start) for record in caplog.records)
    assert messages == ["2 times 1 is 1", "Duplicate GPU detected"]
