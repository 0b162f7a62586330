"""The argmax of score + Gumbel noise over a whole vocabulary, with logarithms for a few tokens only.

It is a race: with u the uniform number of a token, the winner has the least time -log(u) * exp(-score). As -log(u) is
at least 1 - u, a bound of each token's time needs no logarithm, and a kernel finds it. Noise, in float64 as everywhere,
is then computed only for tokens whose bound is below the time of the first: one or two of 32,000. So the winner is the
same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.engine.cpu_kernels.compiled import Call, threads_for
from common.engine.cpu_kernels.race import PART, race_kernel
from common.engine.sampling.noise import UNIT, gumbel_noise
from common.types import SamplingParams

logger = logging.getLogger(__name__)

_CHECKED_ROWS = 2
_Floats = npt.NDArray[np.float32]
_SLACK = 1.0001  # float32 rounds the bounds by less


def checked_race(num_tokens: int) -> Race | None:
    """For a vocabulary; None, and a warning, if the kernel computes something else than torch or does not compile."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(_CHECKED_ROWS, num_tokens, generator=generator).sub_(10.0)
    keys = torch.arange(_CHECKED_ROWS)[:, None]
    expected = gumbel_noise(keys, torch.arange(num_tokens)[None]).add_(scores).argmax(dim=-1)
    try:
        race = Race(num_tokens)
        agrees = torch.equal(race.draw(scores, keys, ()), expected)
    except Exception as error:  # noqa: BLE001  whatever a compiler raises
        logger.warning("sampling with torch's operators: a kernel does not compile: %s", error)
        return None
    if not agrees:
        logger.warning("sampling with torch's operators: the compiled kernel draws other tokens")
    return race if agrees else None


class Race:
    """Draws from a vocabulary on a CPU."""

    def __init__(self, num_tokens: int) -> None:
        self._num_parts = -(-num_tokens // PART)
        self._call = Call(race_kernel(num_tokens))

    def draw(self, scores: torch.Tensor, keys: torch.Tensor, _: Sequence[SamplingParams]) -> torch.Tensor:
        """The token drawn in each row, [rows] int64, with scores [rows, vocabulary], float32, at most 0, and keys
        [rows, 1] of the noise. A row that has NaN gets any token."""
        scores = scores.contiguous()
        bounds = torch.empty(scores.shape)
        least = torch.empty(len(scores), self._num_parts)
        for name, tensor in (("scores", scores), ("keys", keys), ("bounds", bounds), ("least", least)):
            self._call.point(name, tensor)
        self._call.run(least.numel(), threads_for(scores.numel()))
        return torch.from_numpy(_winners(scores.numpy(), keys, bounds.numpy(), least.numpy()))


def _winners(scores: _Floats, keys: torch.Tensor, bounds: _Floats, least: _Floats) -> npt.NDArray[np.int64]:
    rows = range(len(scores))
    winners: npt.NDArray[np.int64] = least.argmin(axis=1) * PART
    for row in rows:
        winners[row] += bounds[row, winners[row] : winners[row] + PART].argmin()
    times = np.exp(-_totals(scores, keys, winners[:, None])[:, 0]) / UNIT
    limits = _SLACK * times
    reached = least <= limits[:, None]
    for row in rows:
        rivals = [
            part * PART + np.flatnonzero(bounds[row, part * PART : (part + 1) * PART] <= limits[row])
            for part in np.flatnonzero(reached[row])
        ]
        if sum(map(len, rivals)) > 1:
            token_ids = np.concatenate(rivals)
            best = _totals(scores[row : row + 1], keys[row : row + 1], token_ids[None]).argmax()
            winners[row] = token_ids[best]
    return winners


def _totals(scores: _Floats, keys: torch.Tensor, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Score + noise of tokens [rows, n]."""
    noise = gumbel_noise(keys, torch.from_numpy(token_ids)).numpy()
    totals: npt.NDArray[np.float64] = noise + np.take_along_axis(scores, token_ids, axis=1)
    return totals
