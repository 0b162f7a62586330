"""One exposition of several workers' metrics, with workers that come and go."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import PodHealthMetrics
from router.workers.metrics import Exposition, read_families


def worker(requests=0, *, latency=1.0, inflight=0, pod_tokens=0, pod_ready=1, ejections=0, label="a"):
    registry = CollectorRegistry()
    Counter("baton_router_requests", "-", ["kind"], registry=registry).labels(label).inc(requests)
    Histogram("baton_router_latency", "-", registry=registry, buckets=(1, 10)).observe(latency)
    Gauge("baton_router_inflight", "-", registry=registry).set(inflight)
    Counter("baton_router_pod_tokens", "-", registry=registry).inc(pod_tokens)
    pods = PodHealthMetrics(registry)
    pods.ready.labels("decode", "pod").set(pod_ready)
    pods.ejections.labels("decode", "pod", "errors").inc(ejections)
    return read_families(registry)


@pytest.fixture
def exposition():
    return Exposition()


def samples(exposition):
    text = exposition.text(CollectorRegistry()).decode()
    return {
        (sample.name.removeprefix("baton_router_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_and_histograms_and_gauges_are_summed(exposition):
    exposition.update(1, worker(3, latency=0.5, inflight=2))
    exposition.update(2, worker(4, latency=5, inflight=1))
    found = samples(exposition)
    assert (found["requests_total", "a"], found["inflight",]) == (7, 3)
    assert (found["latency_count",], found["latency_sum",]) == (2, 5.5)
    assert [found["latency_bucket", bound] for bound in ("1.0", "10.0", "+Inf")] == [1, 2, 2]


def test_series_that_only_one_worker_has_are_kept_apart(exposition):
    exposition.update(1, worker(3, label="a"))
    exposition.update(2, worker(4, label="b"))
    found = samples(exposition)
    assert (found["requests_total", "a"], found["requests_total", "b"]) == (3, 4)


def test_figures_of_pods_are_said_once(exposition):
    exposition.update(1, worker(pod_tokens=100))
    exposition.update(2, worker(pod_tokens=120, pod_ready=0))
    found = samples(exposition)
    assert (found["pod_tokens_total",], found["pod_ready", "pod", "decode"]) == (120, 0)


def test_sums_do_not_fall_when_workers_die(exposition):
    exposition.update(1, worker(3, inflight=2, pod_tokens=100))
    exposition.update(2, worker(4, inflight=1, pod_tokens=100))
    exposition.retire(1)
    found = samples(exposition)
    assert (found["requests_total", "a"], found["latency_count",], found["inflight",]) == (7, 2, 1)
    exposition.update(3, worker(1))
    exposition.retire(3)
    exposition.retire(2)
    found = samples(exposition)
    assert (found["requests_total", "a"], found["latency_count",]) == (8, 3)
    assert ("inflight",) not in found
    assert ("pod_tokens_total",) not in found  # a pod that is gone takes its own along


def test_ejections_are_counted_by_each_worker_though_they_are_named_like_figures_of_pods(exposition):
    exposition.update(1, worker(ejections=2))
    exposition.update(2, worker(ejections=3))
    exposition.retire(1)
    assert samples(exposition)["pod_ejections_total", "pod", "errors", "decode"] == 5


def test_what_a_worker_said_last_replaces_what_it_said_before(exposition):
    exposition.update(1, worker(3))
    exposition.update(1, worker(5))
    assert samples(exposition)["requests_total", "a"] == 5
