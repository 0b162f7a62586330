"""Which pod a policy takes, and how a policy is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ConfigError
from router.policies import POLICY_NAMES, PodSnapshot, RequestFacts, create_policy
from router.policies.base import BestInTurn, ScoredPolicy, WeightedScorer

IDLE = PodSnapshot(
    address="a", connector="", num_requests=0, num_queued_tokens=0, num_free_blocks=100, num_blocks=100,
    max_num_seqs=100, max_num_batched_tokens=1000,
)  # fmt: skip
REQUEST = RequestFacts(num_prompt_tokens=10, max_tokens=10, block_hashes=b"", priority=0)


def pods(**differences):
    """Idle pods a, b, c, of which b differs."""
    return [IDLE, replace(IDLE, address="b", **differences), replace(IDLE, address="c")]


def chosen(policy, candidates, times=6):
    return [policy.choose(REQUEST, candidates).address for _ in range(times)]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_equal_pods_take_turns(name):
    policy = create_policy(name)
    assert chosen(policy, pods()) == ["a", "b", "c"] * 2
    assert policy.choose(REQUEST, []) is None


@pytest.mark.parametrize("load", [{"num_requests": 1}, {"num_queued_tokens": 1}, {"num_free_blocks": 99}])
def test_least_loaded_spares_a_pod_for_each_kind_of_load(load):
    assert "b" not in chosen(create_policy("least_loaded"), pods(**load))
    assert "b" in chosen(create_policy("round_robin"), pods(**load))


def test_least_loaded_weighs_load_against_size():
    big = replace(IDLE, address="big", num_requests=10, max_num_seqs=1000)
    small = replace(IDLE, address="small", num_requests=5, max_num_seqs=10)
    assert chosen(create_policy("least_loaded"), [small, big], times=2) == ["big", "big"]


def test_filters_and_weights_compose():
    class NotA:
        def keep(self, request, pods):
            return [pod for pod in pods if pod.address != "a"]

    class Prefers:
        def __init__(self, address):
            self.address = address

        def score(self, request, pods):
            return [float(pod.address == self.address) for pod in pods]

    scorers = [WeightedScorer(Prefers("a"), 3), WeightedScorer(Prefers("b"), 1), WeightedScorer(Prefers("c"), 2)]
    assert chosen(ScoredPolicy(scorers, BestInTurn()), pods(), times=1) == ["a"]
    assert chosen(ScoredPolicy(scorers, BestInTurn(), [NotA()]), pods(), times=1) == ["c"]


def test_an_unknown_policy_is_a_setting_at_fault():
    with pytest.raises(ConfigError, match="least_loaded"):
        create_policy("best")
