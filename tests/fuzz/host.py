"""Where fuzzed things run, and how many examples there are.

The properties are ordinary functions that Hypothesis calls; what they test lives on an event loop that runs only while
one of them waits for it, so a run depends on nothing but its examples.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings

Value = TypeVar("Value")
Result = TypeVar("Result")

DEADLINE_S = 60.0  # of everything that is awaited here; far more than it takes


_PATIENT = pytest.mark.timeout(3600)


def sizes(quick: int, slow: int) -> pytest.MarkDecorator:
    """Runs a test with `num_examples`: few in the suite, always the same ones; many with the slow ones."""
    params = [pytest.param(quick, id="quick"), pytest.param(slow, id="slow", marks=[pytest.mark.slow, _PATIENT])]
    return pytest.mark.parametrize("num_examples", params)


def profile(num_examples: int) -> settings:
    """Deterministic: no clock, no database, no random seed."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )


class Host(Generic[Value]):
    """Something on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, value: Value) -> None:
        self._runner = runner
        self.value = value

    def run(self, work: Awaitable[Result]) -> Result:
        """Its result; nothing may take longer than DEADLINE_S."""

        async def bounded() -> Result:
            async with asyncio.timeout(DEADLINE_S):
                return await work

        return self._runner.run(bounded())

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Return once `condition()` is true."""
        self.run(_until(condition))


@contextmanager
def hosted(make: Callable[[], AbstractAsyncContextManager[Value]]) -> Iterator[Host[Value]]:
    """What `make` makes, entered on a loop; left when the context is left. Then nothing of it may be left."""
    with asyncio.Runner() as runner:
        context = make()
        host = Host(runner, runner.run(context.__aenter__()))
        try:
            yield host
        finally:
            runner.run(_leave(context))


async def _leave(context: AbstractAsyncContextManager[Any]) -> None:
    await context.__aexit__(None, None, None)


class Footprint:
    """Tasks and open files of this moment."""

    def __init__(self, host: Host[Any]) -> None:
        self._host = host
        self._num_files = num_open_files()
        self._tasks = host.run(_task_names())

    def check(self) -> None:
        """No task and no open file more than at the beginning, once what is closing has closed."""
        self._host.wait_for(lambda: num_open_files() <= self._num_files)
        self._host.run(_until_tasks(self._tasks))


def num_open_files() -> int:
    """Of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def _task_names() -> int:
    return len(asyncio.all_tasks())


async def _until_tasks(most: int) -> None:
    await _until(lambda: len(asyncio.all_tasks()) <= most)


async def _until(condition: Callable[[], Any]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.005)
