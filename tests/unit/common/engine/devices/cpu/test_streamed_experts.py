"""Mixtures of experts on kernels, beside the modules of transformers that they stand for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from common.engine.devices.cpu import packed_experts, streamed_experts
from common.engine.devices.cpu.kernels.experts import MAX_TOKENS
from common.engine.devices.cpu.packed_experts import PackedExperts
from common.engine.devices.cpu.streamed_experts import StreamedExperts, stream_experts

SIZE, WIDTH, NUM_EXPERTS, CHOICES = 96, 64, 7, 3
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 0.03)]

Experts = Callable[[MixtralExperts], nn.Module]


def packed_of(experts: MixtralExperts) -> PackedExperts:
    return PackedExperts(experts.gate_up_proj, experts.down_proj)


KINDS = [StreamedExperts, packed_of]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_a_token_gets_the_sum_of_its_experts(kind: Experts, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    own = experts_of(dtype=dtype)
    streamed = kind(own)
    for num_tokens in (0, 1, 2, 5, 33, MAX_TOKENS, MAX_TOKENS + 1, 300):
        hidden = torch.randn(num_tokens, SIZE).to(dtype)
        index = torch.rand(num_tokens, NUM_EXPERTS - 1).topk(CHOICES).indices  # the last expert has no tokens
        weights = torch.rand(num_tokens, CHOICES).to(dtype)
        found = streamed(hidden, index, weights)
        assert (found.dtype, found.shape) == (dtype, hidden.shape)
        torch.testing.assert_close(found, own(hidden, index, weights), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_a_packed_token_gets_the_same_beside_any_others(dtype: torch.dtype, tolerance: float) -> None:
    """Bit by bit, however many rows an expert has."""
    torch.manual_seed(0)
    packed = packed_of(experts_of(dtype=dtype))
    hidden, weights = torch.randn(200, SIZE).to(dtype), torch.rand(200, 2).to(dtype)
    index = torch.tensor([[2, 5]]).expand(200, 2)
    together = packed(hidden, index, weights)
    for i in (0, 65, 66, 101, 199):
        assert torch.equal(together[i : i + 1], packed(*(each[i : i + 1] for each in (hidden, index, weights))))


def test_where_bfloat16_is_widened_any_number_of_tokens_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with weights that are not packed."""
    torch.manual_seed(0)
    own = experts_of(size=80, dtype=torch.bfloat16)
    num_tokens = 2 * MAX_TOKENS + 3
    hidden, weights = torch.randn(num_tokens, 80).bfloat16(), torch.rand(num_tokens, CHOICES).bfloat16()
    index = torch.rand(num_tokens, NUM_EXPERTS).topk(CHOICES).indices
    expected = own(hidden, index, weights)
    monkeypatch.setattr(streamed_experts, "only_widens_bfloat16", lambda: True)
    streamed = StreamedExperts(own)
    monkeypatch.setattr(own, "forward", lambda *_: pytest.fail("went through torch"))
    torch.testing.assert_close(streamed(hidden, index, weights), expected, rtol=0.03, atol=0.03)


def test_tokens_of_another_type_than_packed_weights_are_refused() -> None:
    packed = packed_of(experts_of(dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"inputs are of torch\.float32, weights of torch\.bfloat16"):
        packed(torch.randn(2, SIZE), torch.tensor([[0], [1]]), torch.ones(2, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_after_the_last_is_none(kind: Experts) -> None:
    """As for tokens of which another rank has the experts."""
    streamed = kind(experts_of())
    hidden, weights = torch.randn(2, SIZE), torch.rand(2, 2)
    found = streamed(hidden, torch.tensor([[NUM_EXPERTS, 3], [NUM_EXPERTS, NUM_EXPERTS]]), weights)
    torch.testing.assert_close(found[:1], streamed(hidden[:1], torch.tensor([[3]]), weights[:1, 1:]))
    assert not found[1].any()
    assert not streamed(hidden[1:], torch.tensor([[NUM_EXPERTS, NUM_EXPERTS]]), weights[1:]).any()


def test_only_experts_that_the_kernels_compute_are_replaced() -> None:
    with_limits = experts_of()
    with_limits._apply_gate = lambda gate_up: swiglu(gate_up.clamp(max=1e4))
    model = nn.ModuleList(
        [experts_of(), experts_of(activation="gelu"), experts_of(size=68), with_limits, nn.Linear(4, 4)]
    )
    assert stream_experts(model) == 1
    assert isinstance(model[0], PackedExperts)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"])
def test_activations_that_large_numbers_hardly_tell_from_silu_are_not_replaced(activation: str) -> None:
    experts = experts_of(activation=activation, dtype=torch.bfloat16)
    experts.gate_up_proj *= 8.0
    assert stream_experts(nn.ModuleList([experts])) == 0


def test_experts_are_given_up_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([experts_of() for _ in range(4)])
    originals, alive = [weakref.ref(experts.down_proj) for experts in model], []
    pack = PackedExperts.__init__

    def note(self: PackedExperts, *weights: torch.Tensor) -> None:
        gc.collect()
        alive.append(sum(original() is not None for original in originals))
        pack(self, *weights)

    streamed_experts._takes_many(SIZE, WIDTH, torch.float32)
    monkeypatch.setattr(PackedExperts, "__init__", note)
    assert stream_experts(model) == 4
    assert alive == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("has_tiles", "multiplies_pairs", "kind"),
    [(False, False, PackedExperts), (False, True, PackedExperts), (True, True, StreamedExperts)],
)
def test_experts_in_bfloat16_are_packed_unless_torch_has_matrix_instructions(
    monkeypatch: pytest.MonkeyPatch, has_tiles: bool, multiplies_pairs: bool, kind: type[nn.Module]
) -> None:
    monkeypatch.setattr(packed_experts, "has_tiles", lambda: has_tiles)
    monkeypatch.setattr(packed_experts, "MULTIPLIES_PAIRS", multiplies_pairs)
    monkeypatch.setattr(packed_experts, "only_widens_bfloat16", lambda: not (has_tiles or multiplies_pairs))
    model = nn.ModuleList([experts_of(dtype=torch.bfloat16)])
    assert stream_experts(model) == 1
    assert isinstance(model[0], kind)


def test_packed_experts_that_give_many_tokens_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PackedExperts.forward

    def wrong(self: PackedExperts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden, index, weights) * (1 + (len(hidden) > MAX_TOKENS))

    monkeypatch.setattr(PackedExperts, "forward", wrong)
    streamed_experts._takes_many.cache_clear()
    model = nn.ModuleList([experts_of()])
    assert stream_experts(model) == 1
    assert isinstance(model[0], StreamedExperts)
    streamed_experts._takes_many.cache_clear()
