"""What a pod knows of its engine's adapters, whatever becomes of its callers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from common.engine.client.base import EngineClient
from common.engine.contract.adapters import AdapterFacts
from common.pod import adapters as pod_adapters
from common.pod.adapters import PodAdapters
from common.types import AdapterName

DIGEST = bytes(32)


class SlowEngine:
    """An engine that loads when it is told to."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def load_adapter(self, directory: str) -> AdapterFacts:
        self.began.set()
        await self.may_end.wait()
        return AdapterFacts(digest=DIGEST, rank=8, num_bytes=1)


async def test_a_load_whose_caller_has_gone_is_known(tmp_path: Path) -> None:
    engine, changed = SlowEngine(), asyncio.Event()
    table = PodAdapters(cast("EngineClient", engine), 60.0, changed.set)
    caller = asyncio.create_task(table.load(str(tmp_path)))
    async with asyncio.timeout(60):
        await engine.began.wait()
        caller.cancel()
        await asyncio.wait([caller])
        assert table.loaded == []
        engine.may_end.set()
        await changed.wait()
    assert table.loaded == [DIGEST]
    await table.close()


async def test_names_that_were_taken_away_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_adapters, "MAX_NAMES", 2)
    table = PodAdapters(cast("EngineClient", cast("Any", None)), 60.0, lambda: None)
    now = pod_adapters.time.time_ns()
    for number, name in enumerate("abc"):
        table.give_name(AdapterName(name, now + number, b"", "/path"))
    assert [name.name for name in table.names] == ["b", "c"]
    await table.close()
