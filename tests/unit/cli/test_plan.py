"""`baton plan` on a stored profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cli.main import main
from planning.plan import Plan, make_plan
from planning.profile import load_profile
from planning.search import Planner
from tests.deploy.chart import render

PROFILE = Path(__file__).parents[1] / "planning" / "profile.json"
LOAD = ["--rate", "6", "--isl", "200", "--osl", "40", "--requests", "60"]
ARGV = ["plan", "--profile", str(PROFILE), "--slo-ttft", "600", "--slo-itl", "40ms", *LOAD]


def test_a_plan_has_pods_reasons_steps_and_a_plot_and_its_values_render(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def plan_once(planner: Planner, *, colocated: bool) -> Plan:
        plans.append(plans[0] if plans else make_plan(planner, colocated=colocated))
        return plans[0]

    monkeypatch.setattr("cli.plan.make_plan", plan_once)
    values, plot = tmp_path / "values.yaml", tmp_path / "plot.svg"
    assert main([*ARGV, "--json", "--values", str(values), "--plot", str(plot)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [step["rate"] for step in plan["steps"]] == [3, 6, 9, 12]
    assert all(step["most_rate"] >= step["rate"] for step in plan["steps"])
    assert set(plan["reasons"]) == {"prefill", "decode", "colocated"}
    rendered = render(yaml.safe_load(values.read_text()))
    replicas = {
        role: rendered.named("Deployment", f"demo-baton-{role}")["spec"]["replicas"] for role in ("prefill", "decode")
    }
    assert replicas == {"prefill": plan["prefill"], "decode": plan["decode"]}
    assert "<svg" in plot.read_text()
    assert main(ARGV) == 0
    text = capsys.readouterr().out
    assert f"pods    {plan['prefill']} prefill + {plan['decode']} decode" in text
    assert "requests/s: # asked for, - headroom" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rate", "0"], "--rate: must be above 0 and below 1e+09, got 0"),
        (["--isl", "x"], "--isl: must be an integer, got 'x'"),
        (["--slo-ttft", "soon"], "--slo-ttft: must be a time up to an hour such as 300ms or 0.5s, got 'soon'"),
        (["--slo-itl", "1ms"], "--slo-itl: no number of pods keeps 1 ms"),
        (["--trace", "t.jsonl"], "--isl: not with --trace, which has the lengths"),
        (["--tokens-per-step", "0.5"], "--tokens-per-step: must be above 0.99 and below 33, got 0.5"),
        (["--draft-acceptance", "70"], "--draft-acceptance: only with --tokens-per-step"),
        (["--slo-ttf", "1"], "--slo-ttf: unknown option; did you mean --slo-ttft?"),
        (["--url", "http://127.0.0.1:1"], "not allowed with argument --profile"),
    ],
)
def test_bad_input_is_named(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_router_that_does_not_answer_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--url", "http://127.0.0.1:1", "--slo-ttft", "600", "--slo-itl", "40", *LOAD]
    assert main(argv) == 3
    assert "no router at http://127.0.0.1:1" in capsys.readouterr().err


def test_profile_engine_measures_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "demo.json"
    argv = ["profile-engine", "--seconds", "1", "--num-blocks", "300", "--max-model-len", "512", "--max-num-seqs", "4"]
    assert main([*argv, "--max-num-batched-tokens", "256", "--output", str(output)]) == 0
    assert str(output) in capsys.readouterr().out
    profile = load_profile(output)
    assert (profile.source, profile.num_blocks, profile.max_num_seqs) == ("measured", 300, 4)
    assert {16, 64} <= {point.prompt_tokens for point in profile.points}
    assert profile.handoff.connector == "shared-storage"
    assert any(point.num_decoding for point in profile.points)
