"""What the table of requests keeps."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from msgspec import structs

from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.worker.request_table import RequestTable
from common.types import RequestId, SamplingParams

VOCAB_SIZE = 4096


def new_request(number: int) -> NewRequest:
    token_ids = range(VOCAB_SIZE)
    sampling = SamplingParams(logit_bias={token_id: number + token_id / 7 for token_id in token_ids})
    return NewRequest(RequestId(f"{number}"), [1, 2, 3], 3, sampling, [[1]], 0)


def test_choices_of_a_request_share_their_rules() -> None:
    table = RequestTable(8, 64, 4, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    first, other = new_request(1), new_request(2)
    choices = [
        replace(first, request_id=RequestId(f"choice {seed}"), sampling=structs.replace(first.sampling, seed=seed))
        for seed in range(3)
    ]
    table.update(SchedulerOutput(new_requests=[first, other, *choices]))
    rows = table.rows_of([each.request_id for each in (first, other, *choices)]).tolist()
    rules = [table.sampling_row(row, 1).rules for row in rows]
    assert all(each is rules[0] for each in rules[2:])
    assert rules[1].biases.tolist() != rules[0].biases.tolist()
    assert [table.sampling_row(row, 1).params.seed for row in rows] == [None, None, 0, 1, 2]


def test_a_row_that_is_taken_again_has_the_rules_of_its_request() -> None:
    table = RequestTable(1, 64, 4, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    for number in (1, 2, 1):
        request = new_request(number)
        table.update(SchedulerOutput(new_requests=[request]))
        (row,) = table.rows_of([request.request_id]).tolist()
        assert table.sampling_row(row, 1).rules.biases[0] == number
        table.update(SchedulerOutput(dropped_request_ids=[request.request_id]))


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


def test_tokens_that_another_stage_has_sampled() -> None:
    table = RequestTable(3, 64, 4, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    requests = [new_request(number) for number in range(3)]
    table.update(SchedulerOutput(new_requests=requests))
    ids = [request.request_id for request in requests]
    rows = table.rows_of(ids)
    table.num_computed_tokens[rows] = [3, 3, 5]  # the last one has computed two drafts
    version = table.version
    table.note_sampled({ids[0]: [7]})
    assert table.version == version  # the step after can be packed from the one before
    table.note_sampled({ids[1]: [], ids[2]: [8, 9]})
    assert table.version > version
    assert table.num_tokens[rows].tolist() == [4, 3, 5]
    assert table.num_computed_tokens[rows].tolist() == [3, 2, 4]
    assert table.token_ids[rows[2], :5].tolist() == [1, 2, 3, 8, 9]
