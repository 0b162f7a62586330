"""Recorded kernel calls do what they did, again and in order."""

import pytest
import torch
from torch import nn

from common.engine.devices.cpu.kernels.compiled import Call, CannotRecordError, Kernel, is_recording, result
from common.engine.devices.cpu.kernels.language import ElementType
from common.engine.devices.cpu.kernels.program import Program, Workspace, recording
from common.engine.devices.cpu.streamed_linear import StreamedLinear

NUMBERS = 1000
ARGUMENTS = {"inputs": ElementType.FLOAT32, "out": ElementType.FLOAT32}


def reverse(inputs, num_threads):
    """Out of place, so that each number depends on another task of the call before."""

    def body(b, task, a):
        last = b.number(NUMBERS - 1) - task
        a.out.at(task).store(a.inputs.at(last).load() + b.real(task))

    out = result((1, NUMBERS), torch.float32)
    call = Call(Kernel("reverse", ARGUMENTS, body))
    call.point("inputs", inputs)
    call.point("out", out)
    call.run(NUMBERS, num_threads)
    return out


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_calls_wait_for_the_one_before_in_every_run(num_threads):
    inputs = torch.zeros(1, NUMBERS)
    with recording(Workspace(1)) as recorded:
        out = inputs
        for _ in range(7):
            out = reverse(out, num_threads)
    program = Program(recorded)
    assert not is_recording()
    for _ in range(20):
        inputs.copy_(torch.randn(1, NUMBERS))
        expected = inputs
        for _ in range(7):
            expected = reverse(expected, 1)
        program.run()
        assert torch.equal(out, expected)


def test_programs_share_memory_and_keep_what_they_use():
    workspace = Workspace(2)
    inputs = torch.arange(float(NUMBERS))[None]
    with recording(workspace) as recorded:
        out = reverse(reverse(inputs, 1), 1)
    first = Program(recorded)
    with recording(workspace):
        places = [workspace.take((2, width), torch.float32) for width in (NUMBERS, NUMBERS, NUMBERS, 2 * NUMBERS)]
        assert places[0].data_ptr() == places[2].data_ptr() != places[1].data_ptr() != places[3].data_ptr()
        for place in places:
            place.fill_(torch.nan)
    first.run()
    assert torch.equal(out, reverse(reverse(inputs, 1), 1))


def test_nothing_is_left_out_of_a_recording():
    linear = StreamedLinear(nn.Linear(40, 512))  # no kernel for so many inputs
    with pytest.raises(CannotRecordError, match="1000 rows of a linear layer"), recording(Workspace(1000)):
        linear(torch.zeros(1000, 40))
    assert not is_recording()
