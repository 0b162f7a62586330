"""Turns of what computes for long on the event loop.

`asyncio.sleep(0)` alone lets others go on, but all tasks that were waiting go on together: eight bodies of 8 MB would
hold up every stream for eight times as long as one. Here one goes on in each round of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary


async def others_turn() -> None:
    """Returns in a later round of the running loop, in which no other caller of this goes on; first come, first
    served."""
    loop = asyncio.get_running_loop()
    turns = _by_loop.get(loop)
    if turns is None:
        turns = _by_loop[loop] = _Turns(loop)
    await turns.wait()


class _Turns:
    """Those of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    def wait(self) -> asyncio.Future[None]:
        """Done at the caller's turn."""
        if not self._waiting:
            self._loop.call_soon(self._go_on)
        future = self._loop.create_future()
        self._waiting.append(future)
        return future

    def _go_on(self) -> None:
        """Lets the first go on, in the next round, and after it the others."""
        while self._waiting and self._waiting[0].done():  # its task was cancelled
            self._waiting.popleft()
        if not self._waiting:
            return
        self._waiting[0].set_result(None)
        self._loop.call_soon(self._go_on)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
