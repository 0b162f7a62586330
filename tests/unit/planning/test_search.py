"""The search finds what trying all sizes finds."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.errors import ConfigError
from planning.plan import make_plan
from planning.profile import EngineProfile, load_profile
from planning.search import Planner, Size, Slo
from planning.simulator.hardware import Drafts
from planning.workload import synthetic

SLO = Slo(0.6, 0.04)


@pytest.fixture(scope="module")
def profile() -> EngineProfile:
    return load_profile(Path(__file__).with_name("profile.json"))


def planner(profile: EngineProfile, slo: Slo = SLO, rate: float = 8.0) -> Planner:
    return Planner(profile, synthetic(rate, 200, 40, 60), slo)


def test_no_smaller_size_keeps_the_slos(profile: EngineProfile) -> None:
    tried = planner(profile)
    size = tried.fewest()
    assert tried.keeps(size)
    assert size.total > 2
    smaller = [Size(*pair) for pair in itertools.product(range(1, size.total), repeat=2) if sum(pair) < size.total]
    assert smaller
    assert not any(tried.keeps(each) for each in smaller)


def test_a_size_holds_the_rate_that_is_said_and_not_much_more(profile: EngineProfile) -> None:
    tried = planner(profile)
    size = tried.fewest()
    scale = tried.most_scale(size, 1.0)
    assert tried.keeps(size, scale)
    assert not tried.keeps(size, scale * 1.1)


def test_slos_below_what_one_request_takes_are_refused_with_the_least(profile: EngineProfile) -> None:
    with pytest.raises(
        ConfigError, match=r"--slo-ttft: no number of pods keeps 50 ms: on an idle cluster the TTFT is 2"
    ):
        planner(profile, Slo(0.05, 0.04)).check_possible()
    with pytest.raises(ConfigError, match=r"--slo-itl: no number of pods keeps 5 ms: .* the ITL is 1"):
        planner(profile, Slo(0.6, 0.005)).check_possible()


@pytest.mark.parametrize(("acceptance", "saved"), [(1.0, 0.35), (0.7, 0.3), (0.05, 0.0)])
def test_drafts_save_steps_where_they_pay(profile: EngineProfile, acceptance: float, saved: float) -> None:
    load = synthetic(0.25, 50, 200, 60)
    drafting = load._replace(drafts=Drafts(2.0, acceptance))
    plain, with_drafts = (Planner(profile, each, SLO).measure(Size(1, 1)).decode_busy for each in (load, drafting))
    assert with_drafts == pytest.approx((1 - saved) * plain, abs=0.06)


def test_what_fits_no_pod_is_refused(profile: EngineProfile) -> None:
    with pytest.raises(ConfigError, match="does not fit the model's 4,096"):
        Planner(profile, synthetic(1.0, 5000, 40, 10), SLO)


def test_reasons_say_what_one_pod_fewer_breaks(profile: EngineProfile) -> None:
    plan = make_plan(planner(profile), scales=(1.0,))
    reasons = dict(plan.reasons)
    assert plan.size.num_prefill > 1
    assert reasons["prefill"].startswith(f"with {plan.size.num_prefill - 1} the TTFT is ")
    assert "times its SLO" in reasons["prefill"]
    assert plan.asked.headroom >= 0
