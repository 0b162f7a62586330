"""A call returns when all of its tasks are done, whichever threads did them."""

import ctypes
import errno
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from common.engine.devices.cpu.kernels import threads
from common.engine.devices.cpu.kernels.compiled import Call, Kernel
from common.engine.devices.cpu.kernels.language import ElementType

NUM_TASKS = 500


@pytest.fixture(scope="module")
def adding():
    def body(b, task, a):
        b.call(a.nap, a.microseconds)
        place = a.out.at(task)
        place.store(place.load() + 1.0)

    return Kernel("adding", {"out": ElementType.FLOAT32, "nap": None, "microseconds": None}, body)


def call_of(kernel, out, microseconds=0):
    call = Call(kernel, nap=ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value, microseconds=microseconds)
    call.keep("out", out)
    return call


def test_a_call_returns_when_all_tasks_are_done(adding):
    out = torch.zeros(8)
    call = call_of(adding, out, microseconds=3000)  # longer than threads spin
    for number in range(1, 11):
        call.run(len(out), 3)
        assert out.tolist() == [number] * len(out)


def test_calls_of_several_threads_do_not_meet(adding):
    outs = [torch.zeros(NUM_TASKS) for _ in range(4)]

    def run(out):
        call = call_of(adding, out)
        for _ in range(20):
            call.run(NUM_TASKS, 3)

    callers = [threading.Thread(target=run, args=[out]) for out in outs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(out.tolist() == [20] * NUM_TASKS for out in outs)


def test_a_call_keeps_the_code_that_runs_it(adding):
    """Of two threads that ask for it first at the same time, only one's is kept for others."""
    made = [threads._runner.__wrapped__()]
    code = weakref.ref(made[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "_runner", made.pop)
        call = call_of(adding, torch.zeros(8))
    gc.collect()
    assert code() is not None
    call.run(8, 3)


def test_a_call_does_not_wait_for_threads_that_do_not_come(adding, monkeypatch):
    pool = threads._Pool()
    monkeypatch.setattr(pool, "grow", lambda num_threads: None)
    monkeypatch.setattr(threads, "_pool", lambda: pool)
    out = torch.zeros(NUM_TASKS)
    for number in range(1, 4):
        call_of(adding, out).run(NUM_TASKS, 3)
        assert out.tolist() == [number] * NUM_TASKS


def test_a_system_without_threads_is_named(monkeypatch):
    pool = threads._Pool()
    without = SimpleNamespace(pthread_create=lambda *_: errno.EAGAIN)
    monkeypatch.setattr(threads.ctypes, "CDLL", lambda _: without)
    with pytest.raises(OSError, match="cannot start a thread for kernels: Resource temporarily unavailable"):
        pool.grow(2)
