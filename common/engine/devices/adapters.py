"""LoRA adapters (Hu et al., arXiv:2106.09685) of linear layers, of which the rows of a batch have different ones.

To what a linear layer gives a row, its adapter adds B A x, two products of low rank. Rows are sorted by adapter, by
their numbers: each adapter of a batch is read once for all its rows, and no weights are gathered. Adapters are in
numbered slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

NO_ADAPTER = -1  # in the place of a slot


class AdapterRun(NamedTuple):
    """The rows of one adapter."""

    slot: int
    start: int  # place of the first in AdapterRows.rows
    stop: int
    first_row: int | None  # if they are consecutive rows of the batch, from this one on


class AdapterRows:
    """The rows of a batch that have adapters, those of an adapter side by side."""

    def __init__(self, slots: npt.NDArray[np.int64], num_slots: int, device: torch.device) -> None:
        """`slots` [rows], NO_ADAPTER where there is none."""
        order = np.argsort(slots, kind="stable")
        order = order[slots[order] != NO_ADAPTER]
        present, starts = np.unique(slots[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        self.runs = [
            AdapterRun(slot, start, stop, _first_row(order[start:stop]))
            for slot, start, stop in zip(present.tolist(), starts.tolist(), ends, strict=True)
        ]
        self.rows = torch.from_numpy(order).to(device)
        self._num_slots = num_slots
        self._num_rows = len(slots)

    def of(self, run: AdapterRun) -> slice | torch.Tensor:
        """The rows of an adapter in the batch."""
        if run.first_row is None:
            return self.rows[run.start : run.stop]
        return slice(run.first_row, run.first_row + run.stop - run.start)

    @cached_property
    def routes(self) -> torch.Tensor:
        """Returns the numbers that kernels read, see `write_routes`."""
        routes = torch.empty(num_routes(self._num_slots, self._num_rows), dtype=torch.int64)
        self.write_routes(routes)
        return routes

    def write_routes(self, routes: torch.Tensor) -> None:
        """Writes what kernels read, int64 on the host: the number of adapters, their slots [num_slots], the places in
        the list of rows where each begins and the last one ends [num_slots + 1], and that list."""
        num, most = len(self.runs), self._num_slots
        routes[0] = num
        for number, run in enumerate(self.runs):
            routes[1 + number] = run.slot
            routes[1 + most + number] = run.start
        routes[1 + most + num] = len(self.rows)
        first = num_routes(most, 0)
        routes[first : first + len(self.rows)] = self.rows


def num_routes(num_slots: int, num_rows: int) -> int:
    """How many numbers the routes of so many rows are, which stand at their end."""
    return 2 + 2 * num_slots + num_rows


class StepAdapters(NamedTuple):
    """The slots of a step's rows."""

    of_tokens: npt.NDArray[np.int64]  # [tokens], NO_ADAPTER where there is none
    of_wanted: npt.NDArray[np.int64]  # the same of the tokens whose logits are wanted
    routes: torch.Tensor | None = None  # in a fixed place, of a step that is recorded; see AdapterRows


class AdapterBatch:
    """Tells the layers of a model which adapters the rows have that they get. Called on one thread."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._device = device
        self._step: StepAdapters | None = None
        self.rows: AdapterRows | None = None  # of the rows that layers get now; None: they have none
        self.scratch = torch.empty(0)  # of kernels

    def begin_step(self, step: StepAdapters | None) -> None:
        """None: no token has an adapter."""
        self._step = step
        self.rows = None if step is None else self._rows_of(step.of_tokens)
        if self.rows is not None and step is not None and step.routes is not None:
            self.rows.routes = step.routes

    def parts(self, sizes: Sequence[int], *, are_wanted: bool = False) -> list[AdapterRows | None]:
        """The rows of a step's parts of so many tokens each, or of those whose logits are wanted."""
        if self._step is None:
            return [None] * len(sizes)
        if len(sizes) == 1 and not are_wanted:
            return [self.rows]
        slots = self._step.of_wanted if are_wanted else self._step.of_tokens
        ends = np.cumsum(sizes)
        return [self._rows_of(slots[end - size : end]) for size, end in zip(sizes, ends.tolist(), strict=True)]

    @contextmanager
    def narrowed(self, places: slice | torch.Tensor) -> Iterator[None]:
        """Within, layers get the step's tokens of these places only."""
        if self._step is None:
            yield
            return
        own = places.cpu().numpy() if isinstance(places, torch.Tensor) else places
        all_rows, self.rows = self.rows, self._rows_of(self._step.of_tokens[own])
        try:
            yield
        finally:
            self.rows = all_rows

    @property
    def is_active(self) -> bool:
        """Whether layers are to add something."""
        return self.rows is not None

    def _rows_of(self, slots: npt.NDArray[np.int64]) -> AdapterRows | None:
        return AdapterRows(slots, self.num_slots, self._device) if (slots != NO_ADAPTER).any() else None


NO_ADAPTERS = AdapterBatch(0, torch.device("cpu"))
"""Of a model that takes none."""


class LoraPair(NamedTuple):
    """The matrices of an adapter for one linear layer, on its device in its type; `b` is scaled."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]


Low = list[tuple[AdapterRun, torch.Tensor]] | None
"""The first products of a layer [rows, sum of ranks], adapter by adapter; None: they are in the kernels' scratch."""


class LayerAdapters(Protocol):
    """The adapters of one linear layer, or of several that are computed as one, with their outputs side by side."""

    def prepare(self) -> None:
        """Compiles what it needs; called on any thread, before the first adapter comes."""

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """Takes an adapter: for each of the layers its matrices, or None."""

    def remove(self, slot: int) -> None:
        """Forgets an adapter."""

    def down(self, inputs: torch.Tensor) -> Low:
        """The first products of the rows, `inputs` [rows, in_features], valid until the next call of any layer."""

    def up(self, low: Low, out: torch.Tensor) -> None:
        """Adds the second products of these to the layer's outputs `out` [rows, out_features], in place."""


class PerRow(Protocol):
    """A linear layer."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""


class AdaptedLinear:
    """A linear layer of a fused decoder, with its adapters."""

    def __init__(self, linear: PerRow, adapters: LayerAdapters, batch: AdapterBatch) -> None:
        self.plain = linear
        self.batch = batch
        self._adapters = adapters

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if not self.batch.is_active:
            return self.plain(inputs)
        low = self._adapters.down(inputs)  # first, as a recorded layer may overwrite its inputs
        out = self.plain(inputs)
        self._adapters.up(low, out)
        return out


def _first_row(rows: npt.NDArray[np.intp]) -> int | None:
    return int(rows[0]) if int(rows[-1] - rows[0]) == len(rows) - 1 else None
