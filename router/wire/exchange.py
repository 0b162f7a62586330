"""One HTTP request and its response over ASGI: bounded body, server-sent events, noticing that the client is gone.

Starlette's own classes are not used on this path: they notice a lost client only when the next chunk is sent, and
cost as much per chunk as all the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any

from common.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidRequestError,
    PayloadTooLargeError,
    RequestCancelledError,
    quoted,
)
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.requests.ids import REQUEST_ID_HEADER, check_request_id, new_request_id
from router.timelines.timeline import Timeline
from router.wire.access_log import ACCESS, AccessRecord
from router.wire.errors import dialect_of, error_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TIMING_HEADER = "server-timing"
TENANT = "baton.tenant"  # key of a scope under which the guard puts whose request it is
RELEASE_BODY = "baton.release_body"  # key of a scope under which the connection puts a callable that releases the body


class Exchange:
    """Reads the request, then writes one response, whole or as events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        self._send = send
        self._streaming = False
        self._added: list[tuple[bytes, bytes]] = []  # headers that a successful response gets
        self._late: list[tuple[bytes, Callable[[], str]]] = []
        self._dialect = dialect_of(scope.get("path", ""))
        self.error_events = self._dialect.error_events  # what ends a stream with an error
        self._access: AccessRecord | None = scope.get(ACCESS)
        self.request_id = ""  # told in a header of every response; must be valid

    @property
    def request_id(self) -> str:
        """Told in a header of every response."""
        return self._request_id

    @request_id.setter
    def request_id(self, request_id: str) -> None:
        """It must be valid."""
        self._request_id = request_id
        if self._access is not None:
            self._access.request_id = request_id

    def note_generation(self, timeline: Timeline) -> None:
        """Notes the timeline for the access log, and for the header of the answer that tells its times."""
        if self._access is not None:
            self._access.timeline = timeline
        self.add_late_header(TIMING_HEADER, lambda: timeline.server_timing(time.monotonic()))

    @property
    def tenant(self) -> Tenant:
        """The tenant of the request. Only below the guard."""
        tenant = self._scope[TENANT]
        assert isinstance(tenant, Tenant)
        return tenant

    def header(self, name: str) -> str:
        """The first header of that name, in lower case; empty: there is none, or it is empty."""
        return self.given_header(name) or ""

    def given_header(self, name: str) -> str | None:
        """The first header of that name, in lower case; None: there is none."""
        wanted = name.encode()
        return next((value.decode("latin-1") for header, value in self._headers if header == wanted), None)

    def add_header(self, name: str, value: str) -> None:
        """To the response, if it is a success."""
        self._added.append((name.encode(), value.encode()))

    def add_late_header(self, name: str, value: Callable[[], str]) -> None:
        """Adds a header whose value is read when the response begins."""
        self._late.append((name.encode(), value))

    def settle_request_id(self, prefix: str = "") -> None:
        """The id that a header names, else a random one with this prefix. Raises InvalidRequestError for an invalid
        header, which the random one then replaces."""
        self.request_id = new_request_id(prefix)
        if named := self.header(REQUEST_ID_HEADER):
            check_request_id(named, REQUEST_ID_HEADER)
            self.request_id = named

    async def read_json(self, limit: int, timeout_s: float) -> bytes:
        """The whole body, unread. Raises InvalidRequestError if it is declared as something else, PayloadTooLargeError
        over `limit` bytes, DeadlineExceededError after `timeout_s` seconds, RequestCancelledError if the client goes
        away."""
        self._check_content_type()
        declared = next((value for name, value in self._headers if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        body = bytearray()  # not a list of parts: each costs as much as 50 bytes, and they may be tiny
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise RequestCancelledError("the client went away while sending")
                    part: bytes = message.get("body", b"")
                    if len(body) + len(part) > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        return bytes(body + part) if body else part
                    body += part
        except TimeoutError as error:
            raise DeadlineExceededError(f"the body did not arrive within {timeout_s:g} s") from error

    def release_body(self) -> None:
        """Its bytes no longer count against what its client may have waiting: it was read and tokenised."""
        if release := self._scope.get(RELEASE_BODY):
            release()

    def _check_content_type(self) -> None:
        """A browser asks before it posts JSON to another site, and does not before it posts a form or plain text."""
        content_type = next((value for name, value in self._headers if name == b"content-type"), b"application/json")
        media_type = content_type.partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            problem = f"the content type must be application/json, got {quoted(media_type.decode('ascii', 'replace'))}"
            raise InvalidRequestError(problem, param="content-type")

    async def run_while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, or cancel it and raise RequestCancelledError as soon as the client is gone.

        To be called after the body was read. The work runs in the caller's task, which is cancelled as asyncio.timeout
        does it: one task less to start for each request and to keep for each open stream.
        """
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        is_gone = False

        def on_watched(watcher: asyncio.Task[None]) -> None:
            nonlocal is_gone
            is_gone = True
            task.cancel()
            watcher.exception()  # how it was noticed does not matter

        watcher = asyncio.create_task(self._wait_for_disconnect())
        watcher.add_done_callback(on_watched)
        try:
            await work
        except asyncio.CancelledError:
            if is_gone and task.uncancel() <= cancelled_before:
                raise RequestCancelledError("the client went away") from None
            raise
        finally:
            watcher.remove_done_callback(on_watched)
            watcher.cancel()

    async def send_json(
        self, body: bytes | Sequence[bytes], *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """A whole response; between parts of the body, others have their turn."""
        await self._send_whole([body] if isinstance(body, bytes) else body, b"application/json", status, headers)

    async def send_text(self, text: str) -> None:
        """A whole response with status 200."""
        await self._send_whole([text.encode()], b"text/plain; charset=utf-8", 200)

    async def _send_whole(
        self,
        body: Sequence[bytes],
        content_type: bytes,
        status: int,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        *parts, last = body
        num_bytes = len(last) + sum(map(len, parts))
        own = [(b"content-type", content_type), (b"content-length", str(num_bytes).encode())]
        own += self._identification()
        if status == 200:
            own += self._of_success()
        self._note_status(status)
        await self._send({"type": "http.response.start", "status": status, "headers": [*own, *(headers or [])]})
        for part in parts:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await others_turn(self.tenant)
        await self._send({"type": "http.response.body", "body": last})

    async def send_events(self, events: bytes) -> None:
        """Server-sent events, encoded; the first call sends status 200 before them."""
        if not self._streaming:
            await self._begin_events()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, last: bytes) -> None:
        """End the stream with `last`, in one write with the end of the response."""
        if not self._streaming:
            await self._begin_events()
        await self._send({"type": "http.response.body", "body": last})

    async def _begin_events(self) -> None:
        self._streaming = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += self._identification() + self._of_success()
        self._note_status(200)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_error(self, error: BatonError) -> None:
        """Sends an error: as status and body while nothing was sent, else as the stream's last event."""
        if self._access is not None:
            self._access.error = error.code.label
        if self._streaming:
            await self.end_events(self.error_events(error))
        else:
            body = self._dialect.error_body(error)
            await self.send_json(body, status=error.code.value.http_status, headers=error_headers(error))

    def _identification(self) -> list[tuple[bytes, bytes]]:
        return [(REQUEST_ID_HEADER.encode(), self.request_id.encode())] if self.request_id else []

    def _note_status(self, status: int) -> None:
        if self._access is not None:
            self._access.status = status

    def _of_success(self) -> list[tuple[bytes, bytes]]:
        return self._added + [(name, value().encode()) for name, value in self._late]

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than the limit of {limit} bytes")
