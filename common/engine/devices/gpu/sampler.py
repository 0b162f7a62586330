"""Sampling by Triton kernels, of requests that they can sample: the result stays on the device until it is asked for.

The tokens are those of `Sampler` but for rounding: probabilities are summed in another order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton

from common.engine.devices.gpu.kernels.sampling import NUMBERS, best_kernel, draw_kernel, penalty_kernel, settle_kernel
from common.engine.sampling.draws import Draws, Penalties


def sample_on_device(logits: torch.Tensor, draws: Draws, penalties: Penalties | None) -> torch.Tensor:
    """Token ids [rows] for logits [rows, vocabulary], on their device; -1 where the best logit is not finite."""
    if penalties is not None:
        logits = _penalised(logits, penalties)
    num_rows, num_tokens = logits.shape
    device = logits.device
    keys, params = _upload(draws, device)
    num_parts = triton.cdiv(num_tokens, NUMBERS)
    part_best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    part_value = torch.empty((num_rows, num_parts), dtype=torch.float64, device=device)
    part_winner = torch.empty((num_rows, num_parts), dtype=torch.int64, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    sizes = {"NUM_TOKENS": num_tokens, "SIZE": NUMBERS}
    parts = {"PARTS": num_parts, "PADDED_PARTS": triton.next_power_of_2(num_parts)}
    grid = (num_rows, num_parts)
    stride = logits.stride(0)
    best_kernel[grid](logits, part_best, stride, **sizes)
    draw_kernel[grid](logits, part_best, keys, params, part_value, part_winner, stride, **sizes, **parts)
    is_drawn = draws.params[:, 0] > 0
    has_top_k, has_top_p = draws.params[:, 1] > 0, draws.params[:, 2] < 1
    has_mass = is_drawn & has_top_k & has_top_p
    top_mass = _top_mass(logits, params, draws, has_mass) if has_mass.any() else part_value  # not read then
    settle_kernel[(num_rows,)](
        logits,
        part_best,
        keys,
        params,
        part_value,
        part_winner,
        top_mass,
        tokens,
        stride,
        **sizes,
        **parts,
        num_warps=8,
    )
    return tokens


def _penalised(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """A copy, float32."""
    num_penalised, num_tokens = len(penalties.rows), logits.shape[1]
    logits = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(logits)
    arrays = np.concatenate([penalties.rows, penalties.places, penalties.weights])
    uploaded = _on(logits.device, torch.from_numpy(arrays))
    sizes = [num_penalised, len(penalties.places), len(penalties.weights)]
    rows, places, weights = torch.split(uploaded, sizes)
    counts = torch.zeros(num_penalised * num_tokens, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, places, weights)
    factors = _on(logits.device, torch.from_numpy(penalties.factors))
    grid = (num_penalised, triton.cdiv(num_tokens, NUMBERS))
    # Without fused products, whose other rounding would be other logits than the sampler's.
    penalty_kernel[grid](logits, counts, rows, factors, NUM_TOKENS=num_tokens, SIZE=NUMBERS, enable_fp_fusion=False)
    return logits


def _top_mass(
    logits: torch.Tensor, params: torch.Tensor, draws: Draws, is_wanted: npt.NDArray[np.bool_]
) -> torch.Tensor:
    """exp(score) summed over the top_k best tokens of each row, [rows] float64; of the wanted rows, else anything."""
    count = min(int(draws.params[is_wanted, 1].max()), logits.shape[1])
    best = torch.topk(logits, count, dim=-1).values.float()
    scores = (best - best[:, :1]) / params[:, :1]
    is_top = torch.arange(count, device=logits.device)[None] < params[:, 1:2]
    return torch.where(is_top, scores.exp().double(), 0.0).sum(dim=-1)


def _upload(draws: Draws, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Both arrays, in one transfer."""
    num_rows = len(draws.keys)
    packed = _on(device, torch.from_numpy(np.concatenate([draws.keys, draws.params.reshape(-1).view(np.int64)])))
    return packed[:num_rows], packed[num_rows:].view(torch.float32).view(num_rows, 4)


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
