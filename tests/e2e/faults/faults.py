"""What is done to a server while requests run, and how it is undone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Protocol

import psutil

from tests.e2e.faults.fleet import Fleet
from tests.e2e.faults.server_process import ServerProcess

STOPPED_S, RUNNING_S = 0.09, 0.01  # of a slow pod, in turn: it has a tenth of its time
JUMP_S = 6 * 3600  # of a clock


class Fault(Protocol):
    """Struck once, then healed once when the requests of the others have ended."""

    async def strike(self) -> None:
        """Returns when it is done."""

    async def heal(self) -> None:
        """Returns when the server is on its way back."""


class Kill:
    """SIGKILL. The server comes back at the same address after the requests have ended."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def strike(self) -> None:
        """Its engine process must notice by itself, and end."""
        await asyncio.to_thread(self._server.wait_gone, self._server.kill())

    async def heal(self) -> None:
        """A new incarnation."""
        self._server.start()


class Restart:
    """SIGKILL, and the next incarnation is started at once: it joins while requests run."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def strike(self) -> None:
        """Kill and start."""
        await asyncio.to_thread(self._server.wait_gone, self._server.kill())
        self._server.start()

    async def heal(self) -> None:
        """Nothing is left to be done."""


class Hang:
    """SIGSTOP to all processes of the server, which go on when everybody has given them up."""

    def __init__(self, server: ServerProcess, *, at_most_s: float | None = None) -> None:
        """`at_most_s`: after so many seconds it goes on by itself."""
        self._server = server
        self._at_most_s = at_most_s

    async def strike(self) -> None:
        """Its connections stay open, and nobody answers."""
        self._server.send(signal.SIGSTOP)
        if self._at_most_s is not None:
            asyncio.get_running_loop().call_later(self._at_most_s, self._server.send, signal.SIGCONT)

    async def heal(self) -> None:
        """It goes on where it was, with requests that others have answered."""
        self._server.send(signal.SIGCONT)


class Death:
    """One process of a pod, its front or its engine, hangs, so that some requests are sure to wait for it, and is then
    killed. The other must notice by itself, and end. The pod is started again at once."""

    def __init__(self, server: ServerProcess, *, of_engine: bool) -> None:
        self._server = server
        self._of_engine = of_engine

    async def strike(self) -> None:
        """It hangs."""
        self._victim().send_signal(signal.SIGSTOP)

    async def heal(self) -> None:
        """It is killed, and a new incarnation is started."""
        processes = self._server.processes()
        self._victim().kill()
        await asyncio.to_thread(self._server.wait_gone, processes)
        self._server.start()

    def _victim(self) -> psutil.Process:
        front, engine = self._server.processes()
        return engine if self._of_engine else front


class Slow:
    """The server is stopped most of the time, in short turns, for as long as the fault lasts."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._turns: asyncio.Task[None] | None = None

    async def strike(self) -> None:
        """From now on."""
        self._turns = asyncio.create_task(self._take_turns())

    async def heal(self) -> None:
        """At full speed again."""
        assert self._turns is not None
        self._turns.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._turns

    async def _take_turns(self) -> None:
        try:
            while True:
                self._server.send(signal.SIGSTOP)
                await asyncio.sleep(STOPPED_S)
                self._server.send(signal.SIGCONT)
                await asyncio.sleep(RUNNING_S)
        finally:
            self._server.send(signal.SIGCONT)


class ClockJump:
    """The wall clock of all processes of the server jumps six hours ahead, and afterwards twelve back."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def strike(self) -> None:
        """Ahead."""
        self._server.set_clock(JUMP_S)

    async def heal(self) -> None:
        """Back, beyond where it was."""
        self._server.set_clock(-JUMP_S)


class Cut:
    """The network between two pods swallows everything; both still reach the routers and the store."""

    def __init__(self, fleet: Fleet, one: str, other: str) -> None:
        self._fleet = fleet
        self._pods = (one, other)

    async def strike(self) -> None:
        """From now on."""
        self._fleet.cut(*self._pods)

    async def heal(self) -> None:
        """As before."""
        self._fleet.mend(*self._pods)
