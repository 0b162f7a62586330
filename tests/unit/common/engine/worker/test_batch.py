"""The positions of a batch."""

from __future__ import annotations

import pytest

from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.devices.host_memory import HostMemory
from common.engine.worker.batch import BatchPacker
from common.engine.worker.request_table import RequestTable
from common.types import PromptPositions, RequestId, SamplingParams

BLOCK_SIZE = 4
IMAGE = PromptPositions.of([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])  # of 2 x 2 tokens
A, B = RequestId("a"), RequestId("b")


def packer_of(*requests: NewRequest, position_dims: int) -> tuple[RequestTable, BatchPacker]:
    table = RequestTable(4, 32, BLOCK_SIZE, position_dims=position_dims, vocab_size=9, eos_token_ids=frozenset())
    table.update(SchedulerOutput(new_requests=list(requests)))
    return table, BatchPacker(table, BLOCK_SIZE, HostMemory())


def request(name: str, num_tokens: int, positions: PromptPositions | None, computed: int = 0) -> NewRequest:
    blocks = [list(range(1, 9))]
    return NewRequest(RequestId(name), [1] * num_tokens, 6, SamplingParams(), blocks, computed, positions=positions)


def sampled(table: RequestTable, request_id: RequestId) -> None:
    rows = table.rows_of([request_id])
    table.append_tokens(rows, table.num_tokens[rows], [1])


def test_positions_of_one_dimension_are_the_places_of_tokens() -> None:
    _, packer = packer_of(request("a", 6, None), position_dims=1)
    assert packer.pack({A: 4}, {}).positions.tolist() == [0, 1, 2, 3]
    assert packer.pack({A: 2}, {}).positions.tolist() == [4, 5]


def test_decodes_go_on_from_the_largest_position_of_the_prompt() -> None:
    table, packer = packer_of(request("a", 6, IMAGE), position_dims=3)
    assert packer.pack({A: 4}, {}).positions.tolist() == [each[:4] for each in IMAGE.values]
    assert packer.pack({A: 2}, {}).positions.tolist() == [each[4:] for each in IMAGE.values]
    for expected in (4, 5, 6):  # the second and third are as the one before, one token later
        sampled(table, A)
        batch = packer.pack({A: 1}, {})
        assert batch.positions.tolist() == [[expected]] * 3
        assert batch.attention.seq_lens == [expected + 3]  # KV is where the token is, whatever its position
        assert batch.attention.slot_mapping.tolist() == [expected + 2 + BLOCK_SIZE]


def test_a_request_that_comes_again_has_the_positions_that_it_had() -> None:
    _, packer = packer_of(request("a", 9, IMAGE, computed=4), position_dims=3)
    assert packer.pack({A: 5}, {}).positions.tolist() == [[1, 3, 4, 5, 6], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6]]


def test_text_has_its_places_in_all_dimensions() -> None:
    _, packer = packer_of(request("a", 6, None), request("b", 6, IMAGE), position_dims=3)
    assert packer.pack({A: 2, B: 3}, {}).positions.tolist() == [[0, 1, *each[:3]] for each in IMAGE.values]


def test_drafts_have_the_positions_of_the_tokens_that_they_may_become() -> None:
    _, packer = packer_of(request("a", 7, IMAGE, computed=6), position_dims=3)
    assert sorted(packer.pack({A: 3}, {A: [5, 6]}).positions[0].tolist()) == [4, 5, 6]


def test_a_row_that_is_taken_again_has_the_positions_of_its_request() -> None:
    table, packer = packer_of(request("a", 6, IMAGE), position_dims=3)
    table.update(SchedulerOutput(dropped_request_ids=[A], new_requests=[request("b", 6, None)]))
    assert packer.pack({B: 6}, {}).positions.tolist() == [list(range(6))] * 3


@pytest.mark.parametrize("dimensions", [1, 3])
def test_memory_for_positions_is_taken_only_with_several_dimensions(dimensions: int) -> None:
    table, _ = packer_of(position_dims=dimensions)
    assert table._positions.size == (0 if dimensions == 1 else 3 * 4 * 33)
