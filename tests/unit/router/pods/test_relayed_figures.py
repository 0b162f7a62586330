"""Figures of pods in the router's metrics."""

from __future__ import annotations

import math

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.pb import pods_pb2
from router.testing import FakeDecodePod
from tests.unit.router.router_cluster import run_cluster

HOSTILE = 'a"b\\c\nbaton_router_pod_ready{role="decode"} 5'


def scraped(cluster):
    """Sample name -> labels and value, as Prometheus would read the page."""
    page = generate_latest(cluster.router.metrics.registry).decode()
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("baton_router_pod_")
    }


async def test_reports_are_shown_until_the_pod_is_lost():
    fake = FakeDecodePod()
    fake.info.pod_id = HOSTILE
    fake.stats = pods_pb2.PodStats(
        num_running=3, num_blocks=8, num_free_blocks=6, num_prompt_tokens=70, last_step_s=math.inf
    )
    fake.stats.phases.wait = 2.5
    fake.stats.drafts.num_verified, fake.stats.drafts.num_accepted, fake.stats.drafts.num_verifications = 9, 6, 3
    async with run_cluster(decode=[fake]) as cluster:
        await cluster.until_ready()
        samples = scraped(cluster)
        labels = {"role": "decode", "address": fake.address, "model_name": cluster.router.service.models[0].name}
        assert samples["baton_router_pod_num_requests_running"] == (labels, 3)
        assert samples["baton_router_pod_kv_cache_usage_perc"] == (labels, 0.25)
        assert samples["baton_router_pod_prompt_tokens_total"] == (labels, 70)
        assert samples["baton_router_pod_last_step_seconds"] == (labels, 0), "no clock shows that"
        assert samples["baton_router_pod_step_phase_seconds_total"] == (labels | {"phase": "wait"}, 2.5), "the last one"
        drafts = ("drafts_verified", "drafts_accepted", "draft_verifications")
        assert [samples[f"baton_router_pod_{name}_total"][1] for name in drafts] == [9, 6, 3]
        assert samples["baton_router_pod_info"][0]["pod_id"] == HOSTILE[:64]
        assert samples["baton_router_pod_ready"][1] == 1
        await fake.stop()
        await cluster.until(lambda: cluster.router.cluster.decode_pods[0].info is None)
        assert scraped(cluster).keys() == {"baton_router_pod_ready"}
