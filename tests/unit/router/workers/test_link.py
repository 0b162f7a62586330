"""Questions and answers over a socket pair."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from common.errors import InvalidRequestError, UnavailableError, UnreachableError
from router.workers.link import Link


async def unasked(name, about):
    raise AssertionError(name)


@asynccontextmanager
async def linked(answer, other=unasked):
    """The asker's end; and the other end's task, to be cancelled."""
    links = [Link(end, handler) for end, handler in zip(socket.socketpair(), (other, answer), strict=True)]
    for link in links:
        await link.open()
    tasks = [asyncio.create_task(link.run()) for link in links]
    try:
        yield *links, tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_answers_find_their_questions_in_whatever_order_they_come():
    gates = {b"slow": asyncio.Event(), b"fast": asyncio.Event()}

    async def answer(name, about):
        await gates[about].wait()
        return name.encode() + b" " + about

    async with linked(answer) as (link, _, _):
        slow = asyncio.create_task(link.ask("x", b"slow", 30))
        fast = asyncio.create_task(link.ask("y", b"fast", 30))
        gates[b"fast"].set()
        assert await fast == b"y fast"
        gates[b"slow"].set()
        assert await slow == b"x slow"


async def test_a_side_that_does_not_read_is_not_asked_without_end():
    ends = socket.socketpair()
    link = Link(ends[0], unasked)
    await link.open()
    reading = asyncio.create_task(link.run())
    try:
        with pytest.raises(UnavailableError, match="no answer within"):
            await link.ask("x", bytes(2**25), 0.01)
        with pytest.raises(UnavailableError, match="does not read"):
            await link.ask("x", b"", 30)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        ends[1].close()


async def test_both_ends_may_ask():
    async def echo(name, about):
        return about

    async with linked(echo, echo) as (link, other, _):
        large = bytes(2**20)
        assert await asyncio.gather(link.ask("x", large, 30), other.ask("x", b"", 30)) == [large, b""]


@pytest.mark.parametrize(
    ("raised", "said"),
    [(InvalidRequestError("no such thing"), "no such thing"), (ZeroDivisionError(), "internal error")],
)
async def test_what_fails_is_told_to_the_asker_and_ends_nothing(raised, said):
    async def answer(name, about):
        if name == "fail":
            raise raised
        return b"fine"

    async with linked(answer) as (link, _, _):
        with pytest.raises(UnavailableError, match=said):
            await link.ask("fail", b"", 30)
        assert await link.ask("x", b"", 30) == b"fine"


async def test_an_answer_that_does_not_come_in_time_is_an_error():
    async def answer(name, about):
        await asyncio.Event().wait()

    async with linked(answer) as (link, _, _):
        with pytest.raises(UnavailableError, match=r"x: no answer within 0.01 s"):
            await link.ask("x", b"", 0.01)


async def test_the_end_of_the_other_process_is_an_error_of_all_questions():
    asked = asyncio.Event()

    async def answer(name, about):
        asked.set()
        await asyncio.Event().wait()

    async with linked(answer) as (link, _, other):
        question = asyncio.create_task(link.ask("x", b"", 30))
        await asked.wait()
        other.cancel()
        with pytest.raises(UnreachableError):
            await question
        with pytest.raises(UnreachableError):
            await link.ask("x", b"", 30)
