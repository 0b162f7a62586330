"""The pictures of `baton top` in the documentation."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.page.answers import pod, summary
from tests.unit.cli.top.conftest import MadeUpRouter, run_top

pytestmark = pytest.mark.page
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # from a server that a page of ours must not ask


@pytest.fixture(autouse=True)
def in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def save(top, name: str) -> None:
    top.app._interval_s = 1.0  # as it says
    top.app._show_status()
    picture = _FONTS.sub("", top.app.export_screenshot(title="baton top"))
    assert "cdn" not in picture
    (IMAGES / name).write_text(f"{picture}\n")


async def test_the_cluster_as_in_the_documentation():
    router = MadeUpRouter()

    async def tick(top=None, **changes):
        router.tick += 1
        prefill = [pod("prefill", number, router.tick) for number in (1, 2)]
        router.pods = [*prefill, *(pod("decode", number, router.tick) for number in (1, 2, 3, 4))]
        router.pods[4] |= changes
        if top is not None:
            await top.poll()

    await tick()
    async with run_top(router, size=(132, 24)) as top:
        await tick(top)
        await tick(top, state="ejected", detail="stall: no step for 4.1 s with 6 requests running; tried again in 12 s")
        await top.press("down", "down", "down", "down")
        await top.until_shown("decode-3  10.0.2.3:50051", "ready to ejected: stall")
        save(top, "top-cluster.svg")


async def test_a_timeline_as_in_the_documentation():
    router = MadeUpRouter()
    router.summaries = [summary(), *(summary(id=f"chat-{number}") for number in range(6))]
    async with run_top(router, size=(110, 38)) as top:
        await top.press("2")
        await top.until_shown("chat-4f2a91", "13:38:13")
        await top.press("end", "home", "enter")
        await top.until_shown("Request chat-4f2a91", "Fallbacks 2", "Gaps between deliveries")
        save(top, "top-timeline.svg")
