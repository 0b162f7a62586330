"""Kernels, and calls of them: run, or recorded."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec

import torch
from torch.profiler import record_function

from common.engine.devices.cpu.kernels.compiling import Function
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Pointer, Value
from common.engine.devices.cpu.kernels.threads import FIRST_ARGUMENT, FUNCTION, NEXT_TASK, NUM_THREADS, Calls

_NUM_TASKS = FIRST_ARGUMENT  # place of what every kernel has, in the block of arguments
_FIRST_ARGUMENT = FIRST_ARGUMENT + 1
_SHARES_PER_THREAD = 4
_NUMBERS_PER_THREAD = 1 << 14  # a thread starts in the time that so many take

Body = Callable[[Builder, Value, Any], None]
"""(builder, number of the task, arguments by name): appends the instructions of one task."""


class Kernel(Function):
    """A compiled function that does numbered tasks, in any order and on any thread.

    `arguments` names what a call takes: integers (INT64 elements stand for themselves) or pointers to an element type.
    """

    def __init__(
        self, name: str, arguments: Mapping[str, ElementType | None], body: Body, made_by: str | None = None
    ) -> None:
        """`made_by`: see Function."""
        self.name = name
        self.places = {argument: _FIRST_ARGUMENT + place for place, argument in enumerate(arguments)}

        def tasks(builder: Builder, block: Pointer) -> None:
            given = {
                argument: _argument(builder, block.at(self.places[argument]), element)
                for argument, element in arguments.items()
            }
            _emit_tasks(builder, block, lambda task: body(builder, task, SimpleNamespace(**given)))

        super().__init__(name, tasks, made_by)


class KernelSource(NamedTuple):
    """The parts that a Kernel is compiled from."""

    name: str
    arguments: Mapping[str, ElementType | None]
    body: Body


_Parameters = ParamSpec("_Parameters")


def kernel_factory(factory: Callable[_Parameters, KernelSource]) -> Callable[_Parameters, Kernel]:
    """Makes each kernel once, and finds one that an earlier process has compiled without its instructions.

    So the instructions must depend on nothing but the arguments of the `factory`, whose `repr` says all of them, the
    source files of `common.engine`, and the processor.
    """

    @wraps(factory)
    def make(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Kernel:
        return Kernel(*factory(*args, **kwargs), f"{factory.__module__}.{factory.__qualname__} {args} {kwargs}")

    once: Callable[..., Kernel] = cache(make)
    return once


class CannotRecordError(Exception):
    """Work that is not done by kernel calls would be missing from a recording."""


class RecordedCall(NamedTuple):
    """A call as it would have run."""

    kernel: Kernel
    block: Any  # its arguments, an array of int64
    num_threads: int


class Recording:
    """Takes down the calls of a thread; see `program`."""

    def __init__(self, take: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        """`take` gives memory for results."""
        self.calls: list[RecordedCall] = []
        self.tensors: list[torch.Tensor] = []  # whose addresses the calls have
        self.checks: dict[Callable[[], None], None] = {}  # after the calls
        self.take = take


class _Recorder(threading.local):
    recording: Recording | None = None


_recorder = _Recorder()


@contextmanager
def recorded_by(recording: Recording) -> Iterator[None]:
    """Calls of this thread go to the recording."""
    _recorder.recording = recording
    try:
        yield
    finally:
        _recorder.recording = None


def is_recording() -> bool:
    """True if calls of this thread are recorded."""
    return _recorder.recording is not None


def result(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the result of a call. If calls are recorded, it is that of the result before the last."""
    recording = _recorder.recording
    return torch.empty(shape, dtype=dtype) if recording is None else recording.take(shape, dtype)


def check_after(check: Callable[[], None]) -> None:
    """Calls `check`, which raises if the calls so far have failed; if they are recorded, whenever they have run."""
    recording = _recorder.recording
    if recording is None:
        check()
    else:
        recording.checks[check] = None


class Call:
    """A kernel with a block of arguments, which stay as they are until set again."""

    def __init__(self, kernel: Kernel, **arguments: int) -> None:
        self._places = kernel.places
        self._block = (ctypes.c_int64 * (_FIRST_ARGUMENT + len(kernel.places)))()
        self._block[FUNCTION] = kernel.address
        self._kernel = kernel  # keeps the code alive
        self._calls = Calls([ctypes.addressof(self._block)])
        self._kept: dict[str, torch.Tensor] = {}
        for name, value in arguments.items():
            self.set(name, value)

    def set(self, name: str, value: int) -> None:
        """Sets an argument: an integer or an address."""
        self._block[self._places[name]] = value

    def point(self, name: str, tensor: torch.Tensor) -> None:
        """Sets an argument to the address of a tensor, which must live until the call has run."""
        self._block[self._places[name]] = tensor.data_ptr()
        if _recorder.recording is not None:
            _recorder.recording.tensors.append(tensor)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Sets an argument to the address of a tensor, and keeps the tensor."""
        self._kept[name] = tensor
        self.set(name, tensor.data_ptr())

    def run(self, num_tasks: int, num_threads: int) -> None:
        """Does the tasks on at most `num_threads` threads, this one among them."""
        self._block[_NUM_TASKS] = num_tasks
        self._block[NUM_THREADS] = num_threads = min(num_threads, num_tasks)
        if _recorder.recording is not None:
            recording = _recorder.recording
            recording.tensors += self._kept.values()
            recording.calls.append(RecordedCall(self._kernel, type(self._block)(*self._block), num_threads))
        # A profile sees operators of torch only. record_function takes 5 us even if nothing is recorded.
        elif torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001
            with record_function(f"baton::{self._kernel.name}"):
                self._calls.run(num_threads)
        else:
            self._calls.run(num_threads)


def _emit_tasks(builder: Builder, block: Pointer, task_body: Callable[[Value], None]) -> None:
    """Takes tasks from the counter of the block until there are no more. It takes a share of what is left at a time, as
    threads that change the counter wait for each other, and at last single tasks, so that all threads end together."""
    num_tasks, counter = block.at(_NUM_TASKS).load(), block.at(NEXT_TASK)
    shares = block.at(NUM_THREADS).load() * _SHARES_PER_THREAD
    first = builder.variable(counter.shared())
    with builder.repeat(lambda: first.get() < num_tasks):
        start = first.get()
        left = num_tasks - start
        end = start + builder.select(left < shares, 1, left // shares)
        with builder.when(counter.replace_shared(start, end)), builder.loop(start, end) as task:
            task_body(task)
        first.set(counter.shared())


def _argument(builder: Builder, place: Pointer, element: ElementType | None) -> Value | Pointer:
    value = place.load()
    if element is None:
        return value
    return builder.pointer(value, element)


def threads_for(num_numbers: int) -> int:
    """Threads that are worth starting to compute so many numbers."""
    return max(1, min(torch.get_num_threads(), num_numbers // _NUMBERS_PER_THREAD))
