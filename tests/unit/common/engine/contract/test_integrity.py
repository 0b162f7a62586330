"""What ranks must have in common with the scheduler."""

from __future__ import annotations

from common.engine.contract.integrity import KnownRequests
from common.types import RequestId

A, B, C = map(RequestId, "abc")


def test_tables_that_differ_are_named() -> None:
    known = KnownRequests({A: [[1, 2], [0, 3]], B: [[4], [5]]}, [C])
    assert known.violations({A: [[1, 2], [9, 3]], B: [[4], [5]], C: [[7], []]}) == []  # 9 fell out after it was told
    assert known.violations({A: [[1, 2], [9, 4]], C: [[7], []], RequestId("d"): [[], []]}) == [
        "request b is unknown",
        "request d is kept after its end",
        "request a has block 4 at 1 in group 1, not 3",
    ]
    assert known.violations({A: [[1], [9, 3]], B: [[4], [5]]}) == [
        "request c is unknown",
        "request a has 1 blocks in group 0, not 2",
    ]


def test_violations_are_bounded() -> None:
    assert 0 < len(KnownRequests({}, []).violations({RequestId(str(each)): [] for each in range(1000)})) < 100
