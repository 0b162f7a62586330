"""The selective scan of Mamba (not Mamba 2) that can begin from a state; that of `transformers` begins from zeros."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional

_CHUNK = 64  # tokens, whose states are in memory at once
_STATES: ContextVar[Iterator[torch.Tensor] | None] = ContextVar("states", default=None)  # of scans to come


@contextmanager
def scan_from_state(state: torch.Tensor | None) -> Iterator[None]:
    """Lets scans within begin from `state` [texts, channels, size], or, as each head of Zamba is scanned by itself, in
    turn from those of [texts, heads, channels, size]; None: from zeros."""
    heads = state[:, None] if state is not None and state.dim() == 3 else state
    token = _STATES.set(None if heads is None else (heads[:, head] for head in range(heads.shape[1])))
    try:
        yield
    finally:
        _STATES.reset(token)


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  named as there
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes what transformers' function of the name does. `hidden_states`, `dt` and `z` are [texts, channels,
    tokens], `A` [channels, size], `B` and `C` [texts, size, tokens]; returns outputs [texts, channels, tokens], and the
    last state [texts, channels, size] if wanted."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    if delta_softplus:
        dt = functional.softplus(dt)
    inputs = dt.float() * hidden_states.float()
    states_before = _STATES.get()
    if states_before is None:
        state = torch.zeros(*hidden_states.shape[:2], A.shape[1], dtype=torch.float32, device=A.device)
    else:
        state = next(states_before)
    outputs = torch.empty_like(inputs)
    for first in range(0, hidden_states.shape[2], _CHUNK):
        part = slice(first, first + _CHUNK)
        own_dt, own_inputs, own_b, own_c = (each[..., part].permute(2, 0, 1).float() for each in (dt, inputs, B, C))
        decays = torch.exp(own_dt[..., None] * A)  # [tokens, texts, channels, size], as are the states
        states = own_inputs[..., None] * own_b[:, :, None]
        for token, decay in enumerate(decays):
            state = states[token].addcmul_(decay, state)
        outputs[..., part] = torch.matmul(states, own_c[..., None])[..., 0].permute(1, 2, 0)
    if D is not None:
        outputs = outputs + hidden_states * D[:, None]
    if z is not None:
        outputs = outputs * functional.silu(z)
    outputs = outputs.to(hidden_states.dtype)
    return (outputs, state.clone()) if return_last_state else outputs


SCANS = {"mamba_selective_scan": selective_scan}
"""By the name of the function of transformers for which it stands."""
