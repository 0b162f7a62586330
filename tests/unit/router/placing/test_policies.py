"""Which pod a policy takes, and how a policy is written in a setting."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from router.placing.config import RoutingConfig
from router.placing.policies import Candidates, Leg, PodTable, create_policy
from router.placing.policy_registry import POLICIES, Part, parse_policy
from tests.unit.router.placing.pod_tables import FACTS, IDLE, REQUEST, candidates_of, chosen, table_of

LEGS = list(Leg)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("leg", LEGS)
def test_every_policy_takes_a_pod_and_uses_equal_ones_alike(name, leg):
    policy = create_policy(name)
    candidates = candidates_of(table_of(a={}, b={}, c={}), leg=leg)
    taken = chosen(policy, candidates, 300)
    assert set(taken) == {"a", "b", "c"}
    if name != "power_of_two":
        assert taken[:6] == ["a", "b", "c"] * 2
    assert policy.scorer_names == [name]
    for pods in (candidates, Candidates(REQUEST, leg, PodTable().columns())):
        (scores,) = policy.judge(pods).scores
        assert len(scores) == len(pods.pods)
        assert ((scores >= 0) & (scores <= 1)).all()


def test_routers_that_start_together_take_turns_in_orders_of_their_own():
    candidates = candidates_of(table_of(**{name: {} for name in "abcdefgh"}))
    first, second = (chosen(create_policy("kv_aware", seed), candidates, 16) for seed in (1, 2))
    assert first != second
    for order in (first, second):
        assert order[:8] == order[8:]
        assert sorted(order[:8]) == list("abcdefgh")


@pytest.mark.parametrize("load", [{"num_requests": 1}, {"queued_tokens": 1}, {"free_blocks": 99}])
def test_least_loaded_spares_a_pod_for_each_kind_of_load(load):
    candidates = candidates_of(table_of(a={}, b=load, c={}))
    assert "b" not in chosen(create_policy("least_loaded"), candidates, 6)
    assert "b" in chosen(create_policy("round_robin"), candidates, 6)


def test_a_target_beyond_all_measure_is_none():
    pods = table_of(a={"target_itl_s": math.inf}).columns()
    predictions = [
        Candidates(replace(REQUEST, target_itl_s=target_s), Leg.DECODE, pods).prediction
        for target_s in (1e305, math.inf)
    ]
    assert predictions[0].itl_s == predictions[1].itl_s


def test_a_table_shows_pods_as_they_come_and_go_and_change():
    table = table_of(a={}, b={"num_requests": 1})
    assert [facts.address for facts in table.columns().facts] == ["a", "b"]
    rows = [table.add(FACTS._replace(address=f"c{number}", slot=number), IDLE) for number in range(2, 20)]
    assert len(table.columns()) == len(table.columns().num_requests) == 20
    rows[-1].update(IDLE._replace(num_requests=7))
    assert table.columns().num_requests.tolist() == [0, 1, *[0] * 17, 7]
    for row in rows:
        table.remove(row)
    assert table.columns().num_requests.tolist() == [0, 1]


def test_a_prediction_is_of_the_load_that_pods_have_now():
    table = PodTable()
    row = table.add(FACTS, IDLE)
    idle = candidates_of(table, leg=Leg.WHOLE).prediction
    row.update(IDLE._replace(num_requests=50, context_tokens=1e6, slowness=2))
    busy = candidates_of(table, leg=Leg.WHOLE).prediction
    assert busy.itl_s[0] > 2 * idle.itl_s[0]
    assert busy.prefill_s[0] > 2 * idle.prefill_s[0]


def test_least_loaded_weighs_load_against_size():
    table = table_of(small={"num_requests": 5, "max_num_seqs": 10}, big={"num_requests": 10, "max_num_seqs": 1000})
    assert chosen(create_policy("least_loaded"), candidates_of(table), 2) == ["big", "big"]


def test_power_of_two_avoids_the_worst_pod_and_spreads_over_the_rest():
    candidates = candidates_of(table_of(a={}, b={"num_requests": 90}, c={"num_requests": 1}, d={}))
    taken = Counter(chosen(create_policy("power_of_two"), candidates, 300))
    assert taken["b"] == 0
    assert min(taken["a"], taken["d"]) > 50
    assert taken["c"] > 10, "not always the least loaded"


def test_prefix_affinity_takes_the_longest_prefix_whatever_the_load():
    candidates = candidates_of(table_of(a={}, b={"num_requests": 50}, c={}), {"b": 160, "c": 16})
    assert chosen(create_policy("prefix_affinity"), candidates, 2) == ["b", "b"]
    weighed = create_policy("prefix_affinity:1,least_loaded:2")
    assert chosen(weighed, candidates) == ["c"]


def test_sessions_stay_and_only_those_of_a_lost_pod_move():
    policy = create_policy("session_affinity")
    pods = {name: {} for name in "abcde"}
    sessions = [f"user {number}" for number in range(300)]

    def homes(names):
        table = table_of(**{name: pods[name] for name in names})
        return {session: chosen(policy, candidates_of(table, session=session))[0] for session in sessions}

    before = homes("abcde")
    assert min(Counter(before.values()).values()) > 30
    assert homes("edcba") == before, "in whichever order the pods came"
    after = homes("abcd")
    assert {session for session in sessions if before[session] != after[session]} == {
        session for session in sessions if before[session] == "e"
    }


class TestKVAware:
    """All figures: a step takes 10 ms and 0.1 ms per token, the budget is 1000 tokens."""

    policy = staticmethod(lambda: create_policy("kv_aware"))

    def test_a_cached_prefix_counts_as_much_as_it_saves(self):
        cached = {"warm": 2000}
        for queued, expected in ((0, "warm"), (1000, "warm"), (3000, "cold")):
            table = table_of(warm={"queued_tokens": queued}, cold={})
            assert chosen(self.policy(), candidates_of(table, cached, num_prompt_tokens=2500)) == [expected], queued

    def test_what_is_to_be_computed_is_predicted(self):
        prediction = candidates_of(table_of(a={"queued_tokens": 500}), {"a": 512}, num_prompt_tokens=1512).prediction
        assert prediction.queue_s[0] == pytest.approx(0.055)
        assert prediction.prefill_s[0] == pytest.approx(0.123, rel=0.02)
        assert prediction.ttft_s[0] == pytest.approx(0.178, rel=0.02)
        assert (prediction.itl_s[0], prediction.wait_s[0], prediction.transfer_s[0]) == (0, 0, 0)

    def test_a_prompt_that_is_cached_as_a_whole_still_takes_a_step(self):
        prediction = candidates_of(table_of(a={}), {"a": 320}).prediction
        assert prediction.prefill_s[0] == pytest.approx(0.0101, rel=0.01)

    def test_a_fast_pod_beats_a_slow_one(self):
        table = table_of(slow={"slowness": 2}, fast={"queued_tokens": 400})
        assert chosen(self.policy(), candidates_of(table, num_prompt_tokens=900)) == ["fast"]

    def test_decode_prefers_small_batches_and_room(self):
        table = table_of(a={"num_requests": 60}, b={"num_requests": 30}, full={"num_requests": 5, "free_blocks": 2})
        candidates = candidates_of(table, leg=Leg.DECODE)
        assert chosen(self.policy(), candidates) == ["b"]
        prediction = candidates.prediction
        assert prediction.itl_s[:2] == pytest.approx([0.0161, 0.0131], rel=0.01)
        assert prediction.wait_s[0] == 0 < prediction.wait_s[2]

    def test_decode_prefers_pods_whose_requests_are_short(self):
        table = table_of(long={"num_requests": 4, "context_tokens": 200_000}, short={"num_requests": 6})
        candidates = candidates_of(table, leg=Leg.DECODE)
        assert chosen(self.policy(), candidates) == ["short"]
        assert candidates.prediction.itl_s[0] > 2 * candidates.prediction.itl_s[1]

    def test_decode_without_a_seat_waits(self):
        table = table_of(full={"max_num_seqs": 8, "num_requests": 12}, free={"num_requests": 40})
        assert chosen(self.policy(), candidates_of(table, leg=Leg.DECODE)) == ["free"]

    def test_decode_that_holds_the_prompt_needs_no_transfer(self):
        table = table_of(a={}, b={"num_requests": 1})
        candidates = candidates_of(table, {"b": 320}, leg=Leg.DECODE, handoff_token_s=1e-3)
        assert chosen(self.policy(), candidates) == ["b"]
        assert candidates.prediction.transfer_s[0] == pytest.approx(0.32)

    def test_queued_prompts_slow_decoding_down(self):
        table = table_of(a={"queued_tokens": 5000}, b={"num_requests": 3})
        candidates = candidates_of(table, leg=Leg.DECODE)
        assert chosen(self.policy(), candidates) == ["b"]
        assert candidates.prediction.itl_s[0] == pytest.approx(0.05), "of the target"

    def test_equal_predictions_go_to_the_least_loaded_then_in_turn(self):
        table = table_of(a={"free_blocks": 50}, b={}, c={})
        assert chosen(self.policy(), candidates_of(table), 4) == ["b", "c", "b", "c"]

    @pytest.mark.parametrize("leg", LEGS)
    def test_pods_that_report_nothing_are_taken_in_turn(self, leg):
        nothing = {"free_blocks": 0, "num_blocks": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1}
        table = table_of(a=nothing, b=nothing)
        candidates = candidates_of(table, leg=leg)
        assert chosen(self.policy(), candidates, 2) == ["a", "b"]
        assert np.isfinite(candidates.prediction).all()


class TestTable:
    def test_rows_follow_their_pods(self):
        table, rows, choices = PodTable(), {}, random.Random(5)
        for number in range(400):
            if rows and choices.random() < 0.4:
                table.remove(rows.pop(choices.choice(list(rows)))[0])
            else:
                facts = FACTS._replace(address=f"pod {number}", slot=number, max_num_seqs=number + 1)
                rows[number] = (table.add(facts, IDLE), facts)
            for slot in choices.sample(list(rows), min(3, len(rows))):
                rows[slot][0].update(IDLE._replace(num_requests=slot))
        for slot, (row, _) in rows.items():
            row.update(IDLE._replace(num_requests=slot))
        columns = table.columns()
        assert len(table) == len(columns) == len(rows)
        assert sorted(columns.slots) == sorted(rows)
        for number, facts in enumerate(columns.facts):
            assert facts is rows[facts.slot][1]
            seen = (columns.slots[number], columns.num_requests[number], columns.max_num_seqs[number])
            assert seen == (facts.slot, facts.slot, facts.slot + 1)

    def test_some_of_the_pods(self):
        columns = table_of(a={}, b={"num_requests": 7}, c={}).columns()
        some = columns.where(np.array([False, True, True]))
        assert [facts.address for facts in some.facts] == ["b", "c"]
        assert some.num_requests.tolist() == [7, 0]
        assert some.slots.tolist() == [1, 2]


def test_policies_as_they_are_written():
    assert parse_policy("kv_aware") == (Part("kv_aware", 1.0),)
    assert parse_policy(" prefix_affinity:2 , least_loaded: 0.5") == (
        Part("prefix_affinity", 2.0),
        Part("least_loaded", 0.5),
    )


@pytest.mark.parametrize("setting", ["prefill_policy", "decode_policy"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("best", "unknown policy 'best'; known: kv_aware"),
        ("", "unknown policy ''"),
        ("kv_aware,", "unknown policy ''"),
        ("kv_aware:x", "weight of kv_aware must be a number above 0, got 'x'"),
        ("kv_aware:", "weight of kv_aware"),
        ("kv_aware:0", "weight of kv_aware"),
        ("kv_aware:-1", "weight of kv_aware"),
        ("kv_aware:nan", "weight of kv_aware"),
        ("kv_aware:inf", "weight of kv_aware"),
        ("kv_aware,kv_aware:2", "kv_aware is named twice"),
    ],
)
def test_a_policy_that_cannot_be_meant(setting, text, said):
    with pytest.raises(ValueError) as raised:
        RoutingConfig(**{setting: text})
    assert str(raised.value).startswith(f"--{setting.replace('_', '-')}: ")
    assert said in str(raised.value)
