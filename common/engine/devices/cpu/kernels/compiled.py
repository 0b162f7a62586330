"""Compiles kernels for the processor at hand and runs them on torch's own threads."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from llvmlite import __version__ as llvmlite_version
from llvmlite import binding, ir
from torch.profiler import record_function

from common.engine.devices.cpu.kernels.code_cache import cached_code
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value
from common.engine.devices.cpu.kernels.pairs import MULTIPLIES_PAIRS
from common.engine.devices.cpu.kernels.tiles import has_tiles

_INT = ir.IntType(64)
_TASKS = 0  # places of what every kernel has, in the block of arguments
NEXT_TASK = 1
_SHARES = 2
_FIRST_ARGUMENT = 3
_SHARES_PER_THREAD = 4
_NUMBERS_PER_THREAD = 1 << 14  # a thread starts in the time that so many take
_OPTIMIZATION = 3  # of LLVM

Body = Callable[[Builder, Value, Any], None]
"""(builder, number of the task, arguments by name): appends the instructions of one task."""


def instructions() -> str:
    """Names what the kernels are compiled for, as far as it decides how they round."""
    features = binding.get_host_cpu_features()
    of_bytes = [name for name in ("avx512vnni", "avx512vbmi") if features.get(name)]
    return f"{MAX_LANES} lanes, pairs {MULTIPLIES_PAIRS}, tiles {has_tiles()}, bytes {of_bytes}"


class Function:
    """A compiled function of one address."""

    def __init__(self, name: str, body: Callable[[Builder, Pointer], None]) -> None:
        """`body` appends the instructions; the address is of INT64 numbers."""
        module = ir.Module(name)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), name)
        builder = Builder(function)
        body(builder, Pointer(builder, function.args[0], ElementType.INT64))
        builder.ir.ret_void()
        self._engine = _compile(module)  # owns the machine code
        self.address: int = self._engine.get_function_address(name)


class Kernel(Function):
    """A compiled function that does numbered tasks, in any order and on any thread.

    `arguments` names what a call takes: integers (INT64 elements stand for themselves) or pointers to an element type.
    """

    def __init__(self, name: str, arguments: Mapping[str, ElementType | None], body: Body) -> None:
        self.name = name
        self.places = {argument: _FIRST_ARGUMENT + place for place, argument in enumerate(arguments)}

        def tasks(builder: Builder, block: Pointer) -> None:
            given = {
                argument: _argument(builder, block.at(self.places[argument]), element)
                for argument, element in arguments.items()
            }
            _emit_tasks(builder, block, lambda task: body(builder, task, SimpleNamespace(**given)))

        super().__init__(name, tasks)


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
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
        self._kernel = kernel  # keeps the code alive
        self._address = ctypes.addressof(self._block)
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
        """Does the tasks on at most `num_threads` threads: this one and those that torch's operators run on."""
        if _recorder.recording is not None:
            self._record(_recorder.recording, num_tasks, num_threads)
        # A profile sees operators of torch only. record_function takes 5 us even if nothing is recorded.
        elif torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001
            with record_function(f"baton::{self._kernel.name}"):
                self._run(num_tasks, num_threads)
        else:
            self._run(num_tasks, num_threads)

    def _run(self, num_tasks: int, num_threads: int) -> None:
        block = self._block
        block[_TASKS] = num_tasks
        block[NEXT_TASK] = 0
        block[_SHARES] = _SHARES_PER_THREAD * num_threads
        num_threads = min(num_threads, num_tasks)
        if num_threads <= 1:
            self._function(self._address)
        else:
            run_on_threads(self._kernel.address, self._address, num_threads)

    def _record(self, recording: Recording, num_tasks: int, num_threads: int) -> None:
        block = type(self._block)(*self._block)
        block[_TASKS] = num_tasks
        block[NEXT_TASK] = 0
        block[_SHARES] = _SHARES_PER_THREAD * num_threads
        recording.tensors += self._kept.values()
        recording.calls.append(RecordedCall(self._kernel, block, min(num_threads, num_tasks)))


def _emit_tasks(builder: Builder, block: Pointer, task_body: Callable[[Value], None]) -> None:
    """Takes tasks from the counter of the block until there are no more. It takes a share of what is left at a time, as
    threads that change the counter wait for each other, and at last single tasks, so that all threads end together."""
    num_tasks, shares, counter = block.at(_TASKS).load(), block.at(_SHARES).load(), block.at(NEXT_TASK)
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


def _compile(module: ir.Module) -> Any:
    """An engine with the module's machine code."""
    module.triple = binding.get_process_triple()
    for function in module.functions:
        if not function.is_declaration:
            function.attributes.add("nounwind")
    text = str(module)
    code = cached_code([*_compiler(), text], lambda: _machine_code(text))
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine_code(text: str) -> bytes:
    """Compiles a module into an object file."""
    parsed = binding.parse_assembly(text)
    parsed.verify()
    target = _target_machine()
    tuning = binding.create_pipeline_tuning_options(speed_level=_OPTIMIZATION)
    tuning.slp_vectorization = tuning.loop_vectorization = False  # the kernels say themselves what is a vector
    passes = binding.create_pass_builder(target, tuning)
    passes.getModulePassManager().run(parsed, passes)
    code: bytes = target.emit_object(parsed)
    return code


@cache
def _compiler() -> list[str]:
    """Names all that machine code depends on beside the module."""
    llvm = ".".join(map(str, binding.llvm_version_info))
    steps = [inspect.getsource(_machine_code), inspect.getsource(_target_machine)]
    processor = [binding.get_host_cpu_name(), _features()]
    return [f"llvmlite {llvmlite_version}, LLVM {llvm}, level {_OPTIMIZATION}", *steps, *processor]


def _features() -> str:
    """Names the processor's features, as far as kernels use them."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        features["prefer-256-bit"] = False  # LLVM's default for some processors halves the vectors
    return str(features.flatten())


def _target_machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=_features(), opt=_OPTIMIZATION, jit=True
    )


@cache
def has_openmp() -> bool:
    """True if torch's operators run on GNU OpenMP, as on Linux; without it, kernels would have one thread."""
    try:
        _openmp()
    except (OSError, AttributeError):
        return False
    return True


@cache
def _openmp() -> Any:
    """The OpenMP runtime that torch has loaded: its threads wait for torch's operators and for ours. Raises OSError or
    AttributeError."""
    library = ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


def address_of_num_threads() -> int:
    """Address of the function that tells a thread how many there are."""
    return ctypes.cast(_openmp().omp_get_num_threads, ctypes.c_void_p).value or 0


def run_on_threads(function: int, argument: int, num_threads: int) -> None:
    """Calls the function at this address on each of so many threads: this one and those that torch's operators run
    on."""
    _openmp().GOMP_parallel(function, argument, num_threads, 0)


def threads_for(num_numbers: int) -> int:
    """Threads that are worth starting to compute so many numbers."""
    return max(1, min(torch.get_num_threads(), num_numbers // _NUMBERS_PER_THREAD))
