"""Decode steps through recorded work, with a recorder that runs it again on the CPU."""

from dataclasses import replace

import pytest
import torch

from common.engine.devices.attention import AttentionMetadata, GroupTables
from common.engine.devices.decode_inputs import DecodeInputs, DecodeLimits, RecordedStepError
from common.engine.devices.gpu.decode_graphs import DecodeGraphs, graph_sizes

BLOCK_SIZE, MAX_MODEL_LEN = 4, 30


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def graphs(forward, record=lambda work: work, sizes=(1, 2, 4), **token):
    limits = DecodeLimits(max(sizes), MAX_MODEL_LEN, BLOCK_SIZE, **token)
    return DecodeGraphs(forward, record, limits, sizes=sizes, device=torch.device("cpu"))


def shown(inputs):
    """Instead of logits, all that a forward pass is given."""
    attention = inputs.attention
    columns = [inputs.tokens, inputs.positions, attention.slot_mapping, attention.seq_lens_tensor]
    return torch.cat([torch.stack(columns, dim=1), attention.block_tables], dim=1).float()


def decodes(count):
    lengths = torch.arange(count, 0, -1) * 5
    width = -(-int(lengths.max()) // BLOCK_SIZE)
    return DecodeInputs(
        torch.arange(count) + 100,
        lengths - 1,
        AttentionMetadata(
            num_decodes=count,
            query_start=list(range(count + 1)),
            seq_lens=lengths.tolist(),
            seq_lens_tensor=lengths,
            block_tables=torch.arange(count * width).view(count, width),
            slot_mapping=lengths * 7,
        ),
    )


def test_recorded_work_sees_the_inputs_of_each_step():
    recorded = graphs(shown)
    for count in (1, 3, 4, 2):
        inputs = decodes(count)
        expected = shown(inputs)
        assert torch.equal(recorded.run(inputs)[:, : expected.shape[1]], expected)
    assert recorded.run(decodes(5)) is None


def test_recorded_work_sees_what_the_stage_before_passes_on():
    recorded = graphs(
        lambda inputs: inputs.tokens * 2 + inputs.positions[:, None], token_shape=(6,), token_dtype=torch.float32
    )
    for count in (1, 3, 4, 2):
        inputs = decodes(count)._replace(tokens=torch.rand(count, 6))
        assert torch.equal(recorded.run(inputs), inputs.tokens * 2 + inputs.positions[:, None])


def test_recorded_work_sees_the_blocks_of_each_kv_group():
    def forward(inputs):
        return torch.cat([shown(inputs._replace(attention=each)) for each in inputs.attention.by_group()], dim=1)

    limits = DecodeLimits(4, MAX_MODEL_LEN, BLOCK_SIZE, num_groups=2)
    recorded = DecodeGraphs(forward, lambda work: work, limits, sizes=(2, 4), device=torch.device("cpu"))
    for count in (1, 3, 4, 2):
        first = decodes(count)
        attention = first.attention
        other = GroupTables(attention.block_tables + 50, attention.slot_mapping + 70)
        found = recorded.run(first._replace(attention=replace(attention, other_groups=[other]))).chunk(2, dim=1)
        for own, tables in zip(found, (attention, other), strict=True):
            assert torch.equal(own[:, 2].long(), tables.slot_mapping)
            assert torch.equal(own[:, 4 : 4 + tables.block_tables.shape[1]].long(), tables.block_tables)


def test_places_that_no_decode_takes_write_nothing_and_read_nothing():
    seen = []

    def forward(inputs):
        seen.append((inputs.attention.slot_mapping.tolist(), inputs.attention.seq_lens_tensor.tolist()))
        return shown(inputs)

    recorded = graphs(forward)
    recorded.run(decodes(4))
    recorded.run(decodes(3))
    assert seen[-1] == ([105, 70, 35, -1], [15, 10, 5, 0])


def test_work_that_is_not_the_same_again_is_refused():
    calls = []

    def forward(inputs):
        calls.append(inputs)
        return shown(inputs) + len(calls)

    with pytest.raises(RecordedStepError, match="4 decodes computes something else"):
        graphs(forward)


def test_sizes_end_with_the_largest_batch():
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256)[-1] == 256
