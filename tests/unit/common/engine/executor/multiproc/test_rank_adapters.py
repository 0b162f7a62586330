"""What the ranks of an engine answer when they read an adapter."""

from __future__ import annotations

import time

import pytest

from common.engine.contract.adapters import AdapterFacts
from common.engine.executor.multiproc.adapters import RankAdapters, RankReads
from common.engine.executor.multiproc.protocol import AdapterRead, InstallAdapter, ReadAdapter, RemoveAdapter
from common.errors import BatonError, DeadlineExceededError, EngineDeadError, InvalidRequestError

FACTS = AdapterFacts(digest=b"first", rank=4, num_bytes=100)
OTHER = AdapterFacts(digest=b"other", rank=4, num_bytes=100)


class Ranks:
    """Ranks that answer at once."""

    def __init__(self, *answers: AdapterRead | None) -> None:
        self.told: list[InstallAdapter | RemoveAdapter] = []
        self.adapters = RankAdapters(self.told.append, lambda: EngineDeadError("a rank has ended"))
        for number, answer in enumerate(answers):
            self.adapters.ranks.append(self._rank(number, answer))

    def _rank(self, number: int, answer: AdapterRead | None) -> RankReads:
        rank = RankReads(f"rank {number}", lambda _: rank.put(answer))
        return rank


def test_an_adapter_that_all_ranks_have_read() -> None:
    """Each layer is in a stage."""
    by_stage = [AdapterRead(number=1, facts=FACTS, absent=absent) for absent in (["last"], ["first"])]
    ranks = Ranks(*by_stage)
    adapter = ranks.adapters.read("/adapter")
    assert (adapter.facts, adapter.absent) == (FACTS, frozenset())
    ranks.adapters.install(adapter)
    ranks.adapters.remove(b"first")
    assert ranks.told == [InstallAdapter(b"first"), RemoveAdapter(b"first")]


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([{"facts": FACTS}, {"error": "no"}], InvalidRequestError, "^no$"),
        ([{"error": "no"}, {"facts": FACTS}], InvalidRequestError, "^no$"),
        ([{"facts": FACTS}, {"facts": OTHER}], InvalidRequestError, "rank 1 has read another one than rank 0"),
        (
            [{"facts": FACTS, "absent": ["a", "b"]}, {"facts": FACTS, "absent": ["b", "c"]}],
            InvalidRequestError,
            "has no layer 'b' that",
        ),
        ([{"facts": FACTS}, None], EngineDeadError, "a rank has ended"),
    ],
)
def test_an_adapter_that_cannot_be_used(
    answers: list[dict[str, object] | None], error: type[BatonError], message: str
) -> None:
    ranks = Ranks(*(None if each is None else AdapterRead(number=1, **each) for each in answers))  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        ranks.adapters.read("/adapter")


def test_an_answer_that_came_too_late_is_not_that_of_a_later_read() -> None:
    sent: list[ReadAdapter] = []
    rank = RankReads("rank 0", sent.append)
    with pytest.raises(DeadlineExceededError, match="rank 0 has not read the adapter in time"):
        rank.get(1, time.monotonic())
    rank.put(AdapterRead(number=1, facts=FACTS))
    late = AdapterRead(number=2, facts=OTHER)
    rank.put(late)
    assert rank.get(2, time.monotonic()) == late
