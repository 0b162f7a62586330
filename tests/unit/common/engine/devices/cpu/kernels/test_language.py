"""What kernels are written in, against torch."""

import pytest
import torch

from common.engine.devices.cpu.kernels import language
from common.engine.devices.cpu.kernels.compiled import Call, Kernel
from common.engine.devices.cpu.kernels.language import ElementType, element_type_of

FLOAT32 = ElementType.FLOAT32


def mapped(function, inputs, out):
    """`function` of each 16 numbers, by a kernel."""

    def body(b, task, a):
        a.out.at(task * 16).store(function(b, a.inputs.at(task * 16).load(16)))

    kernel = Kernel("mapped", {"inputs": FLOAT32, "out": element_type_of(out.dtype)}, body)
    Call(kernel, inputs=inputs.data_ptr(), out=out.data_ptr()).run(inputs.numel() // 16, 2)
    return out


def test_exp():
    inputs = torch.linspace(-120, 88, 16 * 4000)
    expected = inputs.double().exp()
    out = mapped(lambda b, x: b.exp(x), inputs, torch.empty_like(inputs))
    normal = inputs > -87.3
    assert float(((out - expected).abs() / expected)[normal].max()) < 2.5e-7
    assert not out[~normal].any()


@pytest.mark.parametrize(("degree", "error"), [(4, 3e-6), (6, 2e-7)])
@pytest.mark.parametrize("can_scale", [True, False])
def test_powers_of_two(degree, error, can_scale, monkeypatch):
    if not can_scale:
        monkeypatch.setattr(language, "_SCALED_LANES", None)
    inputs = torch.linspace(-125, 126, 16 * 4000)
    out = mapped(lambda b, x: b.exp2(x, degree=degree), inputs, torch.empty_like(inputs))
    expected = inputs.double().exp2()
    assert float(((out - expected).abs() / expected).max()) < error
    inputs[:16], inputs[16:32] = 0.0, -1e35
    assert mapped(lambda b, x: b.exp2(x, degree=degree), inputs, out)[:32].tolist() == [1.0] * 16 + [0.0] * 16


def test_tanh():
    inputs = torch.linspace(-30, 30, 16 * 4000)
    out = mapped(lambda b, x: b.tanh(x), inputs, torch.empty_like(inputs))
    torch.testing.assert_close(out, inputs.tanh(), atol=2e-7, rtol=0)


def test_bfloat16_is_rounded_as_torch_rounds_it():
    inputs = torch.cat([torch.randn(16 * 500) * 10.0**e for e in range(-38, 38, 4)])
    inputs[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    inputs[4:6] = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)  # ties
    out = mapped(lambda b, x: x, inputs, torch.empty(inputs.shape, dtype=torch.bfloat16))
    torch.testing.assert_close(out, inputs.bfloat16(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_bytes_are_read_and_rounded_as_torch_does_it(dtype):
    limit = 448 if dtype == torch.float8_e4m3fn else 127
    inputs = torch.cat([torch.randn(16 * 500) * 10.0**e for e in range(-5, 4)]).clamp(-limit, limit)
    inputs[:6] = torch.tensor([-0.0, 2.0**-10, 1.5 * 2.0**-9, 17.0, 19.0, 2.5])  # ties
    out = mapped(lambda b, x: x, inputs, torch.empty(inputs.shape, dtype=dtype))
    expected = (inputs.round() if dtype == torch.int8 else inputs).to(dtype)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))

    def body(b, task, a):
        a.out.at(task * 16).store(a.inputs.at(task * 16).load(16))

    kernel = Kernel("widened", {"inputs": element_type_of(dtype), "out": FLOAT32}, body)
    every, found = torch.arange(256, dtype=torch.uint8).view(dtype), torch.empty(256)
    Call(kernel, inputs=every.data_ptr(), out=found.data_ptr()).run(16, 1)
    is_number = ~every.float().isnan()
    assert torch.equal(found[is_number], every.float()[is_number])


def test_sums_of_many_vectors_at_once():
    inputs = torch.randn(16, 16)
    out = torch.empty(16)

    def body(b, task, a):
        a.out.store(b.sums(lambda row: a.inputs.at(16 * row).load(16), 16))

    Call(Kernel("sums", {"inputs": FLOAT32, "out": FLOAT32}, body), inputs=inputs.data_ptr(), out=out.data_ptr()).run(
        1, 1
    )
    torch.testing.assert_close(out, inputs.sum(1))


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("num_tasks", [0, 1, 1000])
def test_each_task_is_done_once(num_tasks, num_threads):
    counts = torch.zeros(1001)

    def body(b, task, a):
        a.counts.at(task).store(a.counts.at(task).load() + a.step.load())

    step = torch.ones(1)
    call = Call(Kernel("count", {"counts": FLOAT32, "step": FLOAT32}, body), counts=counts.data_ptr())
    call.keep("step", step)
    for _ in range(2):
        call.run(num_tasks, num_threads)
    assert (counts[:num_tasks] == 2).all()
    assert not counts[num_tasks:].any()
