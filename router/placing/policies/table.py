"""The policies' view of the ready pods of one role: columns of numbers, kept up to date in place.

A row changes when its pod reports or when a request is sent to it, not when a decision is made, so that a decision over
hundreds of pods is a few operations on arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.step_budget import knee_tokens
from common.step_times import StepTimes

Column = NDArray[np.float64]

_NUM_FIELDS = 11  # first those of Load, then the numbers of PodFacts
_FIRST_CAPACITY = 8
TYPICAL_BUDGET = 2048  # tokens of a step


class PodFacts(NamedTuple):
    """The facts that do not change while a pod is connected. A pod with several engines has one row for each."""

    address: str
    slot: int  # in the prefix index
    connector: str  # name of its connector; empty: none
    num_blocks: int  # KV blocks in the pool, at least 1
    max_num_seqs: int  # most requests running at once, at least 1
    max_num_batched_tokens: int  # token budget of a step, at least 1
    max_model_len: int  # most tokens of prompt and answer
    target_itl_s: float  # of a step beside streams, as far as prompts make it longer
    min_prefill_tokens: int  # prompt tokens of a step in any case
    data_parallel_rank: int = 0  # of the pod's engines, each of which has a row

    @property
    def name(self) -> str:
        """The address; of a further engine with its number."""
        return f"{self.address}#{self.data_parallel_rank}" if self.data_parallel_rank else self.address


class HeldAdapters(NamedTuple):
    """The LoRA adapters of a pod, by digest."""

    loaded: frozenset[bytes] = frozenset()  # those that requests may have
    running: frozenset[bytes] = frozenset()  # those that requests are computed with now
    max_running: int = 0

    def has_place(self, digest: bytes) -> bool:
        """Whether a request with this adapter need not wait until another has no requests any more."""
        return digest in self.running or len(self.running) < self.max_running


NO_ADAPTERS = HeldAdapters()


class Load(NamedTuple):
    """The figures that change."""

    num_requests: float  # running, waiting, or waiting for remote KV
    queued_tokens: float  # prompt tokens that it still has to compute, cached ones left out where that is known
    free_blocks: float  # KV blocks that can be allocated, cached unreferenced ones included
    context_tokens: float  # of requests that decode there, or will: their prompts and half of their answers
    slowness: float  # how much longer its steps take than those of the role's pods together


class DecodeSteps(NamedTuple):
    """The steps of pods that decode, before one more request has its share of them. Seconds, one per pod."""

    token_s: Column  # for each further token
    context_s: Column  # for each further token of context
    step_s: Column  # with what decodes there, without prompts
    room: Column  # prompt tokens that such a step takes as well
    crowding: Column  # share of the slots that one more request would be too many


class PodColumns:
    """Some pods, one element per pod in each column. See Load and PodFacts for what the columns mean."""

    def __init__(
        self,
        values: NDArray[np.float64],
        slots: NDArray[np.int64],
        connectors: NDArray[np.int64],
        keys: NDArray[np.uint64],
        facts: list[PodFacts],
        adapters: list[HeldAdapters],
        step_times: StepTimes,
    ) -> None:
        self._values = values  # [fields, pods]
        self.slots = slots
        self.connectors = connectors  # see connector_number
        self.keys = keys  # hashes of their addresses, the same in every router
        self.facts = facts
        self.adapters = adapters
        self.step_times = step_times  # of the role
        rows: Iterator[Column] = iter(values)
        self.num_requests = next(rows)
        self.queued_tokens = next(rows)
        self.free_blocks = next(rows)
        self.context_tokens = next(rows)
        self.slowness = next(rows)
        self.num_blocks = next(rows)
        self.max_num_seqs = next(rows)
        self.max_num_batched_tokens = next(rows)
        self.max_model_len = next(rows)
        self.target_itl_s = next(rows)
        self.min_prefill_tokens = next(rows)

    def __len__(self) -> int:
        return len(self.facts)

    @cached_property
    def decode_steps(self) -> DecodeSteps:
        """The pods' steps as they decode; computed once for both legs that may be served there."""
        line, num_requests = self.step_times.line, self.num_requests
        token_s, context_s = line.token_s * self.slowness, line.context_s * self.slowness
        step_s = line.base_s * self.slowness + token_s * num_requests + context_s * self.context_tokens
        beside = self.room_beside(step_s, token_s, self.target_itl_s)
        crowding = np.maximum(num_requests + 1 - self.max_num_seqs, 0) / self.max_num_seqs
        return DecodeSteps(token_s, context_s, step_s, np.where(num_requests > 0, beside, self.room_alone), crowding)

    @property
    def room_alone(self) -> Column:
        """Prompt tokens of a step without streams. See `common.step_budget`."""
        return np.minimum(max(1.0, knee_tokens(self.step_times.line)), self.max_num_batched_tokens)

    def room_beside(self, step_s: Column, token_s: Column, target_s: Column) -> Column:
        """Prompt tokens of a step beside streams, which without them takes `step_s`. See `common.step_budget`."""
        most = np.maximum(self.max_num_batched_tokens - self.num_requests, 1)
        with np.errstate(over="ignore"):  # clients may name any target: then all that fits is allowed
            allowed = (target_s - step_s) / token_s
        return np.minimum(np.maximum(allowed, self.min_prefill_tokens), most)

    def where(self, keep: NDArray[np.bool_]) -> PodColumns:
        """Only the pods for which `keep` is true."""
        if keep.all():
            return self
        kept = keep.tolist()
        return PodColumns(
            self._values[:, keep],
            self.slots[keep],
            self.connectors[keep],
            self.keys[keep],
            list(compress(self.facts, kept)),
            list(compress(self.adapters, kept)),
            self.step_times,
        )

    def for_adapter(self, digest: bytes) -> PodColumns:
        """Only the pods that have this adapter; of these only those where it need not wait for others, if there are
        any. Empty: all pods."""
        if not digest:
            return self
        pods = self.where(np.array([digest in held.loaded for held in self.adapters], dtype=np.bool_))
        at_once = np.array([held.has_place(digest) for held in pods.adapters], dtype=np.bool_)
        return pods.where(at_once) if at_once.any() else pods


class PodRow:
    """One pod's place in a table; it moves when another pod leaves."""

    __slots__ = ("_table", "facts", "number")

    def __init__(self, table: PodTable, number: int, facts: PodFacts) -> None:
        self._table = table
        self.number = number
        self.facts = facts

    def update(self, load: Load) -> None:
        """Write the pod's load."""
        self._table.write(self.number, load)

    def hold(self, adapters: HeldAdapters) -> None:
        """Write the pod's adapters."""
        self._table.hold(self.number, adapters)


class PodTable:
    """The ready pods of one role."""

    def __init__(self, step_times: StepTimes | None = None) -> None:
        """`step_times`: of the role, kept up to date by the caller."""
        self.step_times = StepTimes(TYPICAL_BUDGET) if step_times is None else step_times
        self._values = np.zeros((_NUM_FIELDS, _FIRST_CAPACITY))
        self._slots = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._connectors = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._keys = np.zeros(_FIRST_CAPACITY, dtype=np.uint64)
        self._listener: Callable[[], None] | None = None
        self._rows: list[PodRow] = []
        self._facts: list[PodFacts] = []
        self._adapters: list[HeldAdapters] = []
        self._columns: PodColumns | None = None  # as long as nothing changes

    def __len__(self) -> int:
        return len(self._rows)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when a pod's load changed, or there is one more pod; it must not change the table."""
        self._listener = listener

    def add(self, facts: PodFacts, load: Load) -> PodRow:
        """A pod has become ready."""
        number = len(self._rows)
        self._columns = None
        if number == len(self._slots):
            self._grow()
        row = PodRow(self, number, facts)
        self._rows.append(row)
        self._facts.append(facts)
        self._adapters.append(NO_ADAPTERS)
        self._slots[number] = facts.slot
        self._connectors[number] = connector_number(facts.connector)
        self._keys[number] = stable_hash(facts.name)
        self._values[5:, number] = (
            facts.num_blocks,
            facts.max_num_seqs,
            facts.max_num_batched_tokens,
            facts.max_model_len,
            facts.target_itl_s,
            facts.min_prefill_tokens,
        )
        self.write(number, load)
        return row

    def remove(self, row: PodRow) -> None:
        """A pod is no longer ready; the last one takes its place."""
        self._columns = None
        last = self._rows.pop()
        facts, adapters = self._facts.pop(), self._adapters.pop()
        if last is not row:
            to, of = row.number, last.number
            self._rows[to] = last
            self._facts[to], self._adapters[to] = facts, adapters
            self._values[:, to] = self._values[:, of]
            self._slots[to] = self._slots[of]
            self._connectors[to] = self._connectors[of]
            self._keys[to] = self._keys[of]
            last.number = to

    def write(self, number: int, load: Load) -> None:
        """Writes a row; only PodRow calls it."""
        values = self._values
        values[0, number], values[1, number], values[2, number], values[3, number], values[4, number] = load
        self._columns = None
        if self._listener is not None:
            self._listener()

    def hold(self, number: int, adapters: HeldAdapters) -> None:
        """Writes the adapters of a row; only PodRow calls it."""
        self._adapters[number] = adapters

    def columns(self) -> PodColumns:
        """All pods. Valid until the table changes."""
        if self._columns is None:
            size = len(self._rows)
            self._columns = PodColumns(
                self._values[:, :size],
                self._slots[:size],
                self._connectors[:size],
                self._keys[:size],
                self._facts,
                self._adapters,
                self.step_times,
            )
        return self._columns

    def _grow(self) -> None:
        self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
        self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
        self._connectors = np.concatenate([self._connectors, np.zeros_like(self._connectors)])
        self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])


_connector_numbers: dict[str, int] = {"": 0}


def connector_number(name: str) -> int:
    """A number for a connector's name, the same as long as the process lives; 0 for none."""
    return _connector_numbers.setdefault(name, len(_connector_numbers))


def stable_hash(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
