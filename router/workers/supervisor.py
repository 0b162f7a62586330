"""The parent of several workers, see the package. It serves no client itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from functools import partial
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry

from common.errors import BatonError, ConfigError, InvalidRequestError
from common.observability.logging import log_descriptor_in_use
from router.config import RouterConfig
from router.metrics import WorkerMetrics
from router.security.usage import SharedUsage
from router.workers.link import Link
from router.workers.messages import (
    ALIVE,
    ASK_TIMEOUT_S,
    METRICS,
    OTHERS,
    START,
    TAKE_OVER,
    TAKE_OVER_TIMEOUT_S,
    NotStarted,
    Relayed,
    Start,
    StartAnswer,
)
from router.workers.metrics import Exposition, Family
from router.workers.ports import reserve_port
from router.workers.shares import share_of

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 1800.0  # a model may have to be downloaded
_FIRST_RESTART_DELAY_S = 0.5
_MAX_RESTART_DELAY_S = 30.0
_STEADY_S = 60.0  # a worker that ran this long starts over with the first delay
_MAX_START_ATTEMPTS = 3  # in a row, of one worker, while none serves
_AFTER_GRACE_S = 10.0  # for workers to end once their requests have
_ALIVE_INTERVAL_S = 5.0
_ALIVE_TIMEOUT_S = 5.0
_MAX_UNANSWERED = 3  # in a row. One is not enough: a machine that was suspended wakes up with its deadlines passed


class WorkersFailedError(BatonError):
    """No worker serves, and they keep dying as they start."""


class _Running(NamedTuple):
    number: int
    pid: int
    link: Link


class _Run(NamedTuple):
    has_served: bool
    end: str  # how it ended


class Supervisor:
    """Starts the workers, joins what they know, and ends them."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ConfigError where processes cannot share a port."""
        if sys.platform != "linux":
            raise ConfigError("--workers: more than one needs Linux", param="workers")
        self._http = reserve_port(config.host, config.port, "port")
        self._grpc = reserve_port(config.host, config.grpc_port, "grpc_port")
        self._config = msgspec.structs.replace(config, port=_port(self._http), grpc_port=_port(self._grpc))
        self._usage_descriptor = SharedUsage.create(config.workers)
        self._usage = SharedUsage(self._usage_descriptor, config.workers, own=0)
        self._pids: set[int] = set()  # of all processes that have not ended
        self._serving: dict[int, _Running] = {}  # by serial number; a successor of a worker has another one
        self._num_serials = 0
        self._have_served: set[int] = set()  # numbers of the workers that have served at least once
        self._stopping = asyncio.Event()
        self._exposition = Exposition()
        self._registry = CollectorRegistry()
        self._metrics = WorkerMetrics(self._registry)
        self._metrics.workers.set_function(lambda: len(self._serving))

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT. Raises ConfigError if the workers refuse their settings at start, and
        WorkersFailedError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        keepers = [asyncio.create_task(self._keep(number)) for number in range(self._config.workers)]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([*keepers, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._stop(keepers)
            stopping.cancel()
        failures = [error for each in keepers if (error := each.exception()) is not None]  # usually the same of all
        if failures:
            raise failures[0]

    async def _keep(self, number: int) -> None:
        """Has one worker run, and its successors, until the router stops."""
        num_failed, delay_s = 0, _FIRST_RESTART_DELAY_S
        while not self._stopping.is_set():
            started_at = time.monotonic()
            has_served, end = await self._run_once(number)
            if self._stopping.is_set():
                return
            num_failed = 0 if has_served else num_failed + 1
            if num_failed >= _MAX_START_ATTEMPTS and not (self._is_up and self._serving):
                raise WorkersFailedError(f"worker {number} did not start in {num_failed} attempts ({end})")
            if time.monotonic() - started_at > _STEADY_S:
                delay_s = _FIRST_RESTART_DELAY_S
            logger.error("worker %d ended (%s); it is started again in %g s", number, end, delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            delay_s = min(2 * delay_s, _MAX_RESTART_DELAY_S)
            self._metrics.restarts.labels(str(number)).inc()

    async def _run_once(self, number: int) -> _Run:
        """One process, until it has ended."""
        serial = self._num_serials = self._num_serials + 1
        own_end, worker_end = socket.socketpair()
        link = Link(own_end, partial(self._answer, serial))
        await link.open()
        tasks = [asyncio.create_task(link.run(), name=f"worker-{number}")]
        try:
            with worker_end:
                process = await self._create_process(worker_end)
            has_served = await self._start(link, number)
            if has_served:
                self._serving[serial] = worker = _Running(number, process.pid, link)
                self._note_serving(number)
                tasks.append(asyncio.create_task(self._kill_when_hung(worker), name=f"watch-worker-{number}"))
            else:
                _send_signal(process.pid, signal.SIGKILL)  # it may hang
            exit_code = await process.wait()
            self._pids.discard(process.pid)
            return _Run(has_served, _exit_text(exit_code))
        except OSError as error:  # no more processes or memory: others go on
            return _Run(has_served=False, end=f"no process: {error}")
        finally:
            self._serving.pop(serial, None)
            self._exposition.retire(serial)
            self._usage.forget_worker(number)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _create_process(self, worker_end: socket.socket) -> asyncio.subprocess.Process:
        """Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.workers.worker", str(worker_end.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(worker_end.fileno(), self._usage_descriptor, log_descriptor_in_use()),
        )
        self._pids.add(process.pid)
        if self._stopping.is_set():  # a stop was requested while the process was being started
            _send_signal(process.pid, signal.SIGTERM)
        return process

    async def _start(self, link: Link, number: int) -> bool:
        """Whether the worker serves. Raises ConfigError if it refuses its settings and none has served yet."""
        start = Start(
            number=number,
            num_workers=self._config.workers,
            config=share_of(self._config, number),
            usage_descriptor=self._usage_descriptor,
            log_descriptor=log_descriptor_in_use(),
        )
        try:
            reply = await link.ask(START, msgspec.msgpack.encode(start), _START_TIMEOUT_S)
        except BatonError as error:
            if not self._stopping.is_set():
                logger.error("worker %d has not started: %s", number, error.message)
            return False
        answer = msgspec.msgpack.decode(reply, type=StartAnswer)
        if not isinstance(answer, NotStarted):
            return True
        if not self._is_up:
            raise ConfigError(answer.message, param=answer.param)
        logger.error("worker %d cannot start: %s", number, answer.message)
        return False

    async def _kill_when_hung(self, worker: _Running) -> None:
        """Ends a process whose event loop no longer runs: it would keep its share of all connections waiting."""
        num_unanswered = 0
        while num_unanswered < _MAX_UNANSWERED:
            await asyncio.sleep(_ALIVE_INTERVAL_S)
            is_alive = await _ask(worker, ALIVE, b"", _ALIVE_TIMEOUT_S) is not None
            num_unanswered = 0 if is_alive else num_unanswered + 1
        self._metrics.hangs.labels(str(worker.number)).inc()
        logger.error("worker %d did not answer %d times in a row; it is killed", worker.number, _MAX_UNANSWERED)
        _send_signal(worker.pid, signal.SIGKILL)

    @property
    def _is_up(self) -> bool:
        """All workers have served."""
        return len(self._have_served) == self._config.workers

    def _note_serving(self, number: int) -> None:
        was_up = self._is_up
        self._have_served.add(number)
        if self._is_up and not was_up:
            config = self._config
            host = f"[{config.host}]" if ":" in config.host else config.host
            scheme = "https" if config.security.tls_cert else "http"
            sys.stdout.write(f"ready role=router http={scheme}://{host}:{config.port} grpc={host}:{config.grpc_port}\n")
            sys.stdout.flush()
        elif was_up:
            logger.info("worker %d serves again", number)

    def _reload(self) -> None:
        for worker in self._serving.values():
            _send_signal(worker.pid, signal.SIGHUP)

    async def _stop(self, keepers: list[asyncio.Task[None]]) -> None:
        """Has all workers drain, and kills what does not end in time."""
        self._stopping.set()
        for pid in self._pids:
            _send_signal(pid, signal.SIGTERM)
        _, unfinished = await asyncio.wait(keepers, timeout=self._config.shutdown_grace_s + _AFTER_GRACE_S)
        if unfinished:
            logger.error("%d workers did not end in time; they are killed", len(self._pids))
            for pid in self._pids:
                _send_signal(pid, signal.SIGKILL)
            await asyncio.wait(unfinished)
        for reserved in (self._http, self._grpc):
            reserved.close()

    async def _answer(self, asker: int, name: str, about: bytes) -> bytes:
        """See Link."""
        if name == METRICS:
            return await self._all_metrics()
        if name == OTHERS:
            return await self._ask_others(asker, msgspec.msgpack.decode(about, type=Relayed))
        raise InvalidRequestError(f"the parent knows no question {name}")

    async def _all_metrics(self) -> bytes:
        """Returns the metrics of all workers; for one that does not answer in time, those of its last answer."""
        await asyncio.gather(*(self._read_metrics(serial, worker) for serial, worker in self._serving.items()))
        return self._exposition.text(self._registry)

    async def _read_metrics(self, serial: int, worker: _Running) -> None:
        """Taken at once, without waiting for other workers: a later answer must not be replaced by an earlier one."""
        answer = await _ask(worker, METRICS, b"", ASK_TIMEOUT_S)
        if answer is not None and serial in self._serving:
            self._exposition.update(serial, msgspec.msgpack.decode(answer, type=list[Family]))

    async def _ask_others(self, asker: int, relayed: Relayed) -> bytes:
        timeout_s = TAKE_OVER_TIMEOUT_S if relayed.name == TAKE_OVER else ASK_TIMEOUT_S
        others = [worker for serial, worker in self._serving.items() if serial != asker]
        answers = await asyncio.gather(*(_ask(each, relayed.name, bytes(relayed.about), timeout_s) for each in others))
        return msgspec.msgpack.encode([msgspec.Raw(answer) for answer in answers if answer is not None])


async def _ask(worker: _Running, name: str, about: bytes, timeout_s: float) -> bytes | None:
    """None: it does not answer."""
    try:
        return await worker.link.ask(name, about, timeout_s)
    except BatonError as error:
        logger.warning("worker %d does not answer: %s", worker.number, error.message)
        return None


def _send_signal(pid: int, number: signal.Signals) -> None:
    """By os.kill: asyncio's own way would poll, and take the exit code away."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _port(reserved: socket.socket) -> int:
    port: int = reserved.getsockname()[1]
    return port


def _exit_text(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by signal {-exit_code}"
