"""Where a request would go, as a client is told; and sessions, as clients name them."""

from __future__ import annotations

import grpc
import pytest

from common.pb import inference_pb2, inference_pb2_grpc, pods_pb2
from router.testing import FakeDecodePod, FakePrefillPod

PROMPT = [600] * 64


async def explained(cluster, path="/v1/route/explain", **body):
    response = await cluster.client.request("POST", path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def test_every_candidate_is_shown_and_nothing_is_sent(start_cluster):
    prefill, decode = [FakePrefillPod(), FakePrefillPod()], [FakeDecodePod(), FakeDecodePod()]
    cluster = await start_cluster(prefill, decode, remote_prefill="auto", prefill_policy="kv_aware:2,least_loaded")
    (route,) = await explained(cluster, prompt=PROMPT, max_tokens=5)
    assert route["num_prompt_tokens"] == 64
    assert {leg["leg"]: leg["chosen"] for leg in route["legs"] if leg["taken"]} == {
        "prefill": route["prefill"],
        "decode": route["decode"],
    }
    assert (route["prefill_on"], route["reason"]) == ("remote", "lower_ttft")
    assert route["why"]
    legs = {leg["leg"]: leg for leg in route["legs"]}
    assert {name: leg["taken"] for name, leg in legs.items()} == {"decode": True, "prefill": True, "whole": False}
    for name, pods in (("prefill", prefill), ("decode", decode), ("whole", decode)):
        assert {each["address"] for each in legs[name]["candidates"]} == {pod.address for pod in pods}
    first = legs["prefill"]["candidates"][0]
    assert set(first["scores"]) == {"kv_aware", "least_loaded"}
    assert first["score"] == pytest.approx(2 * first["scores"]["kv_aware"] + first["scores"]["least_loaded"])
    assert first["predicted_ms"]["ttft"] > 0
    assert legs["decode"]["candidates"][0]["predicted_ms"]["itl"] > 0
    assert [pod.prefills for pod in prefill] == [[], []]
    assert [pod.submits for pod in decode] == [[], []]
    assert cluster.metric("baton_router_prompt_tokens_total") == 0
    assert (await explained(cluster, prompt=PROMPT))[0] == route, "asking does not take a turn"


async def test_the_route_is_the_one_that_is_taken(start_cluster):
    cluster = await start_cluster([FakePrefillPod(), FakePrefillPod()], [FakeDecodePod(), FakeDecodePod()])
    for _ in range(3):
        (route,) = await explained(cluster, prompt=PROMPT)
        before = {pod.address: len(pod.submits) for pod in cluster.decode}
        await cluster.complete(prompt=PROMPT, max_tokens=2)
        taken = [pod.address for pod in cluster.decode if len(pod.submits) > before[pod.address]]
        assert taken == [route["decode"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/route/explain", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "dry_run": True}),
        ("/v1/completions", {"prompt": ["Hi", "Ho"], "dry_run": True, "stream": True}),
    ],
)
async def test_chats_and_dry_runs_too(start_cluster, path, body):
    cluster = await start_cluster()
    routes = await explained(cluster, path, **body)
    assert [route["reason"] for route in routes] == ["colocated"] * (2 if "prompt" in body else 1)
    assert cluster.decode[0].submits == []


async def test_get_with_a_body_works(start_cluster):
    cluster = await start_cluster()
    response = await cluster.client.request("GET", "/v1/route/explain", json={"prompt": "Hi"})
    assert response.json()["data"][0]["decode"] == cluster.decode[0].address


@pytest.mark.parametrize(
    ("content", "said"), [(b"[]", "JSON object"), (b"{", "not valid JSON"), (b'{"messages": 5}', "messages")]
)
async def test_bad_bodies(start_cluster, content, said):
    cluster = await start_cluster()
    response = await cluster.client.post("/v1/route/explain", content=content)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


async def test_without_pods_there_is_no_route(start_cluster):
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode])
    await decode.stop()
    await cluster.until(lambda: not cluster.router.cluster.can_serve)
    response = await cluster.post("/v1/route/explain", prompt="Hi")
    assert response.status_code == 503


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, ""),
        ({}, {"user": "u"}, ""),
        ({}, {"user": "u", "prompt_cache_key": "k"}, "k"),
        ({"x-session-id": "h"}, {"user": "u"}, "h"),
        ({"x-session-id": "h"}, {"session_id": "s"}, "s"),
    ],
)
async def test_how_a_session_is_named(start_cluster, headers, body, session):
    cluster = await start_cluster()
    response = await cluster.client.post("/v1/route/explain", json={"prompt": "Hi", **body}, headers=headers)
    assert response.json()["data"][0]["session"] == session
    too_long = await cluster.client.post("/v1/completions", json={"prompt": "Hi", "session_id": "x" * 1025})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["param"] == "session_id"


async def test_a_session_stays_on_its_pod_over_http_and_grpc(start_cluster):
    cluster = await start_cluster([], [FakeDecodePod() for _ in range(4)], decode_policy="session_affinity")
    for number in range(3):
        await cluster.complete(prompt=f"Turn {number}", max_tokens=2, session_id="me")
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(text="Turn 4", options={"max_tokens": 2})
        await inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=(("x-session-id", "me"),))
    assert sorted(len(pod.submits) for pod in cluster.decode) == [0, 0, 0, 4]


async def test_a_pod_that_reports_an_invalid_cache_gets_nothing_until_it_is_restarted(start_cluster):
    liar, honest = FakeDecodePod(), FakeDecodePod()
    cluster = await start_cluster([], [liar, honest])
    pod = cluster.router.cluster.by_address[liar.address]
    (engine,) = pod.engines
    assert not pod.on_kv_events(engine, pods_pb2.KVEvents(sequence=5)), "a snapshot comes first"
    assert pod.on_kv_events(engine, pods_pb2.KVEvents(sequence=1, stored=b"a" * 16, is_snapshot=True))
    assert engine.is_fed
    pod.on_kv_events(engine, pods_pb2.KVEvents(sequence=2, removed=b"b" * 16))
    for _ in range(3):
        await cluster.complete(prompt="Hello", max_tokens=2)
    assert [len(each.submits) for each in cluster.decode] == [0, 3]
    pods = {each["address"]: each for each in (await cluster.client.get("/health")).json()["pods"]}
    assert pods[liar.address]["state"] == "refused"
    assert "never stored" in pods[liar.address]["detail"]
    await liar.stop()
    await cluster.until(lambda: pod.info is None)
    await liar.start()
    await cluster.until(lambda: pod.fits is not None)
    assert pod.violation, "the same process again"
    await liar.stop()
    await cluster.until(lambda: pod.info is None)
    liar.info.MergeFrom(pods_pb2.PodInfo(incarnation=7))
    await liar.start()
    await cluster.until_ready()
