"""What the table of requests keeps."""

from __future__ import annotations

import tracemalloc

from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.worker.request_table import RequestTable
from common.types import RequestId, SamplingParams

VOCAB_SIZE = 4096


def new_request(number: int) -> NewRequest:
    token_ids = range(VOCAB_SIZE)
    sampling = SamplingParams(logit_bias={token_id: number + token_id / 7 for token_id in token_ids})
    return NewRequest(RequestId(f"{number}"), [1, 2, 3], 3, sampling, [1], 0)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    table = RequestTable(8, 64, 4, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())

    def serve() -> None:
        for number in range(8):
            table.update(SchedulerOutput(new_requests=[new_request(number)]))
        table.update(SchedulerOutput(dropped_request_ids=[RequestId(f"{number}") for number in range(8)]))

    serve()  # what is made once
    tracemalloc.start()
    try:
        serve()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < most / 100
