"""The requests that the pod has in its engine, and the sink of each.

One task (`run`) reads all outputs of the engine, of steps and between them, and calls the sinks of their requests.
Sinks are called synchronously and must not wait: they merge what they cannot pass on at once.
"""

from __future__ import annotations

import itertools
import logging
from typing import NoReturn, Protocol

import msgspec

from common.engine.client.base import EngineClient
from common.engine.client.data_parallel import id_in_engine
from common.engine.messages import AddRequest, RequestOutput, TransferQuiesced, TransferTarget, TransferUpdate
from common.errors import BatonError, EngineDeadError
from common.observability.logging import fields
from common.pod.cache_view import CacheView
from common.pod.stats import StatsBoard
from common.types import RequestId

logger = logging.getLogger(__name__)


class OutputSink(Protocol):
    """Takes the outputs of one request. All methods are called on the event loop and return at once."""

    def take_output(self, output: RequestOutput) -> None:
        """Takes the request's output of a step, or its end."""

    def fail(self, error: BatonError) -> None:
        """Called when no output will follow: the engine died, or the sink itself raised."""


class EngineRequests:
    """Owns the pod's requests in its engine. A sink forgets its request when it needs no more outputs.

    Requests have ids of our own in the engine: two routers may choose the same one, and a router may submit it
    again while the last attempt is still being aborted.
    """

    def __init__(self, engine: EngineClient, stats: StatsBoard, *caches: CacheView) -> None:
        """`stats`, and the view of each engine's cache, are kept up to date."""
        self._engine = engine
        self._stats = stats
        self._caches = caches
        self._sinks: dict[RequestId, OutputSink] = {}
        self._serial = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sinks)

    def place(self, request: AddRequest) -> AddRequest:
        """Chooses the request's engine, unless that is done."""
        if request.data_parallel_rank is not None:
            return request
        return msgspec.structs.replace(request, data_parallel_rank=self._engine.least_loaded())

    def add(self, request: AddRequest, sink: OutputSink) -> RequestId:
        """Starts a generation and returns its id in the engine, which is chosen. Raises EngineDeadError."""
        engine_id = id_in_engine(request.request_id, next(self._serial), request.data_parallel_rank or 0)
        self._engine.add_request(msgspec.structs.replace(request, request_id=engine_id))
        self._sinks[engine_id] = sink
        return engine_id

    def update_transfer(self, command: TransferUpdate) -> None:
        """Passes on an update of a handoff, if the request is still there."""
        if command.request_id in self._sinks:
            self._command(lambda: self._engine.update_transfer(command))

    def quiesce_transfer(self, command: TransferQuiesced) -> None:
        """Reports that a producer no longer writes to a consumer's blocks, which outlive the request."""
        self._command(lambda: self._engine.quiesce_transfer(command))

    def set_transfer_target(self, target: TransferTarget) -> None:
        """Passes on where a direct connector shall write, if the request is still there."""
        if target.request_id in self._sinks:
            self._command(lambda: self._engine.set_transfer_target(target))

    def abort_and_listen(self, engine_id: RequestId) -> None:
        """Ends a generation that is still there; its sink gets the end of its transfers and then forgets it."""
        if engine_id in self._sinks:
            self._command(lambda: self._engine.abort_requests([engine_id]))

    def abort(self, *engine_ids: RequestId) -> None:
        """Ends generations that are still there, and drops their remaining outputs."""
        live = [engine_id for engine_id in engine_ids if self._sinks.pop(engine_id, None) is not None]
        if live:
            self._command(lambda: self._engine.abort_requests(live))

    def forget(self, engine_id: RequestId) -> None:
        """Drops the remaining outputs of the request."""
        self._sinks.pop(engine_id, None)

    async def run(self) -> NoReturn:
        """Passes on outputs until the engine dies, then fails every sink and raises EngineDeadError."""
        try:
            async for step in self._engine.outputs():
                for output in step.outputs:
                    self._deliver(output)
                rank = step.data_parallel_rank
                if step.kv_stored or step.kv_removed:
                    self._caches[rank].apply(step.kv_stored, step.kv_removed)
                if step.phases is not None:
                    self._stats.publish_phases(step.phases, rank)
                if step.stats is not None:
                    self._stats.publish(step.stats, rank)
            raise EngineDeadError("the engine closed its output stream")
        except EngineDeadError as error:
            sinks, self._sinks = self._sinks, {}
            for sink in sinks.values():
                sink.fail(error)
            raise

    def _deliver(self, output: RequestOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return  # aborted or forgotten meanwhile
        try:
            sink.take_output(output)
        except Exception:  # an error of one request must not affect others
            logger.exception(
                "request %s: cannot process the engine's output",
                output.request_id,
                extra=fields(request_id=output.request_id),
            )
            self.abort(output.request_id)
            sink.fail(BatonError("internal error; see the pod's log"))

    def _command(self, command: _Command) -> None:
        """Calls the engine. Ignores a dead one, which `run` has noticed or will."""
        try:
            command()
        except EngineDeadError:
            logger.debug("the engine is dead; dropping a command")


class _Command(Protocol):
    def __call__(self) -> None: ...
