"""Mixtures of experts on kernels, beside the modules of transformers that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from common.engine.devices.cpu import streamed_experts
from common.engine.devices.cpu.kernels.experts import MAX_TOKENS
from common.engine.devices.cpu.streamed_experts import StreamedExperts, stream_experts

SIZE, WIDTH, NUM_EXPERTS, CHOICES = 80, 48, 7, 3


def experts_of(size: int = SIZE, activation: str = "silu", dtype: torch.dtype = torch.float32) -> MixtralExperts:
    config = MixtralConfig(
        hidden_size=size, intermediate_size=WIDTH, num_local_experts=NUM_EXPERTS, hidden_act=activation
    )
    config._experts_implementation = "grouped_mm"
    experts = MixtralExperts(config)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(0.0, weight.shape[2] ** -0.5)
    return experts.to(dtype).requires_grad_(False)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_a_token_gets_the_sum_of_its_experts(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    own = experts_of(dtype=dtype)
    streamed = StreamedExperts(own)
    for num_tokens in (0, 1, 2, 5, 33, MAX_TOKENS, MAX_TOKENS + 1):
        hidden = torch.randn(num_tokens, SIZE).to(dtype)
        index = torch.rand(num_tokens, NUM_EXPERTS - 1).topk(CHOICES).indices  # the last expert has no tokens
        weights = torch.rand(num_tokens, CHOICES).to(dtype)
        found = streamed(hidden, index, weights)
        assert (found.dtype, found.shape) == (dtype, hidden.shape)
        torch.testing.assert_close(found, own(hidden, index, weights), rtol=tolerance, atol=tolerance)


def test_without_instructions_for_bfloat16_any_number_of_tokens_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    own = experts_of(dtype=torch.bfloat16)
    num_tokens = 2 * MAX_TOKENS + 3
    hidden, weights = torch.randn(num_tokens, SIZE).bfloat16(), torch.rand(num_tokens, CHOICES).bfloat16()
    index = torch.rand(num_tokens, NUM_EXPERTS).topk(CHOICES).indices
    expected = own(hidden, index, weights)
    monkeypatch.setattr(streamed_experts, "only_widens_bfloat16", lambda: True)
    streamed = StreamedExperts(own)
    monkeypatch.setattr(own, "forward", lambda *_: pytest.fail("went through torch"))
    torch.testing.assert_close(streamed(hidden, index, weights), expected, rtol=0.03, atol=0.03)


def test_the_expert_after_the_last_is_none() -> None:
    """As for tokens of which another rank has the experts."""
    streamed = StreamedExperts(experts_of())
    hidden, weights = torch.randn(2, SIZE), torch.rand(2, 2)
    found = streamed(hidden, torch.tensor([[NUM_EXPERTS, 3], [NUM_EXPERTS, NUM_EXPERTS]]), weights)
    torch.testing.assert_close(found[:1], streamed(hidden[:1], torch.tensor([[3]]), weights[:1, 1:]))
    assert not found[1].any()


def test_only_experts_that_the_kernels_compute_are_replaced() -> None:
    with_limits = experts_of()
    with_limits._apply_gate = lambda gate_up: swiglu(gate_up.clamp(max=1e4))
    model = nn.ModuleList(
        [experts_of(), experts_of(activation="gelu"), experts_of(size=68), with_limits, nn.Linear(4, 4)]
    )
    assert stream_experts(model) == 1
    assert isinstance(model[0], StreamedExperts)
