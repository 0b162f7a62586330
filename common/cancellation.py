"""Reliable cancellation of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

_AGAIN_S = 1.0


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until all have ended; their exceptions are not raised here.

    A task that goes on is cancelled again: a library that handles its own timeout at the moment of the cancellation may
    mistake one for the other.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
