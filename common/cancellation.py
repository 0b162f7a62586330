"""Ending tasks for sure."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

_AGAIN_S = 1.0


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel the tasks and wait until all have ended; whatever they end with is theirs to report.

    One that goes on is cancelled anew: a library that handles its own timeout in the moment of the cancellation may
    take the one for the other.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
