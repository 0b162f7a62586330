"""Steps of recurrences on CPU: causal convolutions, gated delta rules, and the state spaces of Mamba and Mamba 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from common.engine.devices.cpu.kernels.compiled import Call, threads_for
from common.engine.devices.cpu.kernels.convolution import CHANNELS, can_convolve, convolution_kernel
from common.engine.devices.cpu.kernels.delta_rule import DeltaShape, delta_rule_kernel
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.state_space import StateSpaceShape, state_space_kernel
from common.engine.devices.recurrences import NoKernelError

_TYPES = (torch.float32, torch.bfloat16)
_Key = tuple[Any, ...]


class CpuRecurrences:
    """See Recurrences. The arguments have the names that transformers gives them."""

    def __init__(self) -> None:
        self.functions: Mapping[str, Callable[..., Any]] = {
            "causal_conv1d_update": self._convolve,
            "torch_recurrent_gated_delta_rule": self._apply_delta_rule,
            "recurrent_kimi_delta_attention": self._apply_delta_rule,
            "mamba_selective_state_update": self._update_mamba,
            "mamba2_selective_state_update": self._update_mamba2,
        }
        self._calls: dict[_Key, Call] = {}
        self._sources = self._targets = torch.empty(0, dtype=torch.int64)

    def begin_step(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See Recurrences."""
        self._sources, self._targets = sources, targets

    def _convolve(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """[sequences, channels, 1], states [slots, channels, width] -> [sequences, channels, 1]"""
        num_sequences, channels, _ = hidden_states.shape
        width, dtype = weight.shape[-1], hidden_states.dtype
        has_types = dtype in _TYPES and weight.dtype == conv_state.dtype == dtype
        if not has_types or activation not in (None, "silu") or not can_convolve(channels, width):
            raise NoKernelError(f"a convolution of {channels} channels of {width} tokens in {dtype}, {activation}")
        if conv_state.shape[1:] != (channels, width):
            raise NoKernelError(f"a convolution of {width} tokens with a state of {conv_state.shape[1:]}")
        key = ("convolution", dtype, channels, width, bias is None, activation)
        call = self._calls.get(key)
        if call is None:
            element = element_type_of(dtype)
            has_silu = activation is not None
            kernel = convolution_kernel(element, channels, width, has_bias=bias is not None, has_silu=has_silu)
            call = self._calls[key] = Call(kernel)
        inputs = _with_rows(hidden_states[..., 0])
        out = torch.empty((num_sequences, channels, 1), dtype=dtype)
        weight = weight.contiguous()
        call.point("inputs", inputs)
        call.set("stride", inputs.stride(0))
        call.point("weight", weight)
        if bias is not None:
            call.point("bias", bias)
        self._point_to_states(call, conv_state)
        call.point("out", out)
        num_tasks = -(-channels // min(CHANNELS, channels))
        call.run(num_sequences * num_tasks, threads_for(num_sequences * channels * width))
        return out

    def _apply_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool = True,
        use_qk_l2norm_in_kernel: bool = False,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query and key [sequences, 1, key heads, key dim], value [sequences, 1, value heads, value dim], g [sequences,
        1, value heads] or [sequences, 1, value heads, key dim], beta [sequences, 1, value heads], states [slots, value
        heads, key dim, value dim] -> outputs as values, and the states."""
        num_sequences, _, key_heads, key_dim = key.shape
        value_heads, value_dim = value.shape[2:]
        dtype = query.dtype
        if dtype not in _TYPES or not key.dtype == value.dtype == dtype or initial_state.dtype != torch.float32:
            raise NoKernelError(f"a delta rule in {dtype} with states in {initial_state.dtype}")
        shape = DeltaShape(element_type_of(dtype), key_heads, value_heads, key_dim, value_dim, g.dim() == key.dim())
        if not shape.is_supported:
            raise NoKernelError(f"a delta rule of {shape}")
        call = self._calls.get((shape, use_qk_l2norm_in_kernel))
        if call is None:
            call = Call(delta_rule_kernel(shape, has_norms=use_qk_l2norm_in_kernel))
            self._calls[shape, use_qk_l2norm_in_kernel] = call
        g, beta = (each.float().contiguous() for each in (g, beta))
        query, key, value = (_with_rows(each) for each in (query, key, value))
        out = torch.empty((num_sequences, 1, value_heads, value_dim), dtype=dtype)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            call.point(name, tensor)
            call.set(f"{name}_stride", tensor.stride(0))
        call.point("decays", g)
        call.point("beta", beta)
        call.point("out", out)
        self._point_to_states(call, initial_state)
        num_tasks = num_sequences * value_heads
        call.run(num_tasks, threads_for(num_tasks * key_dim * value_dim))
        return out, initial_state

    def _update_mamba(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803  named as there
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """hidden_states, dt and z [sequences, channels], A [channels, size], B and C [sequences, size], D and dt_bias
        [channels], states [slots, channels, size] -> [sequences, channels]"""
        channels, size = A.shape
        steps = _steps(dt, dt_bias, dt_softplus)
        return self._update(state, hidden_states, steps, A, (B, C), D, z, (channels, channels, 1, size))

    def _update_mamba2(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803  named as there
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """hidden_states and z [sequences, heads, head dim], dt as well, D and dt_bias [heads, head dim], and A [heads,
        head dim, size], the same for all of a head; B and C [sequences, groups, size], states [slots, heads, head dim,
        size] -> [sequences, heads, head dim]"""
        _, heads, head_dim = hidden_states.shape
        groups, size = B.shape[1:]
        steps = _steps(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
        skip = None if D is None else D[:, 0]
        out = self._update(
            state,
            hidden_states.flatten(1),
            steps,
            A[:, 0, 0],
            (B, C),
            skip,
            None if z is None else z.flatten(1),
            (heads * head_dim, heads, groups, size),
        )
        return out.view(hidden_states.shape)

    def _update(
        self,
        states: torch.Tensor,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        decays: torch.Tensor,
        written_and_read: tuple[torch.Tensor, torch.Tensor],
        skip: torch.Tensor | None,
        gate: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> torch.Tensor:
        """`sizes`: channels, heads, groups, and that of a channel's state. Others as in `state_space_kernel`."""
        channels, _, _, size = sizes
        written, read = written_and_read
        dtype = inputs.dtype
        given = (dtype, states.dtype, written.dtype, read.dtype, dtype if gate is None else gate.dtype)
        if any(each not in _TYPES for each in given) or len({*given[:1], *given[2:]}) > 1:
            raise NoKernelError(f"a state space in {given}")
        shape = StateSpaceShape(element_type_of(dtype), element_type_of(states.dtype), *sizes)
        if not shape.is_supported:
            raise NoKernelError(f"a state space of {shape}")
        key = (shape, skip is None, gate is None)
        call = self._calls.get(key)
        if call is None:
            call = Call(state_space_kernel(shape, has_skip=skip is not None, has_gate=gate is not None))
            self._calls[key] = call
        inputs = _with_rows(inputs)
        steps, decays, written, read = (each.contiguous() for each in (steps, decays.float(), written, read))
        out = torch.empty((len(inputs), channels), dtype=dtype)
        call.point("inputs", inputs)
        call.set("inputs_stride", inputs.stride(0))
        call.point("steps", steps)
        call.point("decays", decays)
        call.point("written", written)
        call.point("read", read)
        call.point("out", out)
        if skip is not None:
            skip = skip.float().contiguous()
            call.point("skip", skip)
        if gate is not None:
            gate = _with_rows(gate)
            call.point("gate", gate)
            call.set("gate_stride", gate.stride(0))
        self._point_to_states(call, states)
        num_tasks = -(-channels // shape.share)
        call.run(len(inputs) * num_tasks, threads_for(len(inputs) * channels * size))
        return out

    def _point_to_states(self, call: Call, states: torch.Tensor) -> None:
        call.point("states", states)
        call.set("slot", states.stride(0))
        call.point("sources", self._sources)
        call.point("targets", self._targets)


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, has_softplus: bool) -> torch.Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return functional.softplus(dt) if has_softplus else dt


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [sequences, ...], with the numbers of a sequence side by side."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()
