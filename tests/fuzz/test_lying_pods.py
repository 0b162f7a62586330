"""Pods whose answers are invalid: the client gets the true answer all the same, and the router's figures stay sound."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.step_times import Slowness, StepTimes, can_be
from router.pods.config import HealthConfig
from router.testing import FakeDecodePod, FakePrefillPod
from tests.fuzz.host import Host, hosted, profile, sizes
from tests.fuzz.http_strategies import Call
from tests.fuzz.lying_pods import LyingDecodePod, LyingPrefillPod, decode_lies, odd_stats, prefill_lies
from tests.fuzz.router_host import budget, check_quiet
from tests.unit.router.router_cluster import RouterCluster, run_cluster

NEVER_EJECT = HealthConfig(eject_after_failures=0, canary_interval_s=0, stall_timeout_s=0)

_NOT_ROUTED = Call("GET", "/v1/models", (), b"").encode()  # so that a neighbour takes no pod's turn


@pytest.fixture(scope="module")
def host() -> Iterator[Host[RouterCluster]]:
    """A liar and an honest pod of each role; the liars stay in, to lie again."""

    def make():
        prefill, decode = [LyingPrefillPod(), FakePrefillPod()], [LyingDecodePod(), FakeDecodePod()]
        policies = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
        return run_cluster(prefill, decode, pod_health=NEVER_EJECT, **policies)

    with hosted(make) as host:
        host.run(host.value.until_ready())
        yield host


@sizes(30, 3000)
def test_answers_are_true_whatever_pods_say(host, num_examples):
    cluster = host.value
    liar_of_prefill, liar_of_decode = cluster.prefill[0], cluster.decode[0]

    @profile(num_examples)
    @given(decode_lies(), prefill_lies(), odd_stats, st.integers(0, 3), st.none() | st.integers(0, 2))
    def holds(decode_lie, prefill_lie, stats, lies_at, logprobs):
        liar_of_decode.lie, liar_of_decode.lies_at, liar_of_prefill.lie = decode_lie, lies_at, prefill_lie
        for pod in (liar_of_decode, liar_of_prefill):
            host.run(pod.set_stats(stats))
        for _ in range(2):  # each pod has its turn
            with budget(host, _NOT_ROUTED):
                body = host.run(cluster.complete(prompt=[5, 6], max_tokens=4, logprobs=logprobs))
            check(body, logprobs)

    expected = host.run(cluster.complete(prompt=[5, 6], max_tokens=4))["choices"][0]["text"]

    def check(body, logprobs):
        (choice,) = body["choices"]
        assert choice["text"] == expected
        assert choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 4
        if logprobs is not None:
            assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4

    holds()
    check_quiet(host)
    check_metrics(cluster)


@pytest.mark.parametrize("end", [2, 3, 4, 5, 99])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_end_that_cannot_be_is_none(host, role, end):
    cluster = host.value

    def lie(message):
        message.finish_reason = end

    def tell_the_truth(message):
        pass

    liar_of_prefill, liar_of_decode = cluster.prefill[0], cluster.decode[0]
    liar_of_prefill.lie = lie if role == "prefill" else tell_the_truth
    liar_of_decode.lie, liar_of_decode.lies_at = (lie if role == "decode" and end != 4 else tell_the_truth), 1
    for _ in range(2):
        body = host.run(cluster.complete(prompt=[5, 6], max_tokens=4))
        assert body["usage"]["completion_tokens"] == 4
        assert body["choices"][0]["finish_reason"] == "length"
    check_quiet(host)


def check_metrics(cluster: RouterCluster) -> None:
    """No figure is poisoned, and no pod's words have become labels."""
    samples = [sample for family in cluster.router.metrics.registry.collect() for sample in family.samples]
    assert all(math.isfinite(sample.value) for sample in samples), samples
    assert {sample.labels["reason"] for sample in samples if sample.name == "baton_router_recompute_total"} <= {"other"}


@sizes(100, 20_000)
def test_no_report_makes_predictions_that_are_no_numbers(num_examples):
    @profile(num_examples)
    @given(st.lists(st.tuples(st.floats(), st.integers(0, 2**32 - 1), st.floats(0, 1e9)), max_size=20))
    def holds(steps):
        times, slowness = StepTimes(2048), Slowness()
        for seconds, tokens, context in steps:
            if can_be(seconds, tokens):
                slowness.observe(seconds, times.predict(tokens, context))
            times.observe(seconds, tokens, context)
            assert all(0 <= figure < math.inf for figure in times.line)
            assert 0 < slowness.value < math.inf
            assert 0 < times.predict(1) < math.inf

    holds()
