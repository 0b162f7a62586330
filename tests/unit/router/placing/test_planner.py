"""Where a request goes: both legs, and who computes the prompt."""

from __future__ import annotations

import pytest

from router.placing.index import PrefixIndex
from router.placing.planner import Planner, Query
from router.placing.policies import HeldAdapters, PodTable
from tests.unit.router.placing.pod_tables import FACTS, IDLE, table_of

NOW = 10.0


class Pods:
    """Tables and an index filled from dicts, and a planner over them."""

    def __init__(self, prefill: dict, decode: dict, **settings):
        self.index = PrefixIndex(10_000)
        self.slots = {}
        tables = [self._table(pods) for pods in (prefill, decode)]
        self.planner = Planner(*tables, self.index, **settings)

    def _table(self, pods):
        table = PodTable()
        for address, differences in pods.items():
            self.slots[address] = slot = self.index.join(1000)
            facts = {name: value for name, value in differences.items() if name in FACTS._fields}
            load = {name: value for name, value in differences.items() if name in IDLE._fields}
            table.add(FACTS._replace(address=address, slot=slot, **facts), IDLE._replace(**load))
            blocks = prompt_blocks(differences.get("cached", 0))
            self.index.apply(slot, 1, blocks, b"", is_snapshot=True)
        return table

    def route(self, num_tokens=160, **query):
        """(decode pod, prefill pod or None, reason); None if it cannot be served."""
        plan = self.planner.plan(Query(num_tokens, prompt_blocks(num_tokens), 16, 100.0, 1e-5, **query), NOW)
        if plan is None:
            return None
        self.planner.note(plan)
        return plan.decode.facts.address, plan.prefill and plan.prefill.facts.address, plan.reason


def prompt_blocks(num_tokens):
    return b"".join(number.to_bytes(16, "big") for number in range(1, num_tokens // 16 + 1))


def test_without_pods_nothing_goes_anywhere():
    for remote_prefill in ("auto", "prefer", "always", "never"):
        pods = Pods({"p": {}}, {}, remote_prefill=remote_prefill)
        assert not pods.planner.can_serve
        assert pods.route() is None


def test_legs_must_fit_together():
    decode = {"d1": {"connector": "x"}, "d2": {"connector": "y", "num_requests": 50}, "d3": {"connector": ""}}
    prefill = {"p1": {"connector": "y"}, "p2": {"connector": ""}, "p3": {"connector": "y", "max_model_len": 160}}
    pods = Pods(prefill, decode, remote_prefill="always")
    assert [pods.route() for _ in range(3)] == [("d2", "p1", "planned")] * 3
    alone = {"d1": decode["d1"], "d3": decode["d3"]}
    assert Pods(prefill, alone, remote_prefill="always").route() is None
    assert not Pods(prefill, alone, remote_prefill="always").planner.can_serve
    assert Pods(prefill, alone, remote_prefill="prefer").route()[1:] == (None, "no_prefill_pod")
    assert Pods(prefill, alone).route()[1:] == (None, "no_prefill_pod")


def test_a_pod_to_avoid_is_used_only_if_there_is_no_other():
    assert Pods({}, {"d1": {}, "d2": {"num_requests": 90}}).route(avoid="d1")[0] == "d2"
    assert Pods({}, {"d1": {}}).route(avoid="d1")[0] == "d1"


@pytest.mark.parametrize(
    ("prefill", "decode", "num_tokens", "expected"),
    [
        ({}, {}, 160, ("p", "lower_ttft")),  # both idle
        ({}, {}, 800, ("p", "lower_ttft")),
        ({"queued_tokens": 300}, {}, 160, (None, "lower_ttft")),  # twice as soon
        ({"queued_tokens": 200}, {}, 160, ("p", "lower_ttft")),  # sooner, but not that much
        ({}, {"num_requests": 20, "cached": 640}, 800, (None, "lower_ttft")),  # the conversation so far is here
        ({"cached": 640}, {"num_requests": 20, "cached": 640}, 800, ("p", "lower_ttft")),  # and there
        ({"queued_tokens": 3000}, {"num_requests": 20}, 800, (None, "lower_ttft")),  # in small chunks
        ({"queued_tokens": 9000}, {"num_requests": 20, "target_itl_s": 0.01}, 800, ("p", "itl_target")),  # too large
        ({"queued_tokens": 3000}, {}, 800, (None, "lower_ttft")),  # nobody waits for a token here
        ({}, {"queued_tokens": 300}, 160, ("p", "lower_ttft")),
    ],
)
def test_who_computes_the_prompt(prefill, decode, num_tokens, expected):
    pods = Pods({"p": prefill}, {"d": decode})
    assert pods.route(num_tokens)[1:] == expected


def test_forced():
    decode = {"d": {"num_requests": 20}}
    assert Pods({"p": {}}, decode, remote_prefill="never").route(800) == ("d", None, "colocated")
    assert Pods({"p": {}}, decode, remote_prefill="prefer").route(16) == ("d", "p", "planned")
    assert Pods({"p": {}}, decode, min_remote_prefill_tokens=900).route(800) == ("d", None, "short_prompt")
    assert Pods({"p": {}}, decode, remote_prefill="always").route(800, resumed=True) == ("d", None, "resumed")


def test_each_leg_goes_where_its_blocks_are():
    pods = Pods({"p1": {}, "p2": {"cached": 160}}, {"d1": {}, "d2": {"cached": 160}}, remote_prefill="always")
    for _ in range(3):
        assert pods.route() == ("d2", "p2", "planned")


def test_what_is_being_handed_over_draws_handoffs_but_no_prompts_to_compute():
    for remote_prefill, expected in (("prefer", {"d2"}), ("never", {"d1", "d2"})):
        pods = Pods({"p": {}}, {"d1": {}, "d2": {}}, remote_prefill=remote_prefill)
        pods.index.expect(pods.slots["d2"], prompt_blocks(320), 0, NOW, 60, arrives=True)
        assert {pods.route(320)[0] for _ in range(4)} == expected


def test_a_burst_of_equal_prompts_is_spread_when_the_queue_costs_more_than_the_prompt():
    pods = Pods({"p1": {}, "p2": {}}, {"d": {}}, remote_prefill="always")
    first = pods.route(320)[1]
    pods.index.expect(pods.slots[first], prompt_blocks(320), 0, NOW, 60, arrives=False)
    assert [pods.route(320)[1] for _ in range(3)] == [first] * 3


def test_asking_changes_nothing():
    pods = Pods({"p1": {}, "p2": {}}, {"d1": {}, "d2": {}}, remote_prefill="always")
    query = Query(160, prompt_blocks(160), 16, 100.0, 1e-5)
    asked = {pods.planner.plan(query, NOW).prefill.facts.address for _ in range(5)}
    assert asked == {"p1"}
    assert [pods.route()[1] for _ in range(4)] == ["p1", "p2", "p1", "p2"]


def test_sessions_stay_together_on_each_leg():
    names = {f"p{number}": {} for number in range(8)}, {f"d{number}": {} for number in range(8)}
    pods = Pods(*names, remote_prefill="always", prefill_policy="session_affinity", decode_policy="session_affinity")
    assert len({pods.route(session="a") for _ in range(5)}) == 1
    assert len({pods.route(session=str(number))[0] for number in range(50)}) > 5


def test_requests_with_an_adapter_go_to_pods_that_have_it_and_of_these_to_one_with_a_place_for_it():
    table = table_of(a={}, b={}, c={})
    adapter, others = b"a" * 32, frozenset({b"b" * 32, b"c" * 32})
    rows = {row.facts.address: row for row in table._rows}
    rows["b"].hold(HeldAdapters(others | {adapter}, others, 2))
    rows["c"].hold(HeldAdapters(others | {adapter}, others, 2))
    assert [facts.address for facts in table.columns().for_adapter(adapter).facts] == ["b", "c"]
    rows["c"].hold(HeldAdapters(others | {adapter}, frozenset({adapter, b"b" * 32}), 2))
    assert [facts.address for facts in table.columns().for_adapter(adapter).facts] == ["c"]
    rows["b"].hold(HeldAdapters(others | {adapter}, frozenset({b"b" * 32}), 2))
    assert [facts.address for facts in table.columns().for_adapter(adapter).facts] == ["b", "c"]
    assert len(table.columns().for_adapter(b"")) == 3
    table.remove(rows["a"])  # the last one takes its place
    assert [facts.address for facts in table.columns().for_adapter(adapter).facts] == ["c", "b"]
    assert not len(table.columns().for_adapter(b"d" * 32))


def test_both_legs_of_a_request_with_an_adapter_are_planned_where_it_is():
    pods = Pods({"p": {}, "q": {}}, {"d": {}, "e": {}}, remote_prefill="prefer")
    adapter = b"a" * 32
    has_it = HeldAdapters(frozenset({adapter}))
    (p, _), (_, e) = pods.planner._prefill_table._rows, pods.planner._decode_table._rows
    assert pods.route(adapter=adapter) is None
    e.hold(has_it)
    assert pods.route(adapter=adapter) == ("e", None, "no_prefill_pod")
    p.hold(has_it)
    assert [pods.route(adapter=adapter) for _ in range(2)] == [("e", "p", "planned")] * 2
    query = Query(160, prompt_blocks(160), 16, 100.0, 1e-5, adapter=adapter)
    assert pods.planner.plan_handoff(query, NOW, "e", ["p"]) is None
