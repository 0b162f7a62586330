"""Background tasks that belong to somebody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from common.cancellation import end_tasks

logger = logging.getLogger(__name__)


class TaskSet:
    """Keeps a reference to each of its tasks, logs those that fail, and ends with all of them ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run `work` in a task of this set."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_done)
        return task

    async def close(self, grace_s: float = 0.0) -> None:
        """Cancel the tasks, after giving them `grace_s` seconds to end by themselves, and wait for them."""
        if self._tasks and grace_s:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await end_tasks(self._tasks)

    def _note_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)
