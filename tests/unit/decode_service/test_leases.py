"""Who waits for whom, and for how long: slow is told from hung, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.common.engine.scheduler_factories import BLOCK_SIZE
from tests.unit.decode_service.simulation import LEASE_S, Simulation, engine_request

PROMPT = list(range(3, 17))
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)


@pytest.fixture
def sim() -> Iterator[Simulation]:
    """A token a step for the prefill pod; blocks for little more than one request on the decode pod."""
    simulation = Simulation(chunk=1, decode_settings={"num_blocks": 7})
    yield simulation
    simulation.finish()
    simulation.assert_sound()
    simulation.close()


def submit(sim: Simulation, name: str = "a", *, remote: bool = True, max_tokens: int = 3) -> None:
    prompt = PROMPT if remote else PROMPT[::-1]  # of which no cache knows the beginning
    sim.loop.do(lambda: sim.router.submit(engine_request(name, prompt, max_tokens), remote=remote))


def reason_of(sim: Simulation, name: str = "a") -> str:
    """Why the request was not handed over; empty: it was."""
    report = sim.router.answers[name].report
    assert report is not None
    return report.recompute_reason


def reserve(sim: Simulation) -> None:
    """The prefill begins, and has been told of the decode pod's blocks."""
    sim.step_prefill()
    sim.step_decode()


def test_slow_prefill_is_waited_for(sim: Simulation) -> None:
    submit(sim)
    reserve(sim)
    for _ in PROMPT:
        sim.advance(LEASE_S / 2)  # four times that for a block
        sim.step_prefill()
        sim.settle_saves()
    sim.finish()
    assert reason_of(sim) == ""


def test_hung_prefill_engine_is_not_waited_for(sim: Simulation) -> None:
    submit(sim)
    reserve(sim)
    sim.advance(LEASE_S + 1)
    sim.finish()
    assert reason_of(sim) == "handoff_timeout"


def test_computed_prompt_is_kept_while_the_decode_pod_has_no_blocks(sim: Simulation) -> None:
    submit(sim, "other", remote=False, max_tokens=10)
    sim.step_decode()
    submit(sim)
    for _ in PROMPT:
        sim.step_prefill()
    while not sim.router.answers["other"].finish_reason:
        assert sim.decode.windowed == []
        sim.advance(LEASE_S / 2)
        sim.step_decode()
    sim.finish()
    assert reason_of(sim) == ""


def test_computed_prompt_is_not_kept_for_a_hung_decode_engine(sim: Simulation) -> None:
    submit(sim, "other", remote=False, max_tokens=10)
    sim.step_decode()
    submit(sim)
    for _ in (*PROMPT, "the end of the last"):
        sim.step_prefill()
    sim.advance(LEASE_S + 1)
    sim.step_prefill()
    assert sim.prefill.engine.is_idle
    assert len(sim.prefill.front.transfers) == 0
    sim.finish()
    assert reason_of(sim) == "handoff_timeout"
