"""Pods that are killed while they save or load. The memory connector's medium dies with its pod, so it is not here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.engine.kv_connector import TransferResult
from kv_store.registry import create_connector
from tests.contract.connector_rig import EngineRig, create_kv_cache
from tests.contract.store_peer import BLOCKS, HASHES, run_and_kill
from tests.redis_server import running_redis


@pytest.fixture(params=["shared-storage", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A connector and where its medium is."""
    if request.param == "redis":
        with running_redis() as server:
            yield "redis", server.url
    else:
        yield "shared-storage", str(tmp_path / "kv")


@pytest.fixture
def survivor(place: tuple[str, str]) -> Iterator[EngineRig]:
    """An engine of another pod, opened before the killed one."""
    connector, where = place
    rig = EngineRig(create_connector(connector, {"url" if connector == "redis" else "path": where}))
    yield rig
    rig.close()


@pytest.mark.parametrize(("stop_at", "num_saved"), [("touch", 1), ("write", 1), ("end", 4)])
def test_of_a_killed_producer_all_that_it_saved_is_there_and_nothing_else(place, survivor, stop_at, num_saved):
    run_and_kill(*place, "save", stop_at)

    expected = create_kv_cache(seed=1)
    result = survivor.load(BLOCKS, HASHES)
    assert result == TransferResult(result.job_id, num_saved, "" if num_saved == 4 else "block_missing")
    assert same_bits(survivor.kv_cache[1 : 1 + num_saved], expected[1 : 1 + num_saved])

    survivor.kv_cache[1:5] = expected[1:5]  # computed here
    assert survivor.save(BLOCKS, HASHES).error == ""
    result = survivor.load([5, 6, 7, 8], HASHES)
    assert result == TransferResult(result.job_id, 4)
    assert same_bits(survivor.kv_cache[5:9], expected[1:5])


@pytest.mark.parametrize("stop_at", ["read_into", "end"])
def test_a_killed_consumer_takes_nothing_along(place, survivor, stop_at):
    assert survivor.save(BLOCKS, HASHES).error == ""
    run_and_kill(*place, "load", stop_at)
    result = survivor.load([5, 6, 7, 8], HASHES)
    assert result == TransferResult(result.job_id, 4)
    assert same_bits(survivor.kv_cache[5:9], survivor.kv_cache[1:5])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaN patterns included."""
    return torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
