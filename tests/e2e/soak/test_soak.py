"""Ten thousand mixed requests, after which no process holds more than it did after the first two thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.soak.footprint import baseline_of, growth_problems
from tests.e2e.soak.run import Soak, soak_cluster

NUM_REQUESTS = 10_000


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
async def test_ten_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    with soak_cluster("nixl", tmp_path) as cluster:
        soak = Soak(cluster, seed=1)
        await soak.run(NUM_REQUESTS, lambda _: None)
        assert not soak.failures, "\n".join([*soak.failures, cluster.output])
        assert not growth_problems(baseline_of(soak.samples), soak.samples[-1]), "\n".join(map(str, soak.samples))
