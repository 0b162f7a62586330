"""Blocks that time alone gives back."""

import asyncio

from decode_service.quarantine import Quarantine
from tests.pods import wait_for


async def test_blocks_come_back_in_their_time() -> None:
    quarantine = Quarantine(3)
    ended: list[str] = []
    quarantine.hold("a", 2, 0.01, lambda: ended.append("first"))
    assert not quarantine.is_full
    quarantine.hold("a", 1, 0.01, lambda: ended.append("second"))
    assert (quarantine.num_blocks, quarantine.is_full, ended) == (3, True, [])
    await wait_for(lambda: len(ended) == 2)
    assert ended == ["first", "second"]
    assert quarantine.num_blocks == 0
    assert not quarantine._timers, "nothing of them is kept"


async def test_closed_quarantine_tells_nobody() -> None:
    quarantine = Quarantine(1)
    ended: list[str] = []
    quarantine.hold("a", 1, 0, lambda: ended.append("before"))
    quarantine.close()
    quarantine.hold("a", 1, 0, lambda: ended.append("after"))
    assert quarantine.num_blocks == 0
    asyncio.get_running_loop().call_later(0, ended.append, "later")
    await wait_for(lambda: bool(ended))
    assert ended == ["later"]
