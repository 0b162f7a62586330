"""The selective scan beside its definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu, softplus

from common.engine.model.scan import scan_from_state, selective_scan

NUM_TEXTS, NUM_CHANNELS, NUM_TOKENS, SIZE = 2, 6, 150, 4


@pytest.mark.parametrize("split", [0, 1, 64, 149])
def test_a_scan_from_a_state_on_is_that_of_the_whole_text(split: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, steps, gates = (torch.randn(NUM_TEXTS, NUM_CHANNELS, NUM_TOKENS, generator=generator) for _ in range(3))
    written, read = (torch.randn(NUM_TEXTS, SIZE, NUM_TOKENS, generator=generator) for _ in range(2))
    decays, skip, bias = -torch.rand(NUM_CHANNELS, SIZE), torch.rand(NUM_CHANNELS), torch.rand(NUM_CHANNELS)
    expected, last = torch.empty_like(inputs), torch.zeros(NUM_TEXTS, NUM_CHANNELS, SIZE)
    for token in range(NUM_TOKENS):
        own, step = inputs[..., token], softplus(steps[..., token] + bias)
        last = torch.exp(decays * step[..., None]) * last + (step * own)[..., None] * written[:, None, :, token]
        output = (last * read[:, None, :, token]).sum(dim=-1) + skip * own
        expected[..., token] = output * silu(gates[..., token])
    state, outputs = None, []
    for part in (slice(0, split), slice(split, NUM_TOKENS)):
        own_inputs, own_steps, own_written, own_read, own_gates = (
            each[..., part] for each in (inputs, steps, written, read, gates)
        )
        with scan_from_state(state):
            output, state = selective_scan(
                own_inputs, own_steps, decays, own_written, own_read, skip, own_gates,
                delta_bias=bias, delta_softplus=True, return_last_state=True,
            )  # fmt: skip
        outputs.append(output)
    assert state is not None
    torch.testing.assert_close(torch.cat(outputs, dim=-1), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_scans_of_heads_begin_from_their_states_in_turn() -> None:
    states = torch.randn(NUM_TEXTS, 3, NUM_CHANNELS, SIZE)
    nothing, written = torch.zeros(NUM_TEXTS, NUM_CHANNELS, 1), torch.ones(NUM_TEXTS, SIZE, 1)
    decays = -torch.ones(NUM_CHANNELS, SIZE)
    with scan_from_state(states):
        after = [
            selective_scan(nothing, nothing, decays, written, written, return_last_state=True)[1] for _ in range(3)
        ]
    assert torch.equal(torch.stack(after, dim=1), states)
