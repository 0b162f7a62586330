"""The faults of one round, and their moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.e2e.faults.faults import Death, Fault, Hang, Restart
from tests.e2e.faults.fleet import Fleet
from tests.e2e.faults.stores import Store, store_of

PREFILL_VICTIMS = [["prefill-0"], ["prefill-0", "prefill-1"], ["prefill-1"]]
NUM_DAMAGES = 6  # of the store's blocks
FAULT_SHARE = 0.15  # of a round's requests that end while something hangs
# A prefill pod that hangs and goes on may write to the blocks that a decode pod has reserved for it. They stay reserved
# for longer than it can hang.
MAX_HANG_S = 4.0
QUARANTINE_S = 10


class Moment(NamedTuple):
    """Something that happens once."""

    at: float  # share of the round's requests that have ended
    name: str
    act: Callable[[], Awaitable[None]]

    def __str__(self) -> str:
        return f"{self.at:.2f} {self.name}"


def draw_storm(fleet: Fleet, rng: random.Random) -> list[Moment]:
    """Faults of one decode pod, of one or both prefill pods at once, and of the store, in the order of their moments.

    A decode pod is always alive, if all are when the round begins: so every request can be answered.
    """
    moments = [*_fault_of([f"decode-{rng.randrange(2)}"], fleet, rng)]
    moments += _fault_of(rng.choice(PREFILL_VICTIMS), fleet, rng)
    if fleet.redis_url:
        moments += _fault_of(["redis"], fleet, rng)
    if (store := store_of(fleet)) is not None:
        damage = _Damage(store, random.Random(rng.random()))
        moments += [Moment(rng.random(), "damage the store", damage.do) for _ in range(NUM_DAMAGES)]
    return sorted(moments, key=lambda moment: moment.at)


class _Damage:
    """Is done on a thread, one after the other."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self._lock = asyncio.Lock()

    async def do(self) -> None:
        """To all blocks that the store has."""
        async with self._lock:
            await asyncio.to_thread(self._store.damage, self._rng)


def _fault_of(names: list[str], fleet: Fleet, rng: random.Random) -> list[Moment]:
    """One fault, of all of these servers at one moment."""
    kind = rng.choice(["kill", "hang"] if names == ["redis"] else ["kill", "hang", "death of front", "death of engine"])
    at = rng.uniform(0.05, 0.95 - FAULT_SHARE)
    moments = []
    for name in names:
        server = fleet.server(name)
        fault: Fault
        match kind:
            case "kill":
                fault = Restart(server)
            case "hang":
                fault = Hang(server, at_most_s=MAX_HANG_S)
            case _:
                fault = Death(server, of_engine=kind == "death of engine")
        moments.append(Moment(at, f"{kind}: {name}", fault.strike))
        moments.append(Moment(at + FAULT_SHARE, f"end of {kind}: {name}", fault.heal))
    return moments
