"""One line in the log for each request, when it has ended.

    INFO router.access: POST /v1/completions 200 request_id=cmpl-4f2a tenant=team-a client=10.0.0.9 model=qwen
    prompt_tokens=997 output_tokens=64 ttft_ms=5312.5 total_ms=5845.1

Values that a client chooses are quoted where they could be taken for something else. Nothing of a prompt or an answer
is logged, nor a query string.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from common.errors import BatonError, ErrorCode, quoted
from common.observability.logging import fields
from router.timelines.timeline import Timeline

ACCESS = "baton.access"  # key of a scope under which the record of its request is
CLIENT_GONE = 499  # nginx's status of a request whose client left before an answer began

_WORD = re.compile(r"[A-Za-z0-9._:/{}\[\]-]{1,200}")

logger = logging.getLogger("router.access")


class AccessRecord:
    """Gathers what the line says; `write` writes it."""

    __slots__ = ("client", "error", "method", "path", "request_id", "started", "status", "tenant_name", "timeline")

    def __init__(self, method: str, path: str, client: str) -> None:
        self.method = method
        self.path = path
        self.client = client  # its address
        self.started = time.monotonic()
        self.status: int | str = CLIENT_GONE  # until an answer begins
        self.error = ""  # label of the code that the request failed with
        self.request_id = ""
        self.tenant_name = ""
        self.timeline: Timeline | None = None  # of a generation; of the first choice if it has several

    def watching(
        self, send: Callable[[MutableMapping[str, Any]], Awaitable[None]]
    ) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
        """`send` of an ASGI application that does not know of this record."""

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            await send(message)

        return watched

    @asynccontextmanager
    async def noting_errors(self) -> AsyncIterator[None]:
        """Takes the status of a gRPC call from how the context is left."""
        try:
            yield
        except BatonError as error:
            self.status, self.error = error.code.value.grpc_status, error.code.label
            raise
        except Exception:
            self.status, self.error = ErrorCode.INTERNAL.value.grpc_status, ErrorCode.INTERNAL.label
            raise
        self.status = "OK"

    def write(self) -> None:
        """To be called once, at the end."""
        if not logger.isEnabledFor(logging.INFO):
            return
        values = self._values()
        record = _new_record()
        record.args = self.method, _word(self.path), self.status, _Words(values)
        vars(record).update(fields(message="request", method=self.method, path=self.path, status=self.status, **values))
        logger.handle(record)

    def _values(self) -> dict[str, object]:
        values: dict[str, object] = {}
        if self.request_id:
            values["request_id"] = self.request_id
        if self.tenant_name:
            values["tenant"] = self.tenant_name
        values["client"] = self.client
        timeline = self.timeline
        if timeline is not None:
            values["model"] = timeline.model
            values["prompt_tokens"] = timeline.num_prompt_tokens
            values["output_tokens"] = timeline.num_output_tokens
            if (first_token_s := timeline.first_token_s) is not None:
                values["ttft_ms"] = round(1000 * first_token_s, 1)
        if error := self.error or (timeline is not None and timeline.error):
            values["error"] = error
        values["total_ms"] = round(1000 * (time.monotonic() - self.started), 1)
        return values


_TEMPLATE = vars(logger.makeRecord(logger.name, logging.INFO, __file__, 0, "%s %s %s %s", (), None))


def _new_record() -> logging.LogRecord:
    """A record of now. Not by `logger.info`, which looks for the caller on the stack, nor by LogRecord, which takes
    paths apart: together half of what a line costs."""
    record = logging.LogRecord.__new__(logging.LogRecord)
    now = time.time()
    vars(record).update(_TEMPLATE, created=now, msecs=1000 * (now % 1))
    return record


class _Words:
    """Values as text, made only if they are read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __str__(self) -> str:
        return " ".join(
            [f"{name}={_word(value) if isinstance(value, str) else value}" for name, value in self._values.items()]
        )


@functools.lru_cache(maxsize=256)  # paths, models and addresses come again and again
def _word(text: str) -> str:
    return text if _WORD.fullmatch(text) else quoted(text)
