"""Steps that are run before the first request, to see how long they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.engine.worker import step_measurement
from common.engine.worker.step_measurement import measure_steps


@pytest.fixture(autouse=True)
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the engine's, not as other tests'."""
    monkeypatch.setattr(step_measurement, "_MAX_ROUNDS", 3)


class Machine:
    """Runs steps in a time of its own; the first one, and one in four, take longer than they must."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self._seconds = seconds

    def run(self, num_tokens: int) -> None:
        self.now += self._seconds(num_tokens) * (3 if len(self.sizes) % 4 == 0 else 1)
        self.sizes.append(num_tokens)

    def measure(self, max_tokens: int = 8192) -> dict[int, float]:
        return dict(measure_steps(self.run, max_tokens, lambda: self.now))


def test_the_shortest_time_of_each_size_counts() -> None:
    measured = Machine(lambda tokens: 0.001 + tokens * 1e-6).measure(max_tokens=512)
    assert measured == pytest.approx({n: 0.001 + n * 1e-6 for n in (1, 64, 128, 256, 512)})


def test_it_ends_where_longer_steps_gain_nothing() -> None:
    measured = Machine(lambda tokens: max(0.002, tokens * 1e-5)).measure()
    assert max(measured) == 512
    assert list(measured) == sorted(measured)


@pytest.mark.parametrize(("token_s", "longest_s"), [(1e-3, 10.0), (0.1, 25.0)])
def test_a_slow_machine_is_not_held_up_for_long(token_s: float, longest_s: float) -> None:
    machine = Machine(lambda tokens: 0.1 + tokens * token_s)
    assert len(machine.measure()) > 1, "the time of a step and that of a token can be told apart"
    assert machine.now < longest_s


def test_no_step_is_longer_than_allowed() -> None:
    machine = Machine(lambda tokens: 0.01)
    machine.measure(max_tokens=100)
    assert set(machine.sizes) == {1, 64, 100}
