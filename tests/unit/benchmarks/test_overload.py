"""Three times what the pods can do, for a simulated minute."""

from __future__ import annotations

import pytest

from benchmarks.simulate.overload import overload


@pytest.mark.slow
def test_overload_degrades_goodput_not_everybody() -> None:
    at_once, limits = (overload(3.0, mode, num_pods=1) for mode in ("sent to the pods at once", "queue, limits named"))
    assert limits.good >= 0.9 * at_once.served, "which is what the pods can do"
    assert limits.kept >= 0.95, "who is let in is served in time"
    assert at_once.kept < 0.5, "without admission most wait too long"
    assert limits.ttft_p99_s < at_once.ttft_p50_s / 5


def test_who_can_be_served_is_not_refused() -> None:
    row = overload(0.5, "queue, limits named", num_pods=1, seconds=30)
    assert row.refused <= 0.02
    assert row.kept >= 0.98
