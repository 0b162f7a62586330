"""Best tokens of logits or scores [rows, vocabulary]; equal ones are ranked by token id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_TIE_MARGIN = 16  # ranks taken beyond those that are wanted, so that a tie at the last of them is seen whole


def best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best of each row and their token ids, best first."""
    num_taken = min(count + _TIE_MARGIN, scores.shape[1])
    if num_taken == scores.shape[1]:
        ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
        return ordered.values[:, :count], ordered.indices[:, :count]
    taken = torch.topk(scores, num_taken, dim=-1)
    by_id = taken.indices.sort(dim=-1)
    by_score = taken.values.gather(1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    values, token_ids = by_score.values, by_id.values.gather(1, by_score.indices)
    last, wanted = values[:, -1], values[:, count - 1]
    is_split = (last == wanted) & (wanted > -torch.inf)  # equal ones may have been left out
    if is_split.any():
        ordered = torch.sort(scores[is_split], dim=-1, descending=True, stable=True)
        values[is_split], token_ids[is_split] = ordered.values[:, :num_taken], ordered.indices[:, :num_taken]
    return values[:, :count], token_ids[:, :count]


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """The first of the largest scores of each row, [rows]; of NaN where there is one. On a CPU numpy takes a tenth of
    torch's time."""
    if not scores.is_cpu or not scores.shape[0]:
        return scores.argmax(dim=-1)
    return torch.from_numpy(as_numpy(scores).argmax(axis=-1))


def as_numpy(scores: torch.Tensor) -> npt.NDArray[np.floating]:
    """The scores, as float32 at least."""
    numbers = scores.float() if scores.itemsize < 4 else scores  # numpy has no bfloat16
    array: npt.NDArray[np.floating] = numbers.numpy()
    return array


def column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[rows, 1] of the type and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype).to(like.device)[:, None]


def index_of(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Numbers of rows, on the device of `like`."""
    return torch.tensor(values, dtype=torch.int64).to(like.device)
