"""The client without asyncio is the one with asyncio, without it."""

from __future__ import annotations

from tools.sync_client import TARGET, sync_client


def test_it_is_what_is_written_from_the_other() -> None:
    assert TARGET.read_text() == sync_client(), "run `make proto`"
