"""Debian's Chromium without a window, driven by Playwright, and what a test's page did that it must not."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.unit.router.conftest import says, start_cluster, tokenizer  # noqa: F401  (fixtures)

_PROGRAMS = ("chromium", "chromium-browser")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The program; installed from Debian if it is missing and this user may."""
    found = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        command = ["apt-get", "install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
        subprocess.run(["apt-get", "update"], check=False, capture_output=True, timeout=120)
        subprocess.run(command, check=False, capture_output=True, timeout=600)
        found = shutil.which("chromium")
    if found is None:
        pytest.fail("there is no Chromium: apt-get install chromium")
    return found


@pytest.fixture
async def browser(chromium: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        await launched.close()


@pytest.fixture
async def open_page(browser: Browser) -> AsyncIterator[Callable[..., Awaitable[Page]]]:
    """A function that opens the page of a router. A test fails if its page logs an error, breaks the policy, or asks
    another server."""
    faults: list[str] = []
    async with AsyncExitStack() as stack:

        async def open_(cluster, path="/", *, expects=(), **options) -> Page:
            """`expects`: parts of errors that Chromium logs for statuses that the test is about."""
            context = await browser.new_context(**{"viewport": {"width": 1180, "height": 860}, **options})
            stack.push_async_callback(context.close)
            page = await context.new_page()
            page.set_default_timeout(30_000)

            def note(message):
                if message.type == "error" and not any(part in message.text for part in expects):
                    faults.append(message.text)

            host = urlsplit(cluster.router.http_url).netloc
            page.on("console", note)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("dialog", lambda dialog: faults.append(f"a script ran: {dialog.message}"))
            page.on("request", lambda request: _is_own(request.url, host) or faults.append(request.url))
            await page.goto(f"{cluster.router.http_url}{path}")
            return page

        yield open_
    await asyncio.sleep(0)
    assert faults == []


def _is_own(url: str, host: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("data", "blob") or parts.netloc == host
