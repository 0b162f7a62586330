"""What ranks see of each other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from common.engine.executor.multiproc.digests import RankDigests, create_digests
from common.errors import EngineDeadError


@pytest.fixture
def ranks() -> Iterator[list[RankDigests]]:
    memory = create_digests(3)
    yield [RankDigests(memory, rank, 3) for rank in range(3)]
    os.close(memory)


def test_ranks_that_agree_go_on(ranks: list[RankDigests]) -> None:
    for number in range(500):
        for rank in ranks:
            rank.end_step(b"step", b"%d" % number)


def test_a_rank_may_lag(ranks: list[RankDigests]) -> None:
    for _ in range(8):
        ranks[0].end_step(b"step", b"result")
    for _ in range(8):
        ranks[1].end_step(b"step", b"result")


@pytest.mark.parametrize("other", [(b"other", b"result"), (b"step", b"other")])
def test_a_difference_is_seen_by_the_last_and_in_the_next_step(
    ranks: list[RankDigests], other: tuple[bytes, bytes]
) -> None:
    for rank in ranks:
        rank.end_step(b"step", b"result")
    for rank in ranks[:2]:
        rank.end_step(b"step", b"result")
    with pytest.raises(EngineDeadError, match=r"after step 2, rank 2 has digest ([0-9a-f]{8}), rank 0 has (?!\1)"):
        ranks[2].end_step(*other)
    with pytest.raises(EngineDeadError, match=r"after step 2, rank 1 has digest ([0-9a-f]{8}), rank 2 has (?!\1)"):
        ranks[1].end_step(b"step", b"result")


def test_a_difference_of_a_rank_that_lags_is_seen(ranks: list[RankDigests]) -> None:
    for _ in range(8):
        ranks[0].end_step(b"step", b"result")
    with pytest.raises(EngineDeadError, match="parted ways: after step 1, "):
        ranks[1].end_step(b"step", b"other")
