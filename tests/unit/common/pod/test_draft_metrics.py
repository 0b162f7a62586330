"""What a pod exports of speculative decoding."""

from __future__ import annotations

from msgspec.structs import replace

from common.engine.messages import DraftFigures, EngineStats
from common.pod.config import PodConfig
from common.pod.metrics import PodMetrics
from common.pod.stats import StatsBoard
from docs_site.metrics_page import sample_pod_spec

FIGURES = DraftFigures(
    num_proposed=50,
    num_verified=40,
    num_accepted=25,
    num_verifications=12,
    num_steps=9,
    accepted_by_position=(12, 8, 5),
    failures={"raised": 2, "too_slow": 1},
)
COUNTS = {"drafts_proposed": 50, "drafts_verified": 40, "drafts_accepted": 25} | {
    "draft_verifications": 12,
    "draft_steps": 9,
}


def values(metrics: PodMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_pod_{name}", {"model_name": "m", **labels})


def test_each_figure_has_its_metric() -> None:
    board = StatsBoard(EngineStats(drafts=FIGURES))
    metrics = PodMetrics(board, sample_pod_spec(), PodConfig(served_model_name="m"))
    assert {name: values(metrics, f"{name}_total") for name in COUNTS} == COUNTS
    by_position = [values(metrics, "drafts_accepted_per_position_total", position=str(at)) for at in range(4)]
    assert by_position == [12, 8, 5, None]
    failures = [
        values(metrics, "proposer_failures_total", reason=reason) for reason in ("raised", "too_slow", "invalid")
    ]
    assert failures == [2, 1, None]
    assert values(metrics, "draft_acceptance_fallen") == 0


def test_engines_are_told_apart() -> None:
    board = StatsBoard(EngineStats(), EngineStats(drafts=FIGURES))
    board.drifts[1]._has_fallen = True
    spec = replace(sample_pod_spec(), connector_addresses=(b"", b""))
    metrics = PodMetrics(board, spec, PodConfig(served_model_name="m"))
    for engine, is_second in (("0", False), ("1", True)):
        found = {name: values(metrics, f"{name}_total", engine=engine) for name in COUNTS}
        assert found == {name: count if is_second else 0 for name, count in COUNTS.items()}
        assert values(metrics, "draft_acceptance_fallen", engine=engine) == is_second
    assert values(metrics, "drafts_accepted_per_position_total", engine="1", position="2") == 5
    assert values(metrics, "drafts_accepted_per_position_total", engine="0", position="0") is None
