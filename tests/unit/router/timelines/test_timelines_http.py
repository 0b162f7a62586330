"""GET /v1/requests and /v1/requests/{id}, and the header server-timing."""

from __future__ import annotations

import asyncio
import json

import pytest

from common.errors import UnavailableError
from common.pb import pods_pb2
from router.admission.config import AdmissionConfig
from router.testing import FakeDecodePod, FakePrefillPod
from tests.fuzz.lying_pods import LyingDecodePod, LyingPrefillPod
from tests.unit.router.dispatching.test_survival import busy
from tests.unit.router.dispatching.test_two_legs import BODY, Stream
from tests.unit.router.router_cluster import until
from tests.unit.router.security.conftest import ALICE, BOB, OPERATOR, bearer, key_file  # noqa: F401  (a fixture)

DEADLINE_S = 60.0
PROMPT_TEXT = "Nobody else may read these words"


async def timeline_of(cluster, request_id, **headers):
    response = await cluster.client.get(f"/v1/requests/{request_id}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def newest(cluster):
    return (await cluster.client.get("/v1/requests?limit=1")).json()["data"][0]


def assert_tiles(timeline):
    """The router's phases leave no time out, and pods' are within them."""
    end = timeline["request"]["duration_ms"]
    at = 0.0
    for phase in timeline["phases"]:
        assert phase["start_ms"] >= -0.001
        assert phase["start_ms"] + phase["duration_ms"] <= end + 0.01, phase
        if phase["name"] in ("receive", "tokenize", "admission", "first_token", "stream"):
            assert phase["where"] == "router"
            assert phase["start_ms"] == pytest.approx(at, abs=0.01)
            at = phase["start_ms"] + phase["duration_ms"]
    assert at == pytest.approx(end, abs=0.01)


async def test_a_handoffs_phases_with_the_pods_that_they_took_place_on(start_cluster):
    prefill, decode = LyingPrefillPod(), LyingDecodePod()

    def say_what_it_took(response):
        response.timing.queue_s, response.timing.compute_s = 1e-6, 2e-6

    def report(delta):
        if delta.HasField("report"):
            delta.report.CopyFrom(
                pods_pb2.DecodeReport(num_external_tokens=2, queue_s=1e-6, handoff_s=2e-6, first_token_s=5e-6)
            )

    decode.lie, prefill.lie = report, say_what_it_took
    cluster = await start_cluster([prefill], [decode])
    decode.allowed = 0  # the first token is the prefill pod's
    async with Stream(cluster) as stream:
        await stream.next()
        running = await newest(cluster)
        assert (running["status"], running["num_output_tokens"]) == ("running", 1)
        assert_tiles(await timeline_of(cluster, running["id"]))
        await decode.allow(None)
        await stream.rest()
    timeline = await timeline_of(cluster, running["id"])
    assert_tiles(timeline)
    request = timeline["request"]
    assert (request["status"], request["finish_reason"], request["error"]) == ("finished", "length", None)
    assert (request["num_prompt_tokens"], request["num_output_tokens"]) == (len(BODY["prompt"]), 8)
    assert (request["prefill_pod"], request["decode_pod"]) == (prefill.address, decode.address)
    assert 0 < request["ttft_ms"] < request["duration_ms"]
    of_pods = [(phase["name"], phase["pod"]) for phase in timeline["phases"] if phase["where"] != "router"]
    assert of_pods == [
        ("prefill_queue", prefill.address),
        ("prefill", prefill.address),
        ("decode_queue", decode.address),
        ("transfer", decode.address),
        ("first_decode", decode.address),
        ("decode", decode.address),
    ]
    (route,) = [phase for phase in timeline["phases"] if phase["name"] == "route"]
    assert (route["reason"], route["attempt"]) == ("planned", 1)
    assert sum(timeline["gaps"]["counts"]) == 7
    assert len(timeline["gaps"]["counts"]) == len(timeline["gaps"]["upper_ms"]) + 1
    assert 1 <= timeline["gaps"]["longest_before_token"] <= 7
    assert timeline["gaps"]["longest_ms"] == request["longest_gap_ms"]
    assert timeline["events"] == []


async def test_retries_recomputes_and_moves_are_events_with_the_pods_address(start_cluster):
    first, second = FakePrefillPod(), FakePrefillPod()
    decode, other = LyingDecodePod(), LyingDecodePod()
    cluster = await start_cluster([first, second], [decode, other])
    for pod in (first, second):
        pod.may_answer.clear()
    for pod in (decode, other):
        pod.allowed = 0
        pod.lie = lambda delta: setattr(delta.report, "recompute_reason", "block_missing")
    answer = asyncio.create_task(cluster.complete(**BODY))
    await until(lambda: first.prefills or second.prefills)
    failing, taking = busy(cluster.prefill)
    failing.failure = UnavailableError("draining")
    for pod in (failing, taking):
        pod.may_answer.set()
    await taking.until(lambda: taking.prefills)
    (lost,) = (pod for pod in (decode, other) if pod.submits)
    (heir,) = {decode, other} - {lost}
    await lost.allow(3)
    running = (await newest(cluster))["id"]
    async with asyncio.timeout(DEADLINE_S):
        while "recompute" not in [each["event"] for each in (await timeline_of(cluster, running))["events"]]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # what the pod says is on its way
    await lost.stop()
    await heir.allow(None)
    await answer
    timeline = await timeline_of(cluster, (await newest(cluster))["id"])
    events = [(each["event"], each["reason"], each["pod"]) for each in timeline["events"]]
    assert events == [
        ("prefill_failed", "unavailable", failing.address),
        ("prefill_retry", "unavailable", taking.address),
        ("recompute", "block_missing", lost.address),
        ("redispatch", "pod_lost", lost.address),
    ]
    assert {phase["attempt"] for phase in timeline["phases"]} == {None, 1, 2, 3}
    assert [phase["pod"] for phase in timeline["phases"] if phase["name"] == "decode"][-1] == heir.address
    assert_tiles(timeline)


async def test_a_key_sees_its_own_requests_and_no_address_an_operators_sees_all(start_cluster, key_file):  # noqa: F811
    cluster = await start_cluster(security=key_file.security)
    for key, name in ((ALICE, "alices"), (BOB, "bobs")):
        body = {"prompt": [600], "max_tokens": 2, "request_id": name}
        assert (await cluster.client.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200

    async def seen(key):
        answer = (await cluster.client.get("/v1/requests", headers=bearer(key))).json()
        return [each["id"] for each in answer["data"]]

    assert (await cluster.client.get("/v1/requests")).status_code == 401
    assert [await seen(key) for key in (ALICE, BOB, OPERATOR)] == [["alices"], ["bobs"], ["bobs", "alices"]]
    own = await timeline_of(cluster, "alices", **bearer(ALICE))
    assert cluster.decode[0].address not in json.dumps(own)
    assert cluster.decode[0].address in json.dumps(await timeline_of(cluster, "alices", **bearer(OPERATOR)))
    others = await cluster.client.get("/v1/requests/bobs", headers=bearer(ALICE))
    unknown = await cluster.client.get("/v1/requests/nobodys", headers=bearer(ALICE))
    assert (others.status_code, unknown.status_code) == (404, 404)
    assert others.json()["error"]["message"].replace("bobs", "nobodys") == unknown.json()["error"]["message"]


async def test_an_operator_names_the_tenant_of_an_id_that_two_use(start_cluster, key_file):  # noqa: F811
    cluster = await start_cluster(security=key_file.security)
    for key, num_tokens in ((ALICE, 1), (BOB, 2)):
        body = {"prompt": [600], "max_tokens": num_tokens, "request_id": "same"}
        assert (await cluster.client.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200

    async def found(key, query):
        timeline = await timeline_of(cluster, f"same{query}", **bearer(key))
        listed = (await cluster.client.get(f"/v1/requests{query}", headers=bearer(key))).json()["data"]
        return timeline["request"]["tenant"], [each["tenant"] for each in listed]

    assert await found(OPERATOR, "") == ("bob", ["bob", "alice"])
    assert await found(OPERATOR, "?tenant=alice") == ("alice", ["alice"])
    assert await found(ALICE, "?tenant=bob") == ("alice", ["alice"])
    of_unknown = await cluster.client.get("/v1/requests/same?tenant=unknown", headers=bearer(OPERATOR))
    assert of_unknown.status_code == 404


async def test_choices_have_timelines_of_their_own_and_no_words_are_kept(start_cluster):
    cluster = await start_cluster()
    await cluster.complete(prompt=PROMPT_TEXT, n=2, max_tokens=3, request_id="twice", seed=1)
    listed = (await cluster.client.get("/v1/requests")).json()
    assert [each["id"] for each in listed["data"]] == ["twice-1", "twice-0"]
    timeline = await timeline_of(cluster, "twice")
    assert timeline["request"]["id"] == "twice-0"
    assert not any(word in json.dumps([listed, timeline]) for word in PROMPT_TEXT.split())


async def test_hostile_ids_are_data(start_cluster):
    cluster = await start_cluster()
    response = await cluster.client.get("/v1/requests/%3Cscript%3E%0Aalert(1)%3C%2Fscript%3E")
    assert (response.status_code, response.headers["content-type"]) == (404, "application/json")
    assert "\n" not in response.json()["error"]["message"]
    refused = await cluster.post("/v1/completions", prompt=[600], request_id="<script>")
    assert refused.status_code == 400
    assert (await cluster.client.get("/v1/requests")).json()["data"] == []
    for limit in ("0", "-1", "many", "1" * 99):
        assert (await cluster.client.get("/v1/requests", params={"limit": limit})).status_code == 400


async def test_what_is_refused_is_not_kept_what_its_client_left_is(start_cluster):
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode], admission=AdmissionConfig(max_queued=0, max_inflight=1))
    decode.allowed = 1
    async with Stream(cluster) as stream:
        await stream.next()
        assert (await cluster.post("/v1/completions", **BODY)).status_code == 429
        (kept,) = (await cluster.client.get("/v1/requests")).json()["data"]
        assert kept["status"] == "running", "what was refused is not kept"
    await cluster.until_quiet()
    gone = await newest(cluster)
    assert (gone["status"], gone["error"]) == ("failed", "cancelled")


async def test_the_setting_bounds_how_many_are_kept_and_0_keeps_none(start_cluster):
    cluster = await start_cluster(max_timelines=2)
    for name in "abc":
        await cluster.complete(prompt=[600], max_tokens=1, request_id=name)
    listed = (await cluster.client.get("/v1/requests")).json()
    assert (listed["max_kept"], [each["id"] for each in listed["data"]]) == (2, ["c", "b"])
    off = await start_cluster(max_timelines=0)
    await off.complete(prompt=[600], max_tokens=1, request_id="a")
    assert (await off.client.get("/v1/requests")).json()["data"] == []
    assert (await off.client.get("/v1/requests/a")).status_code == 404


def durations(response):
    parts = [part.split(";dur=") for part in response.headers["server-timing"].split(", ")]
    return {name: float(milliseconds) for name, milliseconds in parts}


async def test_server_timing_has_what_is_known_when_the_answer_begins(start_cluster):
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod()])
    whole = durations(await cluster.post("/v1/completions", **BODY))
    # The fake decode pod may answer before the prefill pod, whose time is not known then.
    assert {"tokenize", "admission", "route", "first_token", "stream", "total"} <= whole.keys()
    parts = ("receive", "tokenize", "admission", "first_token", "stream")
    assert sum(whole[part] for part in parts) == pytest.approx(whole["total"], abs=0.05)
    async with cluster.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        assert {"tokenize", "admission", "first_token", "total"} <= durations(response).keys()
        await response.aread()
    refused = await cluster.post("/v1/completions", prompt=[])
    assert refused.status_code == 400
    assert "server-timing" not in refused.headers
