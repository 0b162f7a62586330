"""The base of all endpoints that take JSON: the body is read within its bounds, and every failure is answered."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from common.errors import BatonError, ErrorCode, RequestCancelledError
from common.observability.logging import fields
from router.fairness.turns import others_turn_if_large
from router.gateway.bodies.decoding import check_encoding, check_fields_are_unique, check_num_values
from router.security.access import AccessControl
from router.serving.service import InferenceService
from router.wire.exchange import Exchange, Receive, Scope, Send

logger = logging.getLogger(__name__)

Body = TypeVar("Body")

_LAST_CHUNK_S = 10.0  # seconds after a request's deadline until its client must have read the end
_INTERNAL = "internal error; the router's log has the details"


class JsonEndpoint(ABC, Generic[Body]):
    """An ASGI application for one path, whose bodies are parsed into a `Body`."""

    def __init__(self, id_prefix: str, service: InferenceService, access: AccessControl) -> None:
        """Ids of requests that name none begin with `id_prefix`."""
        self._id_prefix = id_prefix
        self._service = service
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every failure becomes an error object."""
        arrived_at = time.monotonic()
        config = self._service.config
        exchange = Exchange(scope, receive, send)
        try:
            exchange.settle_request_id(self._id_prefix)
            with self._access.account(exchange.tenant).admit():
                body = await exchange.read_json(config.max_body_bytes, config.request_timeout_s)
                work = self._parse_and_serve(body, exchange, arrived_at)
                del body  # neither it nor a long prompt must be kept as long as its answer takes
                async with asyncio.timeout(config.request_timeout_s + _LAST_CHUNK_S):
                    await exchange.run_while_connected(work)
        except RequestCancelledError:
            pass  # the client is gone; its generation counted it
        except TimeoutError:
            self._service.metrics.errors.labels(ErrorCode.DEADLINE_EXCEEDED.label).inc()
            logger.warning(
                "%s: the client stopped reading its answer; its connection is closed",
                exchange.request_id,
                extra=fields(request_id=exchange.request_id),
            )
        except BatonError as error:
            await self._refuse(exchange, error)
        except Exception:
            logger.exception("%s: internal error", exchange.request_id, extra=fields(request_id=exchange.request_id))
            await self._refuse(exchange, BatonError(_INTERNAL))

    async def _parse_and_serve(self, body: bytes, exchange: Exchange, arrived_at: float) -> None:
        tenant = exchange.tenant
        await others_turn_if_large(tenant, len(body))
        check_num_values(body, self._service.max_body_values)
        check_encoding(body)
        await others_turn_if_large(tenant, len(body))
        parsed = self._parse(body)
        await others_turn_if_large(tenant, len(body))
        check_fields_are_unique(body)
        await others_turn_if_large(tenant, len(body))
        work = self._serve(parsed, exchange, arrived_at)
        del body, parsed
        await work

    @abstractmethod
    def _parse(self, body: bytes) -> Body:
        """Raises InvalidRequestError."""

    @abstractmethod
    async def _serve(self, parsed: Body, exchange: Exchange, arrived_at: float) -> None:
        """Sends the answer to a request that was admitted with one generation. Raises BatonError."""

    async def _refuse(self, exchange: Exchange, error: BatonError) -> None:
        self._service.metrics.errors.labels(error.code.label).inc()
        await exchange.send_error(error)
