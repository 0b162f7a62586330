"""Sampling of simple requests on a CPU, with logarithms for a few tokens only: the argmax of the logits, or of score +
Gumbel noise over the whole vocabulary.

The draw is a race: with u the uniform number of a token, the winner has the least time -log(u) * exp(-score). As
-log(u) is at least 1 - u, a bound of each token's time needs no logarithm, and a kernel finds it. Noise, in float64 as
everywhere, is then computed only for tokens whose bound is below the time of the first: one or two of 32,000. So the
tokens are those of `Sampler`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.engine.devices.cpu.kernels.compiled import Call, threads_for
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.sampling import PART, best_kernel, bound_kernel
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.sampling.draws import Draws
from common.engine.sampling.noise import UNIT, gumbel_noise
from common.errors import ModelLoadError

_SLACK = 1.0001  # float32 rounds the bounds by less
_MAX_BOUNDS = 1 << 22  # kept at once
_Floats = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.int64]


class CompiledSampler:
    """See RowSampler. For one model."""

    def __init__(self, num_tokens: int, dtype: torch.dtype) -> None:
        """`dtype` of the logits."""
        self._num_tokens = num_tokens
        self._num_parts = -(-num_tokens // PART)
        self._rows_at_once = max(1, _MAX_BOUNDS // num_tokens)
        # Kept from step to step: page faults of a new allocation take longer than the kernel.
        self._bounds = torch.empty(0, num_tokens)
        element = element_type_of(dtype)
        self._find_best = Call(best_kernel(element, num_tokens))
        self._bound = Call(bound_kernel(element, num_tokens))

    def sample(self, logits: torch.Tensor, draws: Draws) -> _Ids:
        """See RowSampler."""
        parts = [slice(first, first + self._rows_at_once) for first in range(0, len(logits), self._rows_at_once)]
        return np.concatenate(
            [self._sample(logits[part], Draws(draws.keys[part], draws.params[part])) for part in parts]
        )

    def _sample(self, logits: torch.Tensor, draws: Draws) -> _Ids:
        part_best = torch.empty(len(logits), self._num_parts)
        self._run(self._find_best, logits, best=part_best)
        best = part_best.numpy().max(axis=1)
        temperatures = np.ascontiguousarray(draws.params[:, 0])
        is_finite = np.isfinite(best)
        return np.where(is_finite, self._race(logits, best, temperatures, draws.keys, is_finite), -1)

    def _race(
        self, logits: torch.Tensor, best: _Floats, temperatures: _Floats, keys: _Ids, is_finite: npt.NDArray[np.bool_]
    ) -> _Ids:
        if len(self._bounds) < len(logits):
            self._bounds = torch.empty(len(logits), self._num_tokens)
        bounds, least = self._bounds, torch.empty(len(logits), self._num_parts)
        of_rows = {"best": best, "temperatures": temperatures, "keys": keys}
        tensors = {name: torch.from_numpy(array) for name, array in of_rows.items()}
        self._run(self._bound, logits, bounds=bounds, least=least, **tensors)
        token_ids = _first_least(bounds.numpy(), least.numpy())
        drawn = np.flatnonzero(is_finite & (temperatures > 0))
        if len(drawn):
            race = _Race(logits, bounds.numpy(), least.numpy(), best, temperatures, keys)
            token_ids[drawn] = race.winners(drawn, token_ids[drawn])
        return token_ids

    def _run(self, call: Call, logits: torch.Tensor, **tensors: torch.Tensor) -> None:
        call.set("stride", logits.stride(0))
        call.point("logits", logits)
        for name, tensor in tensors.items():
            call.point(name, tensor)
        call.run(len(logits) * self._num_parts, threads_for(logits.numel()))


@dataclass(frozen=True)
class _Race:
    """The state of a race between the tokens of each row."""

    logits: torch.Tensor
    bounds: _Floats
    least: _Floats
    best: _Floats
    temperatures: _Floats
    keys: _Ids

    def winners(self, rows: _Ids, first: _Ids) -> _Ids:
        """The winner of each of the rows. `first`: the tokens with the least bounds."""
        limits = _SLACK / UNIT * np.exp(-self._totals(rows, first[:, None])[:, 0])
        winners = first.copy()
        for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            rivals = [
                part * PART + np.flatnonzero(self.bounds[row, part * PART : (part + 1) * PART] <= limit)
                for part in np.flatnonzero(self.least[row] <= limit)
            ]
            if sum(map(len, rivals)) > 1:
                token_ids = np.concatenate(rivals)
                winners[place] = token_ids[self._totals(row[None], token_ids[None]).argmax()]
        return winners

    def _totals(self, rows: _Ids, token_ids: _Ids) -> npt.NDArray[np.float64]:
        """Score + noise of tokens [rows, n]."""
        ids = torch.from_numpy(token_ids)
        logits = self.logits[torch.from_numpy(rows)[:, None], ids].float().numpy()
        scores = (logits - self.best[rows, None]) / self.temperatures[rows, None]
        totals: npt.NDArray[np.float64] = gumbel_noise(torch.from_numpy(self.keys[rows, None]), ids).numpy() + scores
        return totals


def _first_least(bounds: _Floats, least: _Floats) -> _Ids:
    """The first of the least bounds of each row."""
    starts = least.argmin(axis=1) * PART
    return np.array([start + row[start : start + PART].argmin() for start, row in zip(starts, bounds, strict=False)])


def can_sample(dtype: torch.dtype) -> bool:
    """True if there are kernels for logits of this type."""
    return dtype in (torch.float32, torch.bfloat16) and can_run_kernels()


def checked_sampler(num_tokens: int, dtype: torch.dtype) -> CompiledSampler:
    """Returns a sampler for a vocabulary. Raises ModelLoadError if the kernels compute something else than torch, or
    whatever a compiler raises."""
    logits = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys, params = np.arange(2), np.array([[1.0, 0, 1, -np.inf], [0.0, 0, 1, -np.inf]], dtype=np.float32)
    noise = gumbel_noise(torch.from_numpy(keys[:1, None]), torch.arange(num_tokens)[None])
    numbers = logits.float()
    expected = [(noise + (numbers[:1] - numbers[0].max())).numpy().argmax(), numbers[1].numpy().argmax()]
    sampler = CompiledSampler(num_tokens, dtype)
    if sampler.sample(logits, Draws(keys, params)).tolist() != expected:
        raise ModelLoadError("the compiled kernels choose other tokens", param="model")
    return sampler
