"""One worker: `python -m router.workers.worker DESCRIPTOR`, of the socket that joins it with the parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec

from common.errors import ConfigError, UnavailableError
from common.observability.captured_output import log_stream
from common.observability.logging import setup_logging
from common.rpc.event_loop import UvLoop
from router.runtime import Router, WorkerContext, settle_garbage_collection
from router.security.usage import SharedUsage
from router.workers.link import Link
from router.workers.messages import EXIT_ORPHANED, START, NotStarted, Start, StartAnswer, Started
from router.workers.peers import LinkedPeers, PeerAnswers

logger = logging.getLogger(__name__)


class Worker:
    """Runs a router from the parent's question to start until SIGTERM, or until the parent is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._link = Link(end, self._answer)
        self._stopping = asyncio.Event()
        self._start_asked = False
        self._starting: asyncio.Task[None] | None = None
        self._router: Router | None = None
        self._answers: PeerAnswers | None = None

    async def run(self) -> None:
        """Returns once the router has stopped."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        await self._link.open()
        reading = asyncio.create_task(self._link.run(), name="link")
        reading.add_done_callback(_end_with_parent)
        await self._stopping.wait()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._router is not None:
            logger.info("stopping: running requests get %g s", self._router.config.shutdown_grace_s)
            await self._router.stop()
        reading.remove_done_callback(_end_with_parent)
        reading.cancel()

    async def _answer(self, name: str, about: bytes) -> bytes:
        if name == START and not self._start_asked:
            self._start_asked = True
            return msgspec.msgpack.encode(await self._start(msgspec.msgpack.decode(about, type=Start)))
        if self._answers is None:
            raise UnavailableError("the worker is starting")
        return await self._answers.answer(name, about)

    async def _start(self, start: Start) -> StartAnswer:
        config = start.config
        log = log_stream(start.log_descriptor)
        setup_logging(config.log_level, f"router.{start.number}", config.log_format, stream=log)
        usage = SharedUsage(start.usage_descriptor, start.num_workers, start.number)
        context = WorkerContext(LinkedPeers(self._link), usage, shares_ports=True)
        self._starting = asyncio.current_task()
        try:
            self._router = router = Router(config, context)
            self._answers = PeerAnswers(router.service)
            await router.start()
        except ConfigError as error:
            self._stopping.set()
            return NotStarted(error.message, error.param)
        finally:
            self._starting = None
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.reload)
        settle_garbage_collection()
        return Started()


def _end_with_parent(reading: asyncio.Task[None]) -> None:
    """Without a parent, ports and quotas would be this process's alone to keep."""
    os._exit(EXIT_ORPHANED)


def main() -> int:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    with asyncio.Runner(loop_factory=UvLoop) as runner:
        runner.run(_run(int(sys.argv[1])))
    return 0


async def _run(descriptor: int) -> None:
    await Worker(socket.socket(fileno=descriptor)).run()


if __name__ == "__main__":
    sys.exit(main())
