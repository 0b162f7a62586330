"""Background tasks with an owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from common.cancellation import end_tasks

logger = logging.getLogger(__name__)


class TaskSet:
    """Keeps a reference to each of its tasks, logs those that fail, and ends all of them on close."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Runs `work` in a task of this set."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_done)
        return task

    async def close(self, grace_s: float = 0.0) -> None:
        """Gives the tasks `grace_s` seconds to end, then cancels them and waits for them."""
        if self._tasks and grace_s:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await end_tasks(self._tasks)

    def _note_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)
