"""The states of running requests, for layers that keep one in place of KV.

A request that runs has its state in a slot, from which each step goes on. After runs of tokens for which its tables
have blocks of the state groups, the state is copied there, so that the prefix cache, tiers and handoffs treat it as
they treat KV; a request that comes with computed tokens begins with a copy from there.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.engine.devices.adapters import AdapterBatch
from common.engine.devices.attention import AttentionMetadata
from common.engine.devices.base import Memory
from common.engine.devices.recurrences import Recurrences
from common.engine.model.states import StateBatch, StateHook, StateLayer, StateRun, States, StateTensor
from common.engine.worker.request_table import RequestTable
from common.engine.worker.state_blocks import StateBlocks

logger = logging.getLogger(__name__)

_SPARE_SLOTS = 10  # of steps under way, and of places that no request takes
_FIRST_SLOTS = 8
_NOTHING, _STALE = 0, 1  # slots that are only read, and only written, by such places


class _Place(NamedTuple):
    """The place of a tensor in a state."""

    layer: int  # of the blocks
    offset: int  # bytes, from the start of that layer's
    tensor: StateTensor


class _Part(NamedTuple):
    """Tokens [start, end) of a row, the first of which is number `first` of a batch."""

    start: int
    end: int
    first: int


class _Run(NamedTuple):
    """See StateRun; on the host."""

    start: int
    stop: int
    source: int | None
    target: int


class _Save(NamedTuple):
    """A state that is to be copied to blocks."""

    slot: int
    row: int
    span: int


def num_slots(max_num_seqs: int) -> int:
    """The slots to have memory for. Prompts whose state is kept on the way take one more in that step."""
    return max_num_seqs + max(_SPARE_SLOTS, max_num_seqs // 2)


def _places_of(layers: Sequence[StateLayer]) -> list[list[_Place]]:
    """Returns the places of each layer's tensors."""
    places: list[list[_Place]] = []
    offsets: dict[int, int] = {}  # by layer of the blocks
    for layer in layers:
        places.append([])
        for tensor in layer.tensors:
            offset = offsets.get(layer.block_layer, 0)
            places[-1].append(_Place(layer.block_layer, offset, tensor))
            offsets[layer.block_layer] = offset + tensor.num_bytes
    return places


class StateCache:
    """Slots of states, and copies between them and the blocks of the last groups. Used on the worker's thread."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        blocks: StateBlocks,
        table: RequestTable,
        *,
        block_size: int,
        memory: Memory,
        recurrences: Recurrences | None,
        adapters: AdapterBatch | None = None,
    ) -> None:
        """`table` has block tables of states after all others."""
        self._table = table
        self._blocks = blocks
        self._groups = table.block_tables[-blocks.shape[1] :]
        self._block_size = block_size
        self._memory = memory
        self._places = _places_of(layers)
        self._fixed: torch.Tensor | None = None  # [2, most decodes], the slots that recorded steps read and write
        self._free: list[int] = []
        self._released: list[int] = []  # slots that a step may still read
        self._states = memory.zeros((0, *blocks.shape), torch.uint8)  # whose bytes beyond the state stay zero
        self._grow(_FIRST_SLOTS)
        self._kept: dict[int, dict[int, int]] = {}  # slots of a row's states, by the number of tokens before
        self._saves: list[_Save] = []
        no_slots = torch.empty(0, dtype=torch.int64)
        self._batch = StateBatch(no_slots, no_slots, no_slots, [])
        self.hook = StateHook([layer.module for layer in layers], self, recurrences, adapters)

    def _grow(self, num_slots: int) -> None:
        """Makes room for so many slots. Those in use stay as they are."""
        if self._fixed is not None:
            logger.warning(
                "decode steps are computed kernel by kernel: there are more than %d states", len(self._states)
            )
            self._fixed = None  # what was recorded knows where they were
        before = self._states
        self._states = self._memory.zeros((num_slots, *self._blocks.shape), torch.uint8)
        self._states[: len(before)] = before
        self._free += range(max(len(before), _STALE + 1), num_slots)
        self._tensors = [{place.tensor.key: self._view(place) for place in places} for places in self._places]

    def _view(self, place: _Place) -> torch.Tensor:
        tensor = place.tensor
        found = self._states[:, place.layer].flatten(1)[:, place.offset : place.offset + tensor.num_bytes]
        return found.view(tensor.dtype)[:, : math.prod(tensor.shape)].view(-1, *tensor.shape)

    def read(self, layer: int, slots: torch.Tensor) -> States:
        """See StateStore."""
        return {key: states[slots] for key, states in self._tensors[layer].items()}

    def write(self, layer: int, slots: torch.Tensor, states: States) -> None:
        """See StateStore."""
        for key, tensor in self._tensors[layer].items():
            tensor[slots] = states[key].to(tensor.dtype)

    def slots(self, layer: int) -> States:
        """See StateStore."""
        return dict(self._tensors[layer])

    def forget(self, rows: Sequence[int]) -> None:
        """The rows are of other requests from here on."""
        for row in rows:
            self._released += self._kept.pop(row, {}).values()

    def begin_step(self, rows: npt.NDArray[np.int64], batch: AttentionMetadata) -> None:
        """Prepares the layers for a batch of sequences, each of one of the `rows`. A row with drafts is in it several
        times, with a token each."""
        self._free += self._released
        self._released = []
        parts: dict[int, list[_Part]] = {}
        places = itertools.pairwise(batch.query_start)
        for row, (first, last), end in zip(rows.tolist(), places, batch.seq_lens, strict=True):
            parts.setdefault(row, []).append(_Part(end - last + first, end, first))
        decodes: list[_Run] = []
        runs: list[_Run] = []
        for row, own in parts.items():
            found = self._plan(row, sorted(own))
            is_decode = len(found) == 1 and found[0].stop - found[0].start == 1 and found[0].source is not None
            (decodes if is_decode else runs).extend(found)
        self._batch = self._uploaded(decodes, runs)
        self.hook.begin_step(self._batch)

    def begin_recorded(self, num_decodes: int) -> None:
        """Prepares the layers for a step that is recorded. The first that are have the most decodes; from there on
        states stay where they are, and `stage` says which slots the next step has."""
        if self._fixed is None:
            self._grow(max(len(self._states), num_slots(num_decodes)))
            self._fixed = self._memory.zeros((2, num_decodes), torch.int64)
            self._fixed[1] = _STALE
        sources, targets = self._fixed[:, :num_decodes]
        self.hook.begin_step(StateBatch(sources, sources, targets, [], is_all_decodes=True))

    def forget_recorded(self) -> None:
        """Nothing was recorded: states may be moved."""
        self._fixed = None

    def stage(self) -> bool:
        """Puts the slots of the step that has begun where recorded steps find them; False if it is to be computed
        otherwise."""
        num_decodes = len(self._batch.sources)
        if self._fixed is None or not self._batch.is_all_decodes or num_decodes > self._fixed.shape[1]:
            return False
        slots = (self._batch.sources, self._batch.targets)
        for fixed, own, rest in zip(self._fixed, slots, (_NOTHING, _STALE), strict=True):
            fixed[:num_decodes] = own
            fixed[num_decodes:] = rest
        return True

    def _uploaded(self, decodes: Sequence[_Run], runs: Sequence[_Run]) -> StateBatch:
        """The batch on the device, in one transfer."""
        planned, num_decodes = [*decodes, *runs], len(decodes)
        tokens, sources, targets = self._memory.upload(
            [
                np.array([run.start for run in planned], dtype=np.int64),
                np.array([run.source or 0 for run in planned], dtype=np.int64),
                np.array([run.target for run in planned], dtype=np.int64),
            ]
        )
        slots = zip(runs, sources[num_decodes:, None], targets[num_decodes:, None], strict=True)
        return StateBatch(
            tokens=tokens[:num_decodes],
            sources=sources[:num_decodes],
            targets=targets[:num_decodes],
            runs=[
                StateRun(run.start, run.stop, None if run.source is None else source, target)
                for run, source, target in slots
            ],
            is_all_decodes=not runs and [run.start for run in decodes] == [*range(num_decodes)],
        )

    def end_step(self) -> None:
        """Copies states to blocks. Called after the forward pass."""
        if not self._saves:
            return
        (blocks,) = self._memory.upload(
            [np.array([[table[save.row, save.span] for table in self._groups] for save in self._saves])]
        )
        for save, ids in zip(self._saves, blocks, strict=True):
            self._blocks.save(self._states[save.slot], ids)
        self._saves = []

    def _plan(self, row: int, parts: Sequence[_Part]) -> list[_Run]:
        """The runs of a row in a step, in order. Afterwards, states are kept that it may go on from: the one after the
        last token; those before each of its drafts, which may be wrong; and if a grammar's mask may be late, so that
        the last token is computed again, the one before that."""
        start, end = parts[0].start, parts[-1].end
        has_drafts = len(parts) > 1
        goes_back = self._table.has_grammar(row)
        source = self._state_before(row, start)
        kept = {} if source is None else {start: source}
        own: list[_Run] = []
        for part in parts:
            for first, last in self._cut(row, part, end - 1 if goes_back else end):
                is_last = last == end
                if is_last and not goes_back and start in kept:
                    target = kept.pop(start)
                else:
                    target = self._allocate()
                offset = part.first - part.start
                own.append(_Run(first + offset, last + offset, source, target))
                if is_last or has_drafts or (goes_back and last == end - 1):
                    kept[last] = target
                else:
                    self._released.append(target)
                self._save(row, last, target)
                source = target
        for length in [length for length in kept if length < end - 1 and not has_drafts]:
            self._released.append(kept.pop(length))
        self._kept[row] = kept
        return own

    def _cut(self, row: int, part: _Part, also: int) -> list[tuple[int, int]]:
        """The runs of tokens [start, end) of a row: after each but the last the state is copied to blocks, or they end
        at `also`."""
        first_end = (part.start // self._block_size + 1) * self._block_size
        cuts = {cut for cut in range(first_end, part.end, self._block_size) if self._has_block(row, cut)}
        cuts |= {cut for cut in (also, self._table.num_leaving_tokens(row)) if part.start < cut < part.end}
        return list(itertools.pairwise([part.start, *sorted(cuts), part.end]))

    def _state_before(self, row: int, start: int) -> int | None:
        """The slot of the state after the first `start` tokens, perhaps copied from blocks; None if that is none. No
        other of the row's states is needed any more."""
        kept = self._kept.pop(row, {})
        slot = kept.pop(start, None)
        self._released += kept.values()
        if not start or slot is not None:
            return slot
        slot = self._allocate()
        ids = np.array([table[row, (start - 1) // self._block_size] for table in self._groups])
        assert ids.all(), f"no state after {start} tokens"
        (blocks,) = self._memory.upload([ids])
        self._states[slot] = self._blocks.load(blocks)
        return slot

    def _allocate(self) -> int:
        if not self._free:
            self._grow(len(self._states) + max(_FIRST_SLOTS, len(self._states) // 8))
        return self._free.pop()

    def _has_block(self, row: int, length: int) -> bool:
        return bool(self._groups[0][row, (length - 1) // self._block_size])

    def _save(self, row: int, length: int, slot: int) -> None:
        """The state after `length` tokens is to be copied, if there is a block for it: at the block's end, or where it
        is handed over, even if more tokens of that block are computed."""
        span, leaving = (length - 1) // self._block_size, self._table.num_leaving_tokens(row)
        is_handed_over = leaving > 0 and span == (leaving - 1) // self._block_size
        is_kept = length == leaving if is_handed_over else length % self._block_size == 0
        if is_kept and self._has_block(row, length):
            self._saves.append(_Save(slot, row, span))
