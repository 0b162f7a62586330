"""The Pooling service, which every pod has: a prompt's numbers in one answer."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc

from common.engine.messages import AddRequest, RequestOutput, RequestStarted
from common.errors import BatonError, InvalidRequestError, RequestCancelledError
from common.observability.logging import fields
from common.pb import pods_pb2, pods_pb2_grpc
from common.pod.context import PodContext
from common.pod.convert import add_request_from_pb, error_of
from common.rpc.errors import rpc_errors
from common.types import FinishReason

logger = logging.getLogger(__name__)

SERVICE = "baton.v1.Pooling"


class PoolingServicer(pods_pb2_grpc.PoolingServicer):
    """Computes the numbers of prompts."""

    def __init__(self, pod: PodContext) -> None:
        self._pod = pod
        self.num_open = 0  # calls that were admitted

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the servicer."""
        pods_pb2_grpc.add_PoolingServicer_to_server(self, server)

    async def Pool(  # noqa: N802  (the proto's name)
        self, request: pods_pb2.PoolRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.PoolResponse:
        """Returns the numbers. Cancelling the call ends the work."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            try:
                return await self._pool(request)
            except BatonError as error:
                request_id = request.request.request_id
                self._pod.metrics.request_failure.labels(error.code.label).inc()
                text = "request %s failed: %s: %s"
                logger.info(text, request_id, error.code.label, error.message, extra=fields(request_id=request_id))
                raise

    async def _pool(self, message: pods_pb2.PoolRequest) -> pods_pb2.PoolResponse:
        request = add_request_from_pb(message.request, self._pod.spec)
        if request.pooling is None:
            raise InvalidRequestError("pooling is missing", param="pooling")
        self._pod.admission.admit()
        self.num_open += 1
        try:
            pooled = await self._run(self._pod.requests.place(request))
        except asyncio.CancelledError:
            self._pod.metrics.request_success.labels(FinishReason.ABORT.label).inc()
            raise
        finally:
            self.num_open -= 1
            self._pod.admission.release()
        metrics, timing = self._pod.metrics, pooled.timing
        metrics.queue_time.observe(timing.queue_s)
        metrics.prefill_time.observe(timing.compute_s)
        metrics.request_success.labels(FinishReason.STOP.label).inc()
        pooled.row_size = self._pod.spec.pooling.row_size(request.pooling)
        return pooled

    async def _run(self, request: AddRequest) -> pods_pb2.PoolResponse:
        sink = _Sink()
        engine_id = self._pod.requests.add(request, sink)
        try:
            return await sink.answer
        except asyncio.CancelledError:
            self._pod.requests.abort(engine_id)
            raise
        finally:
            self._pod.requests.forget(engine_id)


class _Sink:
    """OutputSink of one prompt."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[pods_pb2.PoolResponse] = asyncio.get_running_loop().create_future()
        self._submitted_at = time.monotonic()
        self._started = RequestStarted(queue_s=0.0, num_cached_tokens=0)

    def take_output(self, output: RequestOutput) -> None:
        """Takes the start, or the end."""
        for event in output.events:
            if isinstance(event, RequestStarted):
                self._started = event
        if output.finish_reason is FinishReason.ERROR:
            self.fail(error_of(output))
        elif output.finish_reason is FinishReason.ABORT:
            self.fail(RequestCancelledError("the request was aborted"))
        elif output.finish_reason is not None and not self.answer.done():
            queue_s = self._started.queue_s
            compute_s = max(0.0, time.monotonic() - self._submitted_at - queue_s)
            answer = pods_pb2.PoolResponse(
                values=output.pooled,
                num_cached_tokens=self._started.num_cached_tokens,
                timing=pods_pb2.PrefillTiming(queue_s=queue_s, compute_s=compute_s),
            )
            self.answer.set_result(answer)

    def fail(self, error: BatonError) -> None:
        """Ends it with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)
