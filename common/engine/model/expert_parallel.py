"""Experts that are cut whole: each rank has some of them, for the tokens of all ranks.

The ranks of one engine have the same tokens. Engines have different ones, and different numbers of them, which each
step says. Then a mixture gathers the tokens and their routes from all engines, computes what its own experts make of
them, and sums that over all ranks; each engine takes the sums of its own tokens. An engine without tokens takes part,
or the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from common.engine.devices.ranks import Ranks
from common.errors import EngineDeadError


class ExpertRanks:
    """One rank's end of the exchange between mixtures."""

    def __init__(self, ranks: Ranks, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> None:
        """`ranks`: of all engines, those of the first engine first."""
        self.ranks = ranks
        self._engine = data_parallel_rank
        self._num_engines = data_parallel_size
        self._sends = ranks.rank % (ranks.size // data_parallel_size) == 0  # for its engine, whose ranks have the same
        self._tokens_by_engine: list[int] = []
        self._experts: list[WholeExperts] = []

    def add(self, experts: WholeExperts) -> None:
        """The mixtures of the model, in order."""
        self._experts.append(experts)

    def clear(self) -> None:
        """The model is loaded again."""
        self._experts.clear()

    def begin_step(self, tokens_by_engine: Sequence[int]) -> None:
        """How many tokens each engine has in the next step; empty: all have as many, as at the start."""
        self._tokens_by_engine = list(tokens_by_engine)

    def attend(self) -> None:
        """Takes part in a step for which this engine has no tokens."""
        for experts in self._experts:
            experts.attend()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[own tokens, n] -> [tokens of all engines, n]. Raises EngineDeadError if the step said another number."""
        if self._num_engines == 1:
            return tensor
        counts = self._tokens_by_engine or [len(tensor)] * self._num_engines
        if counts[self._engine] != len(tensor):
            raise EngineDeadError(f"a mixture has {len(tensor)} tokens, but the step {counts[self._engine]}")
        gathered = tensor.new_zeros((sum(counts), tensor.shape[1]))
        if self._sends:
            gathered[self._own(counts)] = tensor
        return self.ranks.all_reduce(gathered)

    def sum(self, outputs: torch.Tensor, num_own: int) -> torch.Tensor:
        """[tokens of all engines, n], of this rank's experts -> [own tokens, n], of all experts."""
        outputs = self.ranks.all_reduce(outputs)
        if self._num_engines == 1:
            return outputs
        return outputs[self._own(self._tokens_by_engine or [num_own] * self._num_engines)]

    def _own(self, counts: list[int]) -> slice:
        start = sum(counts[: self._engine])
        return slice(start, start + counts[self._engine])


class WholeExperts(nn.Module):
    """A mixture's experts, of which this rank has some."""

    def __init__(self, local: nn.Module, first: int, ranks: ExpertRanks) -> None:
        """`local` are the rank's own, the whole model's from `first` on."""
        super().__init__()
        self.local = local
        self._first = first
        self._ranks = ranks
        self._nothing: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # inputs without tokens
        ranks.add(self)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, size], and each token's experts and their weights, [tokens, experts] -> [tokens, size]"""
        if self._nothing is None:
            self._nothing = hidden[:0], index[:0], weights[:0]
        num_own, num_local = len(hidden), int(self.local.num_experts)  # type: ignore[arg-type]
        # As float32, in which the numbers of experts are exact, and weights as well.
        routes = self._ranks.gather(torch.cat([index.float(), weights.float()], 1))
        own_index = routes[:, : index.shape[1]].to(index.dtype) - self._first
        is_own = (own_index >= 0) & (own_index < num_local)
        own_weights = torch.where(is_own, routes[:, index.shape[1] :].to(weights.dtype), 0)
        # transformers leaves out the expert after the last.
        own_index = torch.where(is_own, own_index, num_local)
        outputs = self.local(self._ranks.gather(hidden), own_index, own_weights)
        return self._ranks.sum(outputs, num_own)

    def attend(self) -> None:
        """Computes what this rank's experts make of others' tokens."""
        assert self._nothing is not None  # it has computed before, when the model was loaded
        self(*self._nothing)
