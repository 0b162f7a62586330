"""Threads that help with the tasks of kernels.

A call is published as one number, which also counts the threads that may still join it and those at work on it. The
calling thread does tasks until none are left, then closes the call and waits for the threads that have joined. So a
thread without a core, on a machine with other work, is not waited for. Between calls threads spin for some
microseconds, then sleep.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
from functools import cache

from common.engine.devices.cpu.kernels.compiling import Function
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Operand, Pointer, Value

# Places of a block of arguments that are for threads.
FUNCTION = 0  # address; does the tasks of the block until there are no more
NUM_THREADS = 1  # at most
NEXT_TASK = 2  # 0 before a call and after it
FIRST_ARGUMENT = 3

# Places of the pool: three lines of the cache.
_CALL = 0  # the number of the last call << 32 | _IS_AWAITED | threads that may join it * _PLACE | those at work on it
_BLOCK = 1  # address
_SLEEPERS = 8
_IS_IN_USE = 16
_SYSCALL = 17  # address of the function
_POOL_SIZE = 24

_LINE = 64  # bytes
_PLACE = 1 << 12
_IS_AWAITED = 1 << 24  # the calling thread sleeps until those at work are done
_MAX_THREADS = _PLACE - 1

_SPINS = 4000
_SPINS_AT_END = 2000  # of a call, until the others have done what they began
_SPINS_AFTER_SLEEP = 300  # what was long in coming may be so again, as its core may have other work
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 128, 129  # operations of it, within a process
_INTS = ElementType.INT64


def can_run_kernels() -> bool:
    """True on Linux, on processors whose system calls are known here."""
    return _FUTEX is not None


def futex_number() -> int:
    """Returns Linux's number of the system call on this processor."""
    assert _FUTEX is not None
    return _FUTEX


def syscall_address() -> int:
    """Returns the address of the function that makes system calls."""
    return ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0


class Calls:
    """Blocks of arguments whose tasks are done one block after the other, without Python in between."""

    def __init__(self, blocks: list[int]) -> None:
        """`blocks`: addresses."""
        self._list = (ctypes.c_int64 * (2 + len(blocks)))(_pool().address, len(blocks), *blocks)
        self._address = ctypes.addressof(self._list)
        self._runner = _runner()  # keeps the code alive: two threads that ask first get one each
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._runner.address)

    def run(self, num_threads: int) -> None:
        """Does the tasks, on this thread and on at most `num_threads` - 1 others, which help one thread at a time."""
        _pool().grow(num_threads)
        self._run(self._address)


class _Pool:
    """Memory that is never freed, and threads that never end, as they may look at it until the process ends."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.aligned_alloc.restype = ctypes.c_void_p
        size = _POOL_SIZE * _INTS.size
        self.address: int = libc.aligned_alloc(_LINE, size)
        ctypes.memset(self.address, 0, size)
        (ctypes.c_int64 * _POOL_SIZE).from_address(self.address)[_SYSCALL] = syscall_address()
        self._num_threads = 1  # that of a caller
        self._growing = threading.Lock()

    def grow(self, num_threads: int) -> None:
        """Starts threads until there are so many. Raises OSError if the system has no more."""
        if num_threads > self._num_threads:
            with self._growing:
                while min(num_threads, _MAX_THREADS) > self._num_threads:
                    self._start_thread()
                    self._num_threads += 1

    def _start_thread(self) -> None:
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        helper = ctypes.c_void_p(_helper().address)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for Python's threads
        try:
            error = libc.pthread_create(ctypes.byref(thread), None, helper, ctypes.c_void_p(self.address))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if error:
            raise OSError(error, f"cannot start a thread for kernels: {os.strerror(error)}")
        libc.pthread_setname_np(thread, b"kernels")
        libc.pthread_detach(thread)


@cache
def _pool() -> _Pool:
    return _Pool()


@cache
def _runner() -> Function:
    """Runs calls: the pool, how many blocks there are, and their addresses."""

    def body(b: Builder, calls: Pointer) -> None:
        pool = b.pointer(calls.load(), _INTS)
        is_ours = pool.at(_IS_IN_USE).replace_shared(b.number(0), b.number(1))
        with b.loop(0, calls.at(1).load()) as number:
            block = b.pointer(calls.at(number + 2).load(), _INTS)
            num_helpers = b.select(is_ours, block.at(NUM_THREADS).load() - 1, 0)
            has_helpers = num_helpers >= 1
            with b.when(has_helpers):
                _publish(b, pool, block, num_helpers)
            b.call(block.at(FUNCTION).load(), block.number)
            with b.when(has_helpers):
                _close(b, pool)
            block.at(NEXT_TASK).store(b.number(0))
        with b.when(is_ours):
            pool.at(_IS_IN_USE).share(0)

    return Function("run_calls", body, "run_calls")


def _publish(b: Builder, pool: Pointer, block: Pointer, num_helpers: Value) -> None:
    """Lets so many threads join a call, and wakes as many if they sleep."""
    call, sleepers = pool.at(_CALL), pool.at(_SLEEPERS)
    pool.at(_BLOCK).store(block.number)
    call.share(((call.shared() >> 32) + 1) * (1 << 32) + num_helpers * _PLACE)
    asleep = sleepers.shared()
    with b.when(asleep >= 1):
        num_woken = b.select(asleep < num_helpers, asleep, num_helpers)
        sleepers.add_shared(b.number(0) - num_woken)
        _futex(b, pool, _number_of(call), _WAKE, num_woken)


def _close(b: Builder, pool: Pointer) -> None:
    """Closes a call to further threads, and waits for those that have joined."""
    call = pool.at(_CALL)
    call.mask_shared(~((_PLACE - 1) * _PLACE))
    spins = b.variable(0)
    with b.repeat(lambda: (_at_work(b, call.shared()) >= 1) & (spins.get() < _SPINS_AT_END)):
        spins.set(spins.get() + 1)
        b.pause()
    with b.when(_at_work(b, call.shared()) >= 1):
        call.add_shared(_IS_AWAITED)
        with b.repeat(lambda: _at_work(b, call.shared()) >= 1):
            now = call.shared()
            with b.when(_at_work(b, now) >= 1):
                _futex(b, pool, call.number, _WAIT, now)


@cache
def _helper() -> Function:
    """Joins one call after the other."""

    def body(b: Builder, pool: Pointer) -> None:
        call = pool.at(_CALL)
        joined, spins, most = b.variable(1 << 32), b.variable(0), b.variable(_SPINS)
        with b.repeat(lambda: b.number(1) >= 1):
            now = call.shared()
            number = now >> 32
            may_join = (((now // _PLACE) % _PLACE) >= 1) & ((number ^ joined.get()) >= 1)
            with b.when(may_join), b.when(call.replace_shared(now, now + (1 - _PLACE))):
                block = b.pointer(pool.at(_BLOCK).load(), _INTS)
                b.call(block.at(FUNCTION).load(), block.number)
                before = call.add_shared(-1)
                is_awaited = (before // _IS_AWAITED) % 2
                with b.when((is_awaited >= 1) & (_at_work(b, before) < 2)):
                    _futex(b, pool, call.number, _WAKE, 1)
                joined.set(number)
                spins.set(b.number(0))
                most.set(b.number(_SPINS))
            with b.otherwise(may_join):
                spins.set(spins.get() + 1)
                b.pause()
            with b.when(spins.get() >= most.get()):
                pool.at(_SLEEPERS).add_shared(1)
                _futex(b, pool, _number_of(call), _WAIT, number)
                spins.set(b.number(0))
                most.set(b.number(_SPINS_AFTER_SLEEP))

    function = Function("help", body, "help")
    function.keep()  # threads are in it when the process ends
    return function


def _at_work(b: Builder, call: Value) -> Value:
    return call & b.number(_PLACE - 1)


def _number_of(call: Pointer) -> Value:
    """Address of the call's number, for which threads wait: the upper half."""
    return call.number + 4


def _futex(b: Builder, pool: Pointer, address: Value, operation: int, value: Operand) -> None:
    b.call(pool.at(_SYSCALL).load(), futex_number(), address, operation, value, 0, 0, 0)
