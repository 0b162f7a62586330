"""What one request may cost, whatever is in it.

The bounds depend on no machine's speed: they are far above what any request here takes, and far below what a request
costs that the server has no bound for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from tests.fuzz.host import Host

MAX_GROWTH_MIB = 64.0  # of resident memory, at its peak
MAX_LAG_S = 4.0  # for which the event loop runs nothing else
MAX_NEIGHBOUR_S = 10.0  # until a small request is answered
_TICK_S = 0.02


class Budget:
    """Context of one request; fails if it took too much of the process, its event loop or its other clients.

    `ask` sends a small request and fails if it is not answered well. It is called as long as the context lasts, so
    the request meets neighbours in all its stages.
    """

    def __init__(self, host: Host[Any], ask: Callable[[], Awaitable[None]]) -> None:
        self._host = host
        self._ask = ask
        self._is_over = False
        self._lag_s = 0.0
        self._neighbour_s = 0.0

    def __enter__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        self._resident_mib = _memory_mib("VmRSS")
        self._host.run(self._start())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._host.run(self._stop())
        if error is None:
            self._check()

    async def _start(self) -> None:
        self._asking = asyncio.create_task(self._keep_asking())
        self._due = monotonic()
        self._tick()

    async def _stop(self) -> None:
        self._is_over = True
        self._timer.cancel()
        self._note_lag()
        await self._asking

    def _tick(self) -> None:
        self._note_lag()
        self._due = monotonic() + _TICK_S
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _note_lag(self) -> None:
        self._lag_s = max(self._lag_s, monotonic() - self._due)

    async def _keep_asking(self) -> None:
        while not self._is_over:
            started = monotonic()
            await self._ask()
            self._neighbour_s = max(self._neighbour_s, monotonic() - started)

    def _check(self) -> None:
        growth_mib = _memory_mib("VmHWM") - self._resident_mib
        assert growth_mib <= MAX_GROWTH_MIB, f"the request took {growth_mib:.0f} MiB of memory"
        assert self._lag_s <= MAX_LAG_S, f"the request held up the event loop for {self._lag_s:.1f} s"
        assert self._neighbour_s <= MAX_NEIGHBOUR_S, f"a neighbour waited for {self._neighbour_s:.1f} s"


def _memory_mib(field: str) -> float:
    """A figure of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise AssertionError(f"{field}: not in /proc/self/status")
