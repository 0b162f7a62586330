"""Decode steps as recorded calls of a kernel that shows what it is given."""

import pytest
import torch

from common.engine.devices.attention import AttentionMetadata
from common.engine.devices.cpu.decode_programs import DecodePrograms
from common.engine.devices.cpu.kernels.compiled import Call, CannotRecordError, Kernel, is_recording, result
from common.engine.devices.cpu.kernels.language import ElementType
from common.engine.devices.decode_inputs import DecodeInputs, DecodeLimits, RecordedStepError

BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 4, 1000, 5
COLUMNS = ("input_ids", "positions", "slots", "seq_lens", "block_tables")


class Forward:
    """Instead of logits, computes all that a forward pass is given; notes the steps that Python takes part in."""

    def __init__(self):
        self.steps = []

    def __call__(self, inputs):
        attention = inputs.attention
        self.steps.append((len(inputs.tokens), max(attention.seq_lens), is_recording()))

        def body(b, task, a):
            for column, name in enumerate(COLUMNS[:-1]):
                a.out.at(task * 6 + column).store(b.real(getattr(a, name).at(task).load()))
            for column in range(2):
                block = a.block_tables.at(task * a.table_width + column).load()
                a.out.at(task * 6 + 4 + column).store(b.real(block))

        arguments = dict.fromkeys(COLUMNS, ElementType.INT64) | {"table_width": None, "out": ElementType.FLOAT32}
        call = Call(Kernel("shown", arguments, body), table_width=attention.block_tables.shape[1])
        out = result((len(inputs.tokens), 6), torch.float32)
        tensors = (
            inputs.tokens,
            inputs.positions,
            attention.slot_mapping,
            attention.seq_lens_tensor,
            attention.block_tables,
            out,
        )
        for name, tensor in zip((*COLUMNS, "out"), tensors, strict=True):
            call.point(name, tensor)
        call.run(len(inputs.tokens), 1)
        return out


def programs(forward):
    return DecodePrograms(forward, DecodeLimits(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE))


def decodes(count, longest=20):
    lengths = torch.arange(longest, longest - count, -1)
    width = -(-longest // BLOCK_SIZE)
    return DecodeInputs(
        torch.randint(1000, (count,)),
        lengths - 1,
        AttentionMetadata(
            num_decodes=count,
            query_start=list(range(count + 1)),
            seq_lens=lengths.tolist(),
            seq_lens_tensor=lengths,
            block_tables=torch.randint(1000, (count, width)),
            slot_mapping=lengths * 7,
        ),
    )


def test_a_recorded_step_sees_the_inputs_of_each_step():
    forward = Forward()
    recorded = programs(forward)
    for count, longest in ((1, 20), (3, 20), (5, 8), (3, 255), (1, 256), (5, 9), (3, 21)):
        inputs = decodes(count, longest)
        assert torch.equal(recorded.run(inputs), Forward()(inputs))
    once_each = [(1, 20, False), (1, 256, True), (3, 20, False), (3, 256, True), (5, 8, False), (5, 256, True)]
    assert forward.steps == once_each
    assert recorded.run(decodes(6)) is None


def test_longer_sequences_are_recorded_anew():
    forward = Forward()
    recorded = programs(forward)
    for longest in (20, 257, 300, 512, 600, 1000):
        inputs = decodes(2, longest)
        assert torch.equal(recorded.run(inputs), Forward()(inputs))
    assert [seq_len for _, seq_len, is_recorded in forward.steps if is_recorded] == [256, 512, 1000]


def test_what_cannot_be_recorded_is_computed_as_usual():
    shown = Forward()

    def forward(inputs):
        if is_recording() and len(inputs.tokens) > 2:
            raise CannotRecordError
        return shown(inputs)

    recorded = programs(forward)
    inputs = decodes(4)
    assert torch.equal(recorded.run(inputs), Forward()(inputs))
    assert recorded.run(inputs) is None
    assert recorded.run(decodes(2)) is not None


def test_a_recorded_step_that_computes_something_else_is_refused():
    shown = Forward()

    def forward(inputs):
        return shown(inputs).add_(0 if is_recording() else 1)  # as an operator of torch that is not recorded

    with pytest.raises(RecordedStepError, match="of 2 sequences computes something else"):
        programs(forward).run(decodes(2))


def test_a_profile_sees_each_kernel():
    recorded = programs(Forward())
    recorded.run(decodes(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert recorded.run(decodes(2)) is None


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
