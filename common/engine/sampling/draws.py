"""The parameters by which kernels draw tokens, as arrays; see SamplingParams.kernels_can_sample."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.types import SamplingParams

MIN_TEMPERATURE = 1e-10  # keeps the quotient finite for the best token


class Draws(NamedTuple):
    """The parameters by which the rows of a batch are drawn."""

    keys: npt.NDArray[np.int64]  # [rows], see noise.stream_keys
    params: npt.NDArray[np.float32]  # [rows, 4]: temperature (0: greedy), top_k (0: all), top_p, log of min_p


class Penalties(NamedTuple):
    """The changes that tokens so far make to the logits of some rows of a batch."""

    rows: npt.NDArray[np.int64]  # [penalised]
    factors: npt.NDArray[np.float32]  # [penalised, 3]: repetition, frequency, presence
    places: npt.NDArray[np.int64]  # [tokens]: of each token in [penalised, vocabulary]
    weights: npt.NDArray[np.int64]  # [tokens]: GENERATED for those of outputs, else PROMPTED


GENERATED, PROMPTED = 1, 1 << 32  # weights, whose sums tell how many of either there are


def keeps_all(params: SamplingParams) -> bool:
    """Whether a token is chosen from the whole vocabulary, which top-k, top-p and min-p leave as it is."""
    return params.greedy or (params.top_k <= 0 and params.top_p >= 1.0 and not params.min_p)


def draw_params(params: SamplingParams) -> tuple[float, float, float, float]:
    """A row of `Draws.params`."""
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    margin = math.log(params.min_p) if params.min_p else -math.inf
    return temperature, max(params.top_k, 0), params.top_p, margin
