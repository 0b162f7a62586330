"""Blocking reads beside the event loop that may outlast their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def read_in_background(read: Callable[[], _Result], name: str) -> _Result:
    """Returns what `read` returns, or raises what it raises. It runs on a daemon thread of its own: if the caller is
    cancelled, the thread goes on, but takes no place from others and delays no shutdown, as one of the loop's executor
    would. Its result is then dropped."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_Result] = loop.create_future()

    def settle(value: _Result | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]  # with no error, it is the result
        else:
            result.set_exception(error)

    def run() -> None:
        value, problem = None, None
        try:
            value = read()
        except Exception as error:  # noqa: BLE001  raised where it is awaited
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, problem)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
