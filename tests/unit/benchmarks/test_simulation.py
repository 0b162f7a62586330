"""The simulator drives the router's real decisions, and kv_aware keeps its promises in it. Time is simulated."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate.__main__ import SETUPS, Setup, compare, compare_routers, main, run
from benchmarks.simulate.report import verdicts
from benchmarks.simulate.timing import H100_8B
from planning.simulator.cluster import SimulatedCluster
from planning.simulator.router import Setting

SMALL = SETUPS["h100"]._replace(num_prefill=8, num_decode=8)
COLOCATED = SETUPS["h100-colocated"]._replace(num_decode=8)
BASELINES = ("round_robin", "least_loaded", "kv_aware")


@pytest.mark.parametrize(
    ("setup", "trace"),
    [
        pytest.param(SMALL, "system_prompts", marks=pytest.mark.slow),
        *(
            pytest.param(setup, trace, marks=pytest.mark.slow)
            for setup, traces in ((SMALL, ("chats", "agents", "bursts")), (COLOCATED, ("system_prompts", "unshared")))
            for trace in traces
        ),
        pytest.param(SMALL, "unshared", marks=pytest.mark.slow),
    ],
)
def test_kv_aware_beats_round_robin_and_least_loaded_wherever_something_is_shared(setup: Setup, trace: str) -> None:
    rows = compare(setup, setup.trace(trace, 600 if trace == "unshared" else 300, seed=1), BASELINES)
    for verdict in verdicts(rows):
        assert verdict.holds, verdict


@pytest.mark.parametrize("policy", ["kv_aware", "power_of_two:1,prefix_affinity:0.5"])
def test_the_same_seed_gives_the_same_figures(policy: str) -> None:
    trace = SMALL.trace("agents", 100, seed=7)
    first, second = (run(SMALL, trace, policy, "auto") for _ in range(2))
    if policy == "kv_aware":  # lots are drawn anew
        assert first.duration_s == second.duration_s
        assert np.array_equal(first.ttft_s, second.ttft_s)
    assert len(first.ttft_s) == trace.num_requests
    assert (first.ttft_s > 0).all()


@pytest.mark.parametrize("num_blocks", [6_700, 700])
@pytest.mark.parametrize("remote_prefill", ["auto", "prefer", "never"])
def test_the_index_is_right_about_every_pod_whatever_was_evicted_or_preempted(
    remote_prefill: str, num_blocks: int
) -> None:
    setting = Setting(H100_8B._replace(num_blocks=num_blocks), 3, 3, "kv_aware", remote_prefill)
    cluster = SimulatedCluster(setting)
    outcome = cluster.serve(SMALL.trace("agents", 60, seed=3))
    assert cluster.check() == []
    assert cluster.check_index() == []
    assert 0 < outcome.hit_rate < 1


@pytest.mark.slow
@pytest.mark.parametrize("setup", [SMALL, COLOCATED])
def test_each_of_several_routers_has_nearly_the_hit_rate_of_one(setup: Setup) -> None:
    row = compare_routers(setup, setup.trace("agents", 300, seed=1), [2, 4])
    for outcome, num_routers in zip((row.one, *row.several), (1, 2, 4), strict=True):
        assert {each.router for each in outcome.served} == set(range(num_routers))
    assert row.holds, list(row.rows)


def test_each_router_knows_what_the_requests_of_others_left_on_the_pods() -> None:
    setting = Setting(H100_8B._replace(num_blocks=700), 3, 3, "kv_aware", "auto", num_routers=3)
    cluster = SimulatedCluster(setting)
    cluster.serve(SMALL.trace("agents", 60, seed=3))
    assert cluster.check() == []
    assert cluster.check_index() == []


def test_the_command_for_several_routers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--setup", "cpu", "--trace", "agents", "--requests", "30", "--routers", "3"]) == 0
    shown = capsys.readouterr().out
    assert "| agents | 1 |" in shown
    assert "| agents | 3 |" in shown
    assert "agents: target " in shown


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    arguments = ["--setup", "cpu", "--trace", "unshared", "--requests", "30", "--policies", "round_robin|kv_aware:2"]
    assert main([*arguments, "--markdown", str(tmp_path / "out.md")]) == 0
    assert "| no sharing | kv_aware:2 |" in capsys.readouterr().out
    assert "| no sharing | round_robin |" in (tmp_path / "out.md").read_text()
