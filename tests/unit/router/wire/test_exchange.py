"""Work that ends with its client: `run_while_connected` alone, with the client played by an event."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import RequestCancelledError
from router.fairness.tenant import Tenant
from router.wire.exchange import TENANT, Exchange


class Client:
    """The receiving end of ASGI."""

    def __init__(self):
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def exchange(self):
        async def send(message):
            raise AssertionError(f"nothing is sent here, but {message} was")

        return Exchange({"type": "http", "headers": []}, self.receive, send)


class Work:
    """Runs until it is told to end; knows whether it was cancelled."""

    def __init__(self):
        self.started, self.may_end = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def run(self):
        self.started.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_work_that_ends_leaves_nothing_behind():
    client, work = Client(), Work()
    work.may_end.set()
    await client.exchange().run_while_connected(work.run())
    client.gone.set()  # afterwards: of no interest any more
    for _ in range(3):  # the watcher ends, and whoever waits for that would hear of it
        await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_client_that_goes_away_cancels_the_work_and_only_that():
    client, work = Client(), Work()

    async def serve():
        with pytest.raises(RequestCancelledError):
            await client.exchange().run_while_connected(work.run())
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)  # would raise if the task were still to be cancelled
        return "went on"

    task = asyncio.create_task(serve())
    await work.started.wait()
    client.gone.set()
    assert await task == "went on"
    assert work.was_cancelled


async def test_client_that_is_gone_already():
    client, work = Client(), Work()
    client.gone.set()
    with pytest.raises(RequestCancelledError):
        await client.exchange().run_while_connected(work.run())


async def test_cancellation_from_outside_stays_one():
    client, work = Client(), Work()
    task = asyncio.create_task(client.exchange().run_while_connected(work.run()))
    await work.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.was_cancelled


async def test_cancellation_from_outside_wins_over_a_client_that_goes_away():
    client, work = Client(), Work()
    task = asyncio.create_task(client.exchange().run_while_connected(work.run()))
    await work.started.wait()
    client.gone.set()
    await asyncio.sleep(0)  # the watcher is about to see it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_timeout_around_it_is_a_timeout():
    client, work = Client(), Work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await client.exchange().run_while_connected(work.run())


async def test_what_the_work_raises_is_raised():
    async def fail():
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await Client().exchange().run_while_connected(fail())


async def test_others_have_their_turn_between_the_parts_of_a_body():
    sent, turns = [], 0

    async def send(message):
        sent.append((message.get("body", b""), message.get("more_body", False), turns))

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    exchange = Exchange({"type": "http", "headers": [], TENANT: Tenant()}, Client().receive, send)
    await exchange.send_json([b"[1,", b"2,", b"3]"])
    counting.cancel()
    assert [(body, more) for body, more, _ in sent[1:]] == [(b"[1,", True), (b"2,", True), (b"3]", False)]
    assert len({turn for *_, turn in sent[1:]}) == 3
