"""The application without a terminal, over a router or over made-up answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from textual.pilot import Pilot
from textual.strip import Strip

from cli.top.answers import ClusterView, Request, RequestList, Timeline
from cli.top.app import TopApp
from cli.top.router_api import RouterApi
from cli.top.table import SortedTable
from common.errors import BatonError
from loadgen.http_client import HttpClient
from tests.page.answers import cluster, pod, request_list, summary, timeline
from tests.unit.router.conftest import says, start_cluster, tokenizer  # noqa: F401  (fixtures)

DEADLINE_S = 60.0
NEVER_S = 3600.0  # as the interval: the test says when the router is asked again


class MadeUpRouter:
    """Stands in for RouterApi. What it answers is what a router could."""

    url = "http://router:8000"

    def __init__(self, *pods):
        self.tick = 1
        self.pods = list(pods) or [pod("prefill", 1, 1), pod("decode", 1, 1)]
        self.models = ["qwen3-8b"]
        self.summaries = [summary()]
        self.reason = "planned"
        self.error: BatonError | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_calls = 0
        self.num_under_way = self.most_under_way = 0

    async def cluster(self) -> ClusterView:
        view = cluster(self.tick, self.pods) | {"models": [self._model(name) for name in self.models]}
        return msgspec.convert(await self._answer(view), ClusterView)

    async def requests(self) -> RequestList:
        return msgspec.convert(await self._answer(request_list(*self.summaries)), RequestList)

    async def timeline(self, request: Request) -> Timeline:
        (found,) = [each for each in self.summaries if each["id"] == request.id]
        return msgspec.convert(await self._answer(timeline(found, self.reason)), Timeline)

    def _model(self, name):
        return {"name": name, "reason": "", "num_queued": 0}

    async def _answer(self, answer):
        self.num_calls += 1
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            await self.may_answer.wait()
            if self.error is not None:
                raise self.error
            return answer
        finally:
            self.num_under_way -= 1


class Terminal:
    """A running application and what it shows."""

    def __init__(self, app: TopApp, pilot: Pilot):
        self.app = app
        self.pilot = pilot

    @property
    def screen(self) -> str:
        """The screen as lines of text."""
        return "\n".join(strip.text.rstrip() for strip in self.strips)

    @property
    def strips(self) -> list[Strip]:
        """The screen with its styles."""
        return self.app.screen._compositor.render_strips()

    @property
    def table(self) -> SortedTable:
        (shown,) = [table for table in self.app.screen_stack[0].query(SortedTable) if table.is_on_screen]
        return shown

    def column(self, title: str) -> list[str]:
        """The cells of a column, from the first row to the last."""
        (number,) = [number for number, column in enumerate(self.table.columns) if column.title == title]
        return [line.cells[number] for line in self.table._lines]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns when `condition()` is true."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await self.pilot.pause(0.01)
        except TimeoutError:
            pytest.fail(f"the screen is\n{self.screen}")

    async def until_shown(self, *texts: str) -> None:
        await self.until(lambda: all(text in self.screen for text in texts))

    async def poll(self) -> None:
        """The router is asked once more, now, and what it says is shown."""
        poller = self.app.poller
        await self.until(lambda: poller.waiting_s == 0)
        before = poller._next_at
        poller.now()
        await self.until(lambda: poller._next_at != before)
        await self.pilot.pause()

    async def poll_until(self, condition: Callable[[], object]) -> None:
        """The router is asked again and again."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await self.poll()
        except TimeoutError:
            pytest.fail(f"the screen is\n{self.screen}")


@asynccontextmanager
async def run_top(api, *, interval_s: float = NEVER_S, size=(140, 40)) -> AsyncIterator[Terminal]:
    app = TopApp(api, await api.cluster(), interval_s)
    async with app.run_test(size=size) as pilot:
        terminal = Terminal(app, pilot)
        await terminal.until(lambda: terminal.app.poller._next_at)
        yield terminal


class CannedServer:
    """An HTTP server that gives the same answers again and again; it can be stopped and started on its port."""

    def __init__(self):
        self.answers = {}  # path -> status, and a document or bytes
        self.requests = []  # head lines and headers
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._port = 0
        self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            await self.may_answer.wait()
            status, body = self.answers.get(head.split()[1].partition("?")[0], (404, b""))
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            more = "location: http://elsewhere/\r\n" if status in (301, 302) else ""
            head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{more}\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[CannedServer]:
    """Not started yet."""
    canned = CannedServer()
    yield canned
    canned.may_answer.set()
    await canned.stop()


@pytest.fixture
async def open_api():
    """A function that returns the API of a router at a URL."""
    clients = []

    def open_(url: str, *, key: str = "", timeout_s: float = DEADLINE_S) -> RouterApi:
        clients.append(HttpClient(url, api_key=key))
        return RouterApi(clients[-1], url, has_key=bool(key), timeout_s=timeout_s)

    yield open_
    for client in clients:
        client.close()
