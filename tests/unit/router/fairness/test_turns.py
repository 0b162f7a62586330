from __future__ import annotations

import asyncio

from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn, others_turn_if_large


async def test_one_goes_on_in_each_round_of_the_loop() -> None:
    rounds: list[int] = []
    number = 0

    async def count_rounds() -> None:
        nonlocal number
        while True:
            number += 1
            await asyncio.sleep(0)

    async def compute() -> None:
        await others_turn(Tenant())
        rounds.append(number)
        await others_turn(Tenant())
        rounds.append(number)

    counter = asyncio.create_task(count_rounds())
    await asyncio.gather(*(compute() for _ in range(8)))
    counter.cancel()
    assert len(set(rounds)) == 16


async def test_those_who_come_first_go_on_first() -> None:
    order: list[str] = []

    async def compute(name: str) -> None:
        for part in range(2):
            await others_turn(Tenant())
            order.append(f"{name}{part}")

    await asyncio.gather(compute("a"), compute("b"), compute("c"))
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1"]


async def test_a_tenant_with_much_to_do_holds_up_no_other() -> None:
    order: list[str] = []

    async def compute(name: str) -> None:
        await others_turn(Tenant(name))
        order.append(name)

    await asyncio.gather(*(compute("many") for _ in range(20)), compute("few"))
    assert order.index("few") == 1


async def test_tenants_take_turns_by_weight() -> None:
    order: list[str] = []

    async def compute(tenant: Tenant) -> None:
        await others_turn(tenant)
        order.append(tenant.name)

    await asyncio.gather(*(compute(tenant) for tenant in (Tenant("a"), Tenant("b", weight=2)) for _ in range(20)))
    assert order[:15].count("b") == 10


async def test_what_is_small_takes_no_turn() -> None:
    waiting = [asyncio.create_task(others_turn(Tenant())) for _ in range(3)]
    await asyncio.sleep(0)
    await others_turn_if_large(Tenant(), 30)
    assert not any(each.done() for each in waiting)
    await others_turn_if_large(Tenant(), 2**20)
    assert all(each.done() for each in waiting)


async def test_a_cancelled_one_loses_its_turn_only() -> None:
    first, second, third = (asyncio.create_task(others_turn(Tenant())) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.wait_for(third, 10)
    await asyncio.wait_for(others_turn(Tenant()), 10)


def test_each_loop_has_its_own() -> None:
    for _ in range(2):
        asyncio.run(asyncio.wait_for(others_turn(Tenant()), 10))
