"""A rank as the executor has it: its process, what it tells beside steps, and its transfers."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from common.engine.executor.multiproc.adapters import RankReads
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.digests import RankDigests
from common.engine.executor.multiproc.protocol import (
    AdapterRead,
    Cancel,
    Checked,
    Decoder,
    FromRank,
    LogLine,
    OwnFigures,
    Settled,
    StartLoad,
    StartLookup,
    StartSave,
    StepDigest,
    Transfer,
    encode,
)
from common.engine.kv_connector import BlockTransfer, TransferResult
from common.engine.launch import EngineFailed
from common.engine.messages import RankFigures
from common.engine.worker.slots import SlotHeads
from common.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0  # for a process whose socket is closed
CAUSE_TIMEOUT_S = 2.0  # for another rank's failure or end to become known, if this one has lost it


class RankProcess(Protocol):
    """The process of a rank: see LocalProcess, RemoteProcess."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal, such as SIGSTOP, has stopped it."""

    def end(self, timeout_s: float) -> None:
        """Waits until it has ended, and sees to that after that time."""

    def describe_end(self, timeout_s: float) -> str:
        """How it ended, if it does so in time."""


class Rank:
    """A rank's process, and the thread that listens to it."""

    def __init__(
        self,
        name: str,
        process: RankProcess,
        calls: Channel,
        events: Channel,
        on_failure: Callable[[Exception], None],
        has_failed: threading.Event,
        num_steps: Callable[[], int],
        digests: RankDigests | None,
    ) -> None:
        """`on_failure` is called when the process fails or ends, also if it was told to end; `has_failed` is set once
        any rank has. `digests`: of a rank that does not see those of the first one."""
        self.calls = calls
        self.connector = RankConnector(events, num_steps)
        self.name = name
        self.figures: RankFigures | None = None  # what it last told of itself
        self.checked: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()  # answers; None: there will be none
        self.adapters = RankReads(name, self.connector.send)
        self.process = process
        self._events = events
        self._on_failure = on_failure
        self._has_failed = has_failed
        self.is_elsewhere = digests is not None  # on another machine
        self._digests = digests
        self._thread = threading.Thread(target=self._listen, name=name.partition(" of")[0], daemon=True)
        self._thread.start()

    def end(self, timeout_s: float) -> None:
        """Waits for the process to end, and ends it after that time."""
        self.process.end(timeout_s)
        self._events.shut_down()
        self._thread.join()
        self.calls.close()
        self._events.close()

    def _listen(self) -> None:
        decode: Decoder[FromRank] = Decoder(FromRank)
        try:
            while True:
                match decode(self._events.receive()):
                    case Settled(results):
                        self.connector.settle(results)
                    case OwnFigures(figures):
                        self.figures = figures
                    case Checked(violations):
                        self.checked.put(violations)
                    case AdapterRead() as answer:
                        self.adapters.put(answer)
                    case LogLine(level, name, text):
                        logging.getLogger(name).log(level, "%s: %s", self.name, text)
                    case StepDigest(number, digest):
                        assert self._digests is not None
                        self._digests.note(number, digest)
                    case EngineFailed() as failed:
                        self._on_failure(self._describe(failed))
        except EOFError:
            self._on_failure(EngineDeadError(f"{self.name} {self.process.describe_end(EXIT_TIMEOUT_S)}"))
        except Exception as error:  # noqa: BLE001  the digests differ, or a message is invalid
            self._on_failure(error)

    def _describe(self, failed: EngineFailed) -> Exception:
        error = failed.to_error()
        if isinstance(error, ConfigError):
            return error
        if failed.kind != EngineDeadError.__name__:
            return EngineDeadError(f"{self.name} failed: {failed.message}")
        self._has_failed.wait(CAUSE_TIMEOUT_S)
        return error


class RankConnector:
    """See Connector. That of a rank's process."""

    def __init__(self, events: Channel, num_steps: Callable[[], int]) -> None:
        """`num_steps`: how many have computed something."""
        self.on_settled: Callable[[], None] = lambda: None
        self.heads: SlotHeads | None = None  # of a rank that does not see the slots
        self._saves: dict[int, tuple[int, ...]] = {}  # its jobs and their slots
        self._events = events
        self._num_steps = num_steps
        self._settled: deque[TransferResult] = deque()

    def start_load(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        if self.heads is not None and transfer.slots:
            transfer = replace(transfer, content=self.heads.loaded(transfer.slots))
        self.send(StartLoad(transfer, self._num_steps()))

    def start_save(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        if self.heads is not None and transfer.slots:
            self._saves[transfer.job_id] = transfer.slots
        self.send(StartSave(transfer, self._num_steps()))

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        self.send(StartLookup(transfer))

    def cancel(self, job_id: int) -> None:
        """See Connector."""
        self.send(Cancel(job_id))

    def poll(self) -> list[TransferResult]:
        """See Connector."""
        return [self._settled.popleft() for _ in range(len(self._settled))]

    def settle(self, results: Sequence[TransferResult]) -> None:
        """The rank has settled jobs. May be called from any thread."""
        for result in results:
            slots = self._saves.pop(result.job_id, None)
            if self.heads is not None and slots is not None and result.num_blocks_ok:
                self.heads.put_saved(slots, result.content)
        self._settled.extend(results)
        self.on_settled()

    def send(self, message: Transfer) -> None:
        """Sends the rank a message beside steps. Raises EngineDeadError if it takes none."""
        try:
            self._events.send(encode(message))
        except TimeoutError as error:
            raise EngineDeadError("a rank takes no transfers") from error
        except OSError as error:
            logger.debug("a rank is gone, as its thread reports: %r", error)
