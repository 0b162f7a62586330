"""How fast fake pods and trivial backends generate; the benchmark says so on their stdin."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

HOLD = "hold"  # each request gets its first token and then none
IDLE = "idle"  # no order: confirmed when no request is left
_IDLE_S = 60.0


class Pace:
    """The times of the next steps."""

    def __init__(self) -> None:
        self._step_s = 0.0  # 0: as fast as it goes
        self._next = 0.0
        self._changed = asyncio.Event()
        self.is_held = False
        self._idle = asyncio.Event()
        self._idle.set()

    def set(self, word: str) -> None:
        """HOLD, or seconds per step."""
        self.is_held = word == HOLD
        self._step_s = 0.0 if self.is_held else float(word)
        self.wake()

    def note(self, num_requests: int) -> None:
        """So many are left."""
        if num_requests:
            self._idle.clear()
        else:
            self._idle.set()

    def wake(self) -> None:
        """There may be something to do."""
        self._changed.set()

    async def next_step(self, may_step: Callable[[], bool]) -> None:
        """Return when the next step is due and has work. A step that is late does not make the next one early."""
        while not may_step():
            self._changed.clear()
            await self._changed.wait()
        now = asyncio.get_running_loop().time()
        self._next = max(self._next + self._step_s, now)
        await asyncio.sleep(self._next - now)

    async def obey(self) -> None:
        """Take orders until stdin ends, and confirm each. Raises TimeoutError if requests are left for too long."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            if (word := line.decode().strip()) == IDLE:
                async with asyncio.timeout(_IDLE_S):
                    await self._idle.wait()
            else:
                self.set(word)
            print("ok", flush=True)
