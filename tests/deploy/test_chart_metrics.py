"""Alerts and autoscaling of the chart ask for metrics that routers and pods have."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from common.errors import ErrorCode
from docs_site.metrics_page import sample_pod_metrics
from router.config import RouterConfig
from router.runtime import Router
from tests.deploy.chart import NAMESPACE, RELEASE, Rendered, nested, render
from tests.deploy.promql import queries, rules, selectors_of
from tests.deploy.values import EVERYTHING, values_of

ALERT_TESTS = Path(__file__).with_name("alerts.yaml")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)
CODES = {code.label for code in ErrorCode}


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    return render(values_of(EVERYTHING))


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """Labels of each series, by component and name."""
    pod = sample_pod_metrics()
    return {
        "router": asyncio.run(series_of_a_router()),
        "prefill": series_of(pod.registry),
        "decode": series_of(pod.registry),
    }


async def series_of_a_router() -> dict[str, set[str]]:
    router = Router(RouterConfig(decode=["127.0.0.1:1"]))
    try:
        return series_of(router.metrics.registry)
    finally:
        await router.stop()


def series_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    labels = {
        name: collector._labelnames
        for name, collector in registry._names_to_collectors.items()
        if "_labelnames" in vars(collector)
    }
    series: dict[str, set[str]] = {}
    for family in registry.collect():
        for suffix in SUFFIXES.get(family.type, ("",)):
            name = family.name + suffix
            series[name] = set(labels.get(family.name) or getattr(family, "_labelnames", ()))
    return series


def test_queries(rendered: Rendered, exported: Mapping[str, Mapping[str, set[str]]]) -> None:
    found = list(queries(rendered))
    assert len(found) >= 12
    for name, query in found:
        metrics = list(selectors_of(query))
        assert metrics, name
        for metric in metrics:
            matchers = {matcher.name: matcher.value for matcher in metric.matchers.matchers}
            assert matchers.pop("namespace") == NAMESPACE
            assert matchers.pop("app_kubernetes_io_instance") == RELEASE
            known = exported[matchers.pop("app_kubernetes_io_component")]
            assert metric.name in known, name
            assert set(matchers) <= known[metric.name], name
            assert set(filter(None, matchers.get("code", "").split("|"))) <= CODES


def test_the_hpa_asks_for_metrics_of_pods(exported: Mapping[str, Mapping[str, set[str]]]) -> None:
    hpas = render(values_of({"autoscaling": "hpa"})).of_kind("HorizontalPodAutoscaler")
    assert len(hpas) == 2
    for hpa in hpas:
        (metric,) = hpa["spec"]["metrics"]
        assert metric["pods"]["metric"]["name"] in exported["decode"]


@needs_promtool
def test_alerts_fire_as_they_should(rendered: Rendered, tmp_path: Path) -> None:
    groups = rendered.of_kind("PrometheusRule")[0]["spec"]["groups"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    tests = tmp_path / "alerts.yaml"
    tests.write_text(ALERT_TESTS.read_text())
    run_promtool(tests)


@needs_promtool
def test_what_autoscalers_see(tmp_path: Path) -> None:
    """Prefill pods with 3000 and 5000 tokens in their queues, two decode pods, no request in the last minutes."""
    values = {f"{role}.autoscaling.enabled": True for role in ("prefill", "decode")}
    rendered = render(nested({**values, "monitoring.enabled": True}))
    asked = dict.fromkeys(query for name, query in queries(rendered) if name.startswith(RELEASE))
    labels = f'namespace="{NAMESPACE}",app_kubernetes_io_instance="{RELEASE}",app_kubernetes_io_component='
    series = {
        f'baton_pod_queued_tokens{{{labels}"prefill",pod="p1"}}': "3000x10",
        f'baton_pod_queued_tokens{{{labels}"prefill",pod="p2"}}': "5000x10",
        f'baton_pod_queued_tokens{{{labels}"decode",pod="d1"}}': "70x10",
        f'baton_pod_kv_cache_usage_perc{{{labels}"decode",pod="d1"}}': "0.5x10",
        f'baton_pod_kv_cache_usage_perc{{{labels}"decode",pod="d2"}}': "0.75x10",
        **{
            f'{name}_bucket{{{labels}"router",le="{bound}"}}': "60x10"
            for name in ("baton_router_time_to_first_token_seconds", "baton_router_inter_token_latency_seconds")
            for bound in ("0.5", "1.0", "+Inf")
        },
    }
    seen = [8000, 0, 1.25, 0]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "8m", "exp_samples": [{"labels": "{}", "value": value}]}
            for query, value in zip(asked, seen, strict=True)
        ],
    }
    tests = tmp_path / "queries.yaml"
    tests.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    run_promtool(tests)


def run_promtool(tests: Path) -> None:
    done = subprocess.run(["promtool", "test", "rules", tests], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_of_its_firing(rendered: Rendered) -> None:
    tests = yaml.safe_load(ALERT_TESTS.read_text())["tests"]
    firing = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert firing == {rule["alert"] for rule in rules(rendered)}
