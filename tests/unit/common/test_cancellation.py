"""Tasks end, whatever they do with a cancellation."""

from __future__ import annotations

import asyncio

from common.cancellation import end_tasks


async def test_a_task_that_takes_a_cancellation_for_its_timeout_is_cancelled_again():
    lost = asyncio.Event()

    async def stubborn():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.set()
        await asyncio.Event().wait()

    async def plain():
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(plain())]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end_tasks(tasks)
    assert lost.is_set()
    assert all(task.cancelled() for task in tasks)


async def test_no_tasks_are_no_wait():
    await end_tasks(())
