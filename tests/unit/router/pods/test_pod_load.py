"""What a router takes a pod's load to be, from reports that lag behind and from its own claims."""

from __future__ import annotations

import pytest

from common.pb import pods_pb2
from common.step_times import StepTimes
from router.placing.index import PrefixIndex
from router.placing.policies import PodTable
from router.pods.load import PodClaim, PodLoad, Share
from router.pods.pod_engine import join_reports
from tests.unit.router.placing.pod_tables import FACTS

NOW = 50.0


@pytest.fixture
def load():
    return PodLoad(StepTimes(2048))


def report(load, **stats):
    load.report(pods_pb2.PodStats(**{"num_free_blocks": 100, "num_blocks": 100, **stats}))


def test_claims_count_at_once_and_reports_add_the_work_of_others(load):
    report(load)
    claims = [PodClaim(load, Share(1000, 200.0, 10), None) for _ in range(2)]
    now = load.current()
    assert (now.num_requests, now.queued_tokens, now.free_blocks) == (2, 400, 80)
    report(load, num_running=1, num_waiting=4, num_queued_tokens=5000, num_free_blocks=60)
    now = load.current()
    assert now.num_requests == 5
    assert now.queued_tokens == 400 + 3000 * 0.2, "prompts of others are taken to be cached as ours are"
    claims[0].prefilled(NOW)
    claims[0].release(NOW)
    assert load.current().num_requests == 4
    claims[1].release(NOW)
    claims[1].release(NOW)
    assert load.current().num_requests == 3
    report(load)
    assert load.current()[:3] == (0, 0, 100)


def test_a_pod_has_no_more_to_compute_than_it_says(load):
    report(load)
    PodClaim(load, Share(1000, 900.0, 0), None)
    for queued, expected in ((0, 900), (300, 300), (100, 100)):
        report(load, num_running=1, num_queued_tokens=queued)
        assert load.current().queued_tokens == expected, "the first report may be older than the claim"
    PodClaim(load, Share(1000, 900.0, 0), None)
    assert load.current().queued_tokens == 1100


def test_steps_are_learned_once_each():
    times = StepTimes(2048)
    load = PodLoad(times)
    before = times.predict(100)
    for _ in range(50):
        report(load, last_step_s=0.5, last_step_tokens=100)
    assert times._num_steps == 1
    assert times.predict(100) > before
    for nothing in ({}, {"last_step_s": float("nan"), "last_step_tokens": 5}, {"last_step_s": 0.1}):
        report(load, **nothing)
    assert times._num_steps == 1


def test_a_slow_pod_is_told_from_the_others():
    times = StepTimes(2048)
    pods = {name: PodLoad(times) for name in ("slow", "usual", "odd", "fast")}
    factors = {"slow": 3, "usual": 1, "odd": 1.15, "fast": 0.3}
    for step in range(200):
        tokens = (1, 64, 2048)[step % 3]
        for name, load in pods.items():
            report(
                load, last_step_s=(0.01 + tokens * 1e-4) * factors[name] * (1 + step * 1e-6), last_step_tokens=tokens
            )
    slowness = {name: load.current().slowness for name, load in pods.items()}
    assert slowness["usual"] == slowness["odd"] == 1
    assert slowness["slow"] > 1.8
    assert slowness["fast"] < 0.6
    pods["slow"].connected()
    assert pods["slow"].current().slowness == 1


def test_the_context_of_others_is_taken_to_be_like_ours(load):
    report(load)
    claims = [PodClaim(load, Share(context=context), None) for context in (1000.0, 3000.0)]
    assert load.current().context_tokens == 4000
    report(load, num_running=6)
    assert load.current().context_tokens == 12_000
    claims[0].release(NOW)
    assert load.current().context_tokens == 15_000
    claims[1].release(NOW)
    assert load.current().context_tokens == 0


def test_the_row_follows(load):
    table = PodTable()
    load.row = table.add(FACTS, load.current())
    report(load, num_running=7)
    assert table.columns().num_requests.tolist() == [7]
    claim = PodClaim(load, Share(16, 16.0, 1), None)
    assert table.columns().queued_tokens.tolist() == [16]
    claim.release(NOW)
    assert table.columns().num_requests.tolist() == [7]


@pytest.mark.parametrize(("fed", "lasts_s"), [(True, 1), (False, 30)])
def test_a_prompt_stays_expected_until_the_pod_can_have_said_so_itself(load, fed, lasts_s):
    index = PrefixIndex(100)
    slot = index.join(100)
    blocks = b"b" * 32
    claim = PodClaim(load, Share(), index.expect(slot, blocks, 0, NOW, 600, arrives=False), fed=fed)
    assert index.match(blocks, NOW + 500).computed.tolist() == [2]
    claim.prefilled(NOW + 500)
    claim.release(NOW + 700)
    assert index.match(blocks, NOW + 500 + lasts_s - 0.1).computed.tolist() == [2]
    assert index.match(blocks, NOW + 500 + lasts_s).computed.tolist() == [0]
    failed = PodClaim(load, Share(), index.expect(slot, blocks, 0, NOW + 600, 600, arrives=False), fed=fed)
    failed.release(NOW + 601)
    assert index.match(blocks, NOW + 601).computed.tolist() == [0]


def test_ranks_of_several_engines_have_the_number_of_theirs() -> None:
    reports = [pods_pb2.PodStats(ranks=[pods_pb2.RankStats(rank=rank) for rank in range(2)]) for _ in range(2)]
    joined = join_reports(reports)
    assert [(each.engine, each.rank) for each in joined.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
