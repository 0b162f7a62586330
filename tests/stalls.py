"""A plugin for pytest under which event loops stall at random and decode pods write slowly, as on a busy machine:
pytest -p tests.stalls tests/unit/router

It finds in minutes what spinning processes show once in hours. BATON_STALLS is the seed of the stalls.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from asyncio import base_events
from collections.abc import Awaitable, Callable

import pytest

from common.pb import pods_pb2
from decode_service.delta_buffer import DeltaBuffer

_LONG_S, _SHORT_S, _WRITE_S = 0.1, 0.005, 0.1  # at most
_CHANCE_OF_LONG, _CHANCE = 0.02, 0.1

_random = random.Random(os.environ.get("BATON_STALLS", "0"))
_run_once = base_events.BaseEventLoop._run_once
_write_to = DeltaBuffer.write_to


def _stalling_run_once(self: base_events.BaseEventLoop) -> None:
    chance = _random.random()
    if chance < _CHANCE:
        time.sleep((_LONG_S if chance < _CHANCE_OF_LONG else _SHORT_S) * _random.random())
    _run_once(self)


async def _slow_write_to(self: DeltaBuffer, write: Callable[[pods_pb2.DecodeEvents], Awaitable[None]]) -> None:
    async def slowly(events: pods_pb2.DecodeEvents) -> None:
        await asyncio.sleep(_WRITE_S * _random.random())
        await write(events)

    await _write_to(self, slowly)


def pytest_configure(config: pytest.Config) -> None:
    base_events.BaseEventLoop._run_once = _stalling_run_once
    DeltaBuffer.write_to = _slow_write_to
