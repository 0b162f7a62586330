"""Steps of recurrences on kernels, beside the functions of transformers that they stand for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from common.engine.devices.cpu.recurrences import CpuRecurrences
from common.engine.devices.recurrences import NoKernelError

SOURCES, TARGETS = torch.tensor([4, 1, 2]), torch.tensor([4, 0, 2])  # slots; one state moves on to another slot
NUM_SLOTS, NUM_SEQUENCES = 6, len(SOURCES)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}

generator = torch.Generator().manual_seed(0)


def cases(*values: Any) -> list[Any]:
    """The first of the values; the others are for `make test-kernels`."""
    return [values[0], *(pytest.param(*_tuple(value), marks=pytest.mark.kernels) for value in values[1:])]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def states_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """In slots with more than one state each, as those of several layers."""
    size = torch.Size(shape).numel()
    return random(NUM_SLOTS, size + 8, dtype=dtype)[:, :size].unflatten(1, shape)


def check(family: str, name: str, state: str, arguments: dict[str, Any], *, dtype: torch.dtype) -> None:
    """Compares outputs, and the states of all slots, with what transformers computes in float32."""
    own = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    states: torch.Tensor = arguments[state]
    kept = states.to(torch.float32, copy=True)
    given = kept[SOURCES]
    wide = {key: each.float() if isinstance(each, torch.Tensor) else each for key, each in arguments.items()}
    expected = own(**wide | {state: given})
    if isinstance(expected, tuple):
        expected, given = expected
    kept[TARGETS] = given
    recurrences = CpuRecurrences()
    recurrences.begin_step(SOURCES, TARGETS)
    found = recurrences.functions[name](**arguments)
    if isinstance(found, tuple):
        found, returned = found
        assert returned is states
    tolerance = TOLERANCES[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states.float(), kept, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("channels", "width"), cases((24, 3), (80, 4), (16, 2), (200, 4)))
@pytest.mark.parametrize(("has_bias", "activation"), cases((True, "silu"), (False, None)))
@pytest.mark.parametrize("dtype", cases(*TOLERANCES))
def test_convolution(channels: int, width: int, has_bias: bool, activation: str | None, dtype: torch.dtype) -> None:
    arguments = {
        "hidden_states": random(NUM_SEQUENCES, 1, channels + 16, dtype=dtype)[..., :channels].transpose(1, 2),
        "conv_state": states_of(channels, width, dtype=dtype),
        "weight": random(channels, width, dtype=dtype),
        "bias": random(channels, dtype=dtype) if has_bias else None,
        "activation": activation,
    }
    check("qwen3_next", "causal_conv1d_update", "conv_state", arguments, dtype=dtype)


@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"])
@pytest.mark.parametrize(("key_dim", "value_dim"), cases((32, 96), (16, 16), (8, 4)))
@pytest.mark.parametrize("dtype", cases(*TOLERANCES))
@pytest.mark.parametrize("has_norms", cases(True, False))
def test_delta_rule(name: str, key_dim: int, value_dim: int, dtype: torch.dtype, has_norms: bool) -> None:
    by_channel = name.startswith("recurrent_kimi")
    heads, key_heads = 4, 4 if by_channel else 2
    widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    projected = random(NUM_SEQUENCES, 1, sum(widths), dtype=dtype)
    if not has_norms:
        projected = projected / key_dim**0.5
    query, key, value = projected.split(widths, dim=-1)
    arguments = {
        "query": query.unflatten(2, (key_heads, key_dim)),
        "key": key.unflatten(2, (key_heads, key_dim)),
        "value": value.unflatten(2, (heads, value_dim)),
        "g": -random(NUM_SEQUENCES, 1, heads, *([key_dim] if by_channel else [])).abs(),
        "beta": random(NUM_SEQUENCES, 1, heads, dtype=dtype).sigmoid(),
        "initial_state": states_of(heads, key_dim, value_dim),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": has_norms,
    }
    check("kimi_linear" if by_channel else "qwen3_next", name, "initial_state", arguments, dtype=dtype)


@pytest.mark.parametrize(("channels", "size"), cases((80, 16), (24, 4)))
@pytest.mark.parametrize("has_gate", cases(True, False))
@pytest.mark.parametrize("dtype", cases(*TOLERANCES))
def test_mamba(channels: int, size: int, has_gate: bool, dtype: torch.dtype) -> None:
    rows = [random(NUM_SEQUENCES, 2 * channels, dtype=dtype)[:, :channels] for _ in range(2)]
    arguments = {
        "state": states_of(channels, size),
        "hidden_states": rows[0],
        "dt": random(NUM_SEQUENCES, channels, dtype=dtype),
        "A": -random(channels, size).abs(),
        "B": random(NUM_SEQUENCES, 2 * size, dtype=dtype)[:, :size],
        "C": random(NUM_SEQUENCES, size, dtype=dtype),
        "D": random(channels, dtype=dtype),
        "dt_bias": random(channels),
        "dt_softplus": True,
        "z": rows[1] if has_gate else None,
    }
    check("jamba", "mamba_selective_state_update", "state", arguments, dtype=dtype)


@pytest.mark.parametrize(("heads", "head_dim", "groups", "size"), cases((4, 32, 2, 48), (3, 8, 1, 16)))
@pytest.mark.parametrize("dtype", cases(*TOLERANCES))
def test_mamba2(heads: int, head_dim: int, groups: int, size: int, dtype: torch.dtype) -> None:
    def by_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., None].expand(*tensor.shape, head_dim)

    arguments = {
        "state": states_of(heads, head_dim, size),
        "hidden_states": random(NUM_SEQUENCES, heads, head_dim, dtype=dtype),
        "dt": by_head(random(NUM_SEQUENCES, heads, dtype=dtype)),
        "A": by_head(-random(heads).abs())[..., None].expand(-1, -1, size),
        "B": random(NUM_SEQUENCES, groups, size, dtype=dtype),
        "C": random(NUM_SEQUENCES, groups, size, dtype=dtype),
        "D": by_head(random(heads, dtype=dtype)),
        "dt_bias": by_head(random(heads)),
        "dt_softplus": True,
    }
    check("bamba", "mamba2_selective_state_update", "state", arguments, dtype=dtype)


def test_shapes_without_a_kernel_are_refused() -> None:
    recurrences = CpuRecurrences()
    with pytest.raises(NoKernelError, match="7 channels of 4 tokens"):
        recurrences.functions["causal_conv1d_update"](random(1, 7, 1), random(1, 7, 4), random(7, 4))
