"""What a proposer answers is checked before it goes to the scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from common.engine.speculation.base import Context, propose
from common.types import RequestId

REQUESTS = [Context(RequestId(name), np.array([1, 2])) for name in "ab"]


class Answering:
    """A proposer of these drafts."""

    def __init__(self, drafts: list[list[int]]) -> None:
        self._drafts = drafts

    def propose(self, requests: object) -> list[list[int]]:
        return self._drafts

    def forget(self, request_ids: object) -> None: ...


@pytest.mark.parametrize("bad", [-1, 9, 10**9])
def test_what_is_not_in_the_vocabulary_is_dropped_with_what_follows(bad: int) -> None:
    drafts = [[np.int64(3), 8, bad, 4], [bad, 1]]
    found = propose(Answering(drafts), REQUESTS, vocab_size=9)  # type: ignore[arg-type]
    assert found == {"a": [3, 8]}
    assert {type(token_id) for token_id in found[RequestId("a")]} == {int}


def test_drafts_of_other_requests_are_an_error_that_names_the_proposer() -> None:
    with pytest.raises(ValueError, match="proposer: Answering has answered with drafts of 1 requests, not of 2"):
        propose(Answering([[1]]), REQUESTS, vocab_size=9)
