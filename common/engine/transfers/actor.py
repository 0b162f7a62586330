"""The thread that moves KV beside the step loop.

It owns the connector. All that concerns KV transfers is put into its inbox: by the step loop, by the receivers of
clients' commands, by the connector when jobs have settled. It never waits for a step, and no step waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from common.engine.kv_cache import KVGroups
from common.engine.kv_connector import Connector, ConnectorFacts
from common.engine.messages import EngineStats, RequestOutput
from common.engine.transfers.measured import MeasuredConnector
from common.engine.transfers.messages import Message, TransferEvent
from common.engine.transfers.mover import Mover

_STOP_TIMEOUT_S = 5.0  # for the message at hand


class _Settled:
    """Jobs of the connector have settled."""


class _Stop:
    """End the thread."""


_SETTLED = _Settled()
_STOP = _Stop()


class TransferActor:
    """Runs a Mover. `put` and `note_settled` may be called from any thread; events are read by the step loop.

    The inbox has no bound of its own: each live request has a few messages, and the connector at most one.
    """

    def __init__(
        self,
        *,
        on_events: Callable[[], None],
        on_outputs: Callable[[list[RequestOutput]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """All are called on the actor's thread: `on_events` when there are new events, `on_outputs` with outputs for
        clients, `on_failure` with the error that has ended the thread."""
        self._on_events = on_events
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Message | _Settled | _Stop] = queue.SimpleQueue()
        self._events: deque[TransferEvent] = deque()
        self._is_settled = False  # the inbox holds a _Settled
        self._mover: Mover | None = None
        self._measured: MeasuredConnector | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_events(self) -> bool:
        """True if `take_events` would return something."""
        return bool(self._events)

    def start(self, connector: Connector, facts: ConnectorFacts, groups: KVGroups) -> None:
        """Begin to serve. The connector is called on the actor's thread from now on."""
        self._measured = measured = MeasuredConnector(connector, time.monotonic)
        self._mover = mover = Mover(measured, facts, groups, time.monotonic)
        self._thread = threading.Thread(target=self._run, args=(measured, mover), name="kv-transfers", daemon=True)
        self._thread.start()

    def figures(self, stats: EngineStats) -> EngineStats:
        """`stats` with what is known of transfers here."""
        return stats if self._measured is None else self._measured.figures(stats)

    def put(self, message: Message) -> None:
        """Deliver a message; those of one thread stay in order."""
        self._inbox.put(message)

    def note_settled(self) -> None:
        """The connector has results."""
        if not self._is_settled:
            self._is_settled = True
            self._inbox.put(_SETTLED)

    def take_events(self) -> list[TransferEvent]:
        """Events since the last call, in order."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def stop(self) -> None:
        """End the thread; the connector is no longer called. Idempotent."""
        if self._thread is not None:
            self._inbox.put(_STOP)
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self, connector: MeasuredConnector, mover: Mover) -> None:
        try:
            while self._serve(connector, mover):
                pass
        except Exception as error:  # noqa: BLE001  whatever it is ends the engine, which tells its client
            self._on_failure(error)

    def _serve(self, connector: MeasuredConnector, mover: Mover) -> bool:
        """Handle one message. False: stop."""
        message = self._inbox.get()
        if isinstance(message, _Stop):
            return False
        if isinstance(message, _Settled):
            self._is_settled = False  # before polling, so that later results are announced again
            mover.settle(connector.poll())
        else:
            mover.handle(message)
        if outputs := mover.take_outputs():
            self._on_outputs(outputs)
        if events := mover.take_events():
            self._events.extend(events)
            self._on_events()
        return True
