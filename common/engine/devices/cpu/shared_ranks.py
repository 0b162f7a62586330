"""Collectives of ranks on one host's CPUs over memory that they share, on kernels of our own.

Sums are those of the ranks' numbers in the order of ranks, in float32: the same to the last bit on each, and each time.
Tensors go in pieces that fit a slot. With two ranks each adds up the whole piece; with more of them, and many numbers,
each adds up its share, and all collect the shares.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from common.engine.devices.cpu.kernels import reduction
from common.engine.devices.cpu.kernels.compiled import (
    Call,
    CannotRecordError,
    Kernel,
    check_after,
    is_recording,
    result,
    threads_for,
)
from common.engine.devices.cpu.kernels.language import ElementType, element_type_of
from common.engine.devices.cpu.kernels.reduction import (
    GONE,
    LINE,
    LOST,
    NUMBERS_PER_TASK,
    SLOT_BYTES,
    memory_bytes,
)
from common.engine.devices.cpu.kernels.threads import syscall_address
from common.engine.devices.ranks import Ranks
from common.errors import EngineDeadError

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
_TOKEN_BYTES = 16
_OFFER_BYTES = 128
_MIN_SHARED = 1 << 14  # numbers of which each of several ranks adds up a share
_NAP_NS = 200_000_000
_CHECKED = (1, 3, 1000, NUMBERS_PER_TASK + 1, SLOT_BYTES // 4, SLOT_BYTES + 37)  # numbers
_CHECKED_ROWS = ((1, 3), (3, 1000), (2, SLOT_BYTES // 4 + 1))
_MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def share_memory(group: Ranks) -> Ranks:
    """Ranks that meet in memory, if all in `group` are on this host and their kernels compute what the group does; else
    the group. Called by all ranks. Raises EngineDeadError if another rank is gone, or late."""
    ranks, problem = None, ""
    with contextlib.ExitStack() as stack:
        offer = _offer(group, stack)
        try:
            ranks = SharedRanks(group, _map(offer, memory_bytes(group.size)))
        except Exception as error:  # noqa: BLE001  another host, or whatever a compiler or the system raises
            problem = str(error).partition("\n")[0]
        is_shared = _hold_on_all(group, ranks is not None)
    if ranks is not None and is_shared:
        problem = ranks.difference()
        if _hold_on_all(group, not problem):
            return ranks
    logger.warning("ranks meet over the network instead of shared memory: %s", problem or "another rank cannot")
    return group


def _hold_on_all(group: Ranks, holds: bool) -> bool:
    """Whether it does."""
    return int(group.all_reduce(torch.tensor(float(holds)))) == group.size


class SharedRanks:
    """See Ranks."""

    can_record = True
    sums_in_order = True

    def __init__(self, group: Ranks, mapped: mmap.mmap) -> None:
        """`group`: the same ranks, which do what is not done in memory. `mapped`: `memory_bytes`, zeros at first."""
        self.rank = group.rank
        self.size = group.size
        self.timeout_s = group.timeout_s
        self._group = group
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._counts = self._memory[: self.size * LINE].view(torch.int64)
        self._state = torch.zeros(reduction.STATE_SIZE, dtype=torch.int64)
        library = ctypes.CDLL(None)
        self._state[reduction.SPINS] = reduction.MAX_SPINS
        self._state[reduction.TIMEOUT_MS] = int(1000 * self.timeout_s)
        self._state[reduction.SYSCALL] = syscall_address()
        self._state[reduction.CLOCK] = _address(library.clock_gettime)
        self._state[reduction.NAP + 1] = _NAP_NS
        self._lost = ctypes.c_int64.from_address(self._state[LOST:].data_ptr())
        self._meet = self.call(reduction.meet_kernel(self.rank, self.size))
        self._calls = {dtype: _Calls(self, element_type_of(dtype)) for dtype in _DTYPES}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        calls = self._calls_of(tensor)
        if calls is None:
            return self._group.all_reduce(tensor)
        tensor = tensor.contiguous()
        for piece in torch.split(tensor.view(-1), SLOT_BYTES // tensor.itemsize):
            if len(piece):
                calls.reduce(piece)
        self._check_lost()
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        calls = self._calls_of(tensor)
        if calls is None:
            return self._group.all_gather_last(tensor)
        rows = tensor.contiguous().view(-1, tensor.shape[-1])
        gathered = result((len(rows), self.size * rows.shape[1]), tensor.dtype)
        calls.gather(rows, gathered)
        self._check_lost()
        return gathered.view(*tensor.shape[:-1], gathered.shape[1])

    def wait_for_all(self) -> None:
        """See Ranks."""
        self._group.wait_for_all()

    def open_store(self, name: str) -> Store:
        """See Ranks."""
        return self._group.open_store(name)

    def close(self) -> None:
        """See Ranks. The others are told, and end if they wait for this rank."""
        if self._counts[self.rank * LINE // 8] < GONE:
            self._counts[self.rank * LINE // 8] += GONE
        self._group.close()

    def meet(self, *, turns: int) -> None:
        """Waits for the others. `turns`: slots were written to since the last time."""
        self._meet.set("turns", turns)
        self._meet.run(1, 1)

    def difference(self) -> str:
        """Names the differences between the group's sums and its own, on random numbers; empty: there are none."""
        generator = torch.Generator().manual_seed(self.rank)
        found = []
        for dtype in _DTYPES:
            for count in _CHECKED:
                own = torch.randn(count, generator=generator).to(dtype)
                expected = self._group.all_reduce(own.clone()).float()
                error = float((self.all_reduce(own).float() - expected).norm() / expected.norm())
                if not error <= _MAX_ERROR[dtype]:
                    found.append(f"sums of {count} numbers in {dtype} differ by {error:.2g}")
            for shape in _CHECKED_ROWS:
                own = torch.randn(shape, generator=generator).to(dtype)
                if not torch.equal(self.all_gather_last(own), self._group.all_gather_last(own)):
                    found.append(f"rows of {shape[1]} numbers in {dtype} come together wrongly")
        return "; ".join(found)

    def call(self, kernel: Kernel) -> Call:
        """A call with this rank's memory and state."""
        call = Call(kernel)
        call.keep("memory", self._memory)
        call.keep("state", self._state)
        return call

    def _calls_of(self, tensor: torch.Tensor) -> _Calls | None:
        calls = self._calls.get(tensor.dtype)
        if calls is None and is_recording():
            raise CannotRecordError(f"ranks put {tensor.dtype} together over the network")
        return calls

    def _check_lost(self) -> None:
        check_after(self._raise_if_lost)

    def _raise_if_lost(self) -> None:
        if self._lost.value:
            rank = self._lost.value - 1
            raise EngineDeadError(f"rank {self.rank} of {self.size} has lost another: rank {rank} did not come in time")


class _Calls:
    """The kernels for one type of numbers."""

    def __init__(self, ranks: SharedRanks, element: ElementType) -> None:
        which = element, ranks.rank, ranks.size
        self._ranks = ranks
        self._put = ranks.call(reduction.put_kernel(*which))
        self._add = ranks.call(reduction.add_kernel(*which))
        self._add_share = ranks.call(reduction.add_kernel(*which, in_place=True))
        self._collect = ranks.call(reduction.collect_kernel(*which))
        self._most = SLOT_BYTES // element.size

    def reduce(self, numbers: torch.Tensor) -> None:
        """Sums [n] over all ranks, in place; they fit a slot."""
        ranks, total = self._ranks, len(numbers)
        self._write(numbers)
        if ranks.size == 2 or total < _MIN_SHARED:
            self._run_add(self._add, numbers, 0, total)
            return
        share = -(-total // ranks.size)
        self._run_add(self._add_share, numbers, min(ranks.rank * share, total), min((ranks.rank + 1) * share, total))
        ranks.meet(turns=0)
        self._run_collect(numbers, 1, count=share, source_row=0, source_rank=share, row=0, step=share, total=total)

    def gather(self, rows: torch.Tensor, gathered: torch.Tensor) -> None:
        """[rows, n] of each rank to [rows, size * n], as many of a row or of rows at a time as fit a slot."""
        width, stride = rows.shape[1], gathered.shape[1]
        rows_at_once = max(1, self._most // max(1, width))
        for first in range(0, len(rows), rows_at_once):
            some, out = rows[first : first + rows_at_once], gathered[first : first + rows_at_once]
            if width <= self._most:
                self._write(some.view(-1))
                row = {"source_row": width, "row": stride}
                self._run_collect(out, len(some), count=width, source_rank=0, step=width, total=stride, **row)
                continue
            for start in range(0, width, self._most):
                piece = some[0, start : start + self._most]
                self._write(piece)
                parts, row = out[:, start:], {"source_row": 0, "row": 0}
                self._run_collect(parts, 1, count=len(piece), source_rank=0, step=width, total=stride, **row)

    def _write(self, numbers: torch.Tensor) -> None:
        total = len(numbers)
        self._put.point("inputs", numbers)
        self._put.set("total", total)
        self._put.run(-(-total // NUMBERS_PER_TASK), threads_for(total))
        self._ranks.meet(turns=1)

    def _run_add(self, call: Call, out: torch.Tensor, start: int, stop: int) -> None:
        call.point("out", out)
        call.set("start", start)
        call.set("stop", stop)
        call.run(-(-(stop - start) // NUMBERS_PER_TASK), threads_for(stop - start))

    def _run_collect(self, out: torch.Tensor, num_rows: int, **places: int) -> None:
        self._collect.point("out", out)
        for name, value in places.items():
            self._collect.set(name, value)
        self._collect.run(num_rows * self._ranks.size, threads_for(num_rows * places["total"]))


def _offer(group: Ranks, stack: contextlib.ExitStack) -> bytes:
    """Offers the first rank's memory until the stack is closed: returns a token, which stands behind it, and its path.
    Empty if there is none."""
    offer = b""
    if group.rank == 0:
        token, num_bytes = secrets.token_bytes(_TOKEN_BYTES), memory_bytes(group.size)
        with contextlib.suppress(OSError):
            memory = os.memfd_create("baton-reductions")
            stack.callback(os.close, memory)
            os.ftruncate(memory, num_bytes + _TOKEN_BYTES)
            os.pwrite(memory, token, num_bytes)
            offer = token + f"/proc/{os.getpid()}/fd/{memory}".encode()
    padded = torch.tensor([list(offer.ljust(_OFFER_BYTES, b"\0"))], dtype=torch.uint8)
    return bytes(group.all_gather_last(padded)[0, :_OFFER_BYTES].tolist()).rstrip(b"\0")


def _map(offer: bytes, num_bytes: int) -> mmap.mmap:
    """Raises OSError if the memory is not on this host."""
    token, path = offer[:_TOKEN_BYTES], offer[_TOKEN_BYTES:]
    memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(memory, _TOKEN_BYTES, num_bytes) != token:
            raise OSError("the first rank is on another host")
        return mmap.mmap(memory, num_bytes)
    finally:
        os.close(memory)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
