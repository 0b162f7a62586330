"""Work beside the event loop, in fair shares of tenants."""

from __future__ import annotations

import asyncio
import threading

import pytest

from router.fairness.queue import Ticket
from router.fairness.tenant import Tenant
from router.fairness.threads import FairThreads

FEW, MANY = Tenant("few"), Tenant("many")


class Threads:
    """One thread that does a piece of work whenever it is allowed to."""

    def __init__(self):
        self.threads = FairThreads(1, "test")
        self.done = []
        self._may_go = threading.Semaphore(0)

    def start(self, tenant, name, cost=1.0, priority=0):
        def work():
            assert self._may_go.acquire(timeout=60)
            self.done.append(name)
            return name

        return asyncio.create_task(self.threads.run(Ticket(tenant, priority, cost), work))

    def allow(self, num):
        for _ in range(num):
            self._may_go.release()


@pytest.fixture
def one():
    threads = Threads()
    yield threads
    threads.allow(100)
    threads.threads.close()


async def test_a_tenant_with_much_to_do_holds_up_no_other(one):
    tasks = [one.start(MANY, f"m{number}") for number in range(20)]
    await asyncio.sleep(0)
    tasks.append(one.start(FEW, "f"))
    await asyncio.sleep(0)
    one.allow(21)
    assert await asyncio.gather(*tasks) == [*(f"m{number}" for number in range(20)), "f"]
    assert one.done.index("f") <= 2


async def test_the_more_urgent_goes_first(one):
    tasks = [one.start(FEW, name, priority=priority) for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1))]
    await asyncio.sleep(0)
    one.allow(4)
    await asyncio.gather(*tasks)
    assert one.done == ["a", "d", "c", "b"]


async def test_what_nobody_waits_for_is_not_done(one):
    first, dropped, last = (one.start(FEW, name) for name in ("a", "b", "c"))
    await asyncio.sleep(0)
    dropped.cancel()
    one.allow(3)
    await asyncio.wait([first, dropped, last])
    assert one.done == ["a", "c"]


async def test_a_thread_is_free_again_only_once_its_work_is_done(one):
    """Though its caller has left."""
    first, second = one.start(FEW, "a"), one.start(FEW, "b")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert not second.done()
    one.allow(2)
    assert await second == "b"
    assert one.done == ["a", "b"]


@pytest.mark.parametrize("leaves_first", [False, True])
async def test_a_turn_that_comes_as_its_caller_leaves_is_passed_on(one, leaves_first, monkeypatch):
    first, leaving, last = (one.start(FEW, name) for name in ("a", "b", "c"))
    release = one.threads._release

    def release_and_leave():
        steps = [leaving.cancel, release] if leaves_first else [release, leaving.cancel]
        for step in steps:
            step()

    monkeypatch.setattr(one.threads, "_release", release_and_leave)
    await asyncio.sleep(0)
    one.allow(3)
    assert await asyncio.gather(first, last) == ["a", "c"]
    assert leaving.cancelled()
    assert one.done == ["a", "c"]


async def test_failures_are_the_callers(one):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await one.threads.run(Ticket(FEW, 0, 1.0), fail)
    one.allow(1)
    assert await one.start(FEW, "a") == "a"


async def test_after_its_end_it_does_nothing_more(one):
    one.threads.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await one.start(FEW, "a")
