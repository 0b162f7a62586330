"""API keys on both fronts."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from common.pb import common_pb2, inference_pb2, inference_pb2_grpc
from common.rpc.errors import from_rpc_error
from common.types import root_hash
from router.fairness.tenant import Tenant
from router.fairness.turns import others_turn
from router.security.config import SecurityConfig
from router.security.runtime import Security
from router.testing import FakeDecodePod
from tests.fuzz.raw_http import Wire
from tests.unit.router.security.conftest import ALICE, BOB, bearer

COMPLETIONS = "/v1/completions"
PROMPT = list(range(600, 640))  # two and a half blocks


@pytest.fixture
async def cluster(start_cluster, key_file):
    return await start_cluster(security=key_file.security)


@pytest.fixture
async def stub(cluster):
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def as_tenant(key):
    return {"metadata": (("authorization", f"Bearer {key}"),), "timeout": 30}


def message(**fields):
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=PROMPT), **fields)


@pytest.mark.parametrize(
    "headers", [bearer(ALICE), {"authorization": f"bearer  {ALICE}"}, {"x-api-key": ALICE}, {"X-API-Key": BOB}]
)
async def test_a_valid_key_is_let_in(cluster, headers):
    body = {"prompt": PROMPT, "max_tokens": 2}
    assert (await cluster.client.post(COMPLETIONS, json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        bearer("wrong"),
        bearer(ALICE[:-1]),
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
        {"x-api-key": "wrong"},
        {"authorization": "Bearer wrong", "x-api-key": ALICE},
    ],
)
async def test_without_one_nothing_is_read_or_started(cluster, headers):
    for method, path in (
        ("POST", COMPLETIONS),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/route/explain"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/baton-demo"),
        ("GET", "/metrics"),
        ("GET", "/health/"),
        ("GET", "/anything/else"),
    ):
        content = b"{" if method == "POST" else None
        response = await cluster.client.request(method, path, headers=headers, content=content)
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"].startswith("Bearer")
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("authentication_error", "unauthenticated")
        assert "wrong" not in response.text
        assert ALICE[:-1] not in response.text
    assert cluster.decode[0].submits == []


@pytest.mark.parametrize(("named", "told"), [("mine", "mine"), ("not valid", None), (None, None)])
async def test_a_refusal_has_a_request_id(cluster, named, told):
    headers = {} if named is None else {"x-request-id": named}
    response = await cluster.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.status_code == 401
    assert response.headers["x-request-id"] == told or (told is None and len(response.headers["x-request-id"]) == 32)


async def test_refusals_are_counted(cluster):
    await cluster.client.get("/v1/models")
    await cluster.client.get("/v1/models", headers=bearer("wrong"))
    assert cluster.metric("baton_router_request_errors_total", code="unauthenticated") == 2
    for reason in ("missing", "unknown"):
        assert cluster.metric("baton_router_unauthenticated_total", reason=reason) == 1


async def test_what_tells_whether_the_router_lives_is_open(cluster):
    for path in ("/health", "/readyz", "/livez", "/ping", "/version"):
        assert (await cluster.client.get(path)).status_code == 200
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_metrics_may_be_opened(start_cluster, key_file):
    cluster = await start_cluster(security=msgspec.structs.replace(key_file.security, metrics_need_key=False))
    assert (await cluster.client.get("/metrics")).status_code == 200
    assert (await cluster.client.get("/v1/models")).status_code == 401


async def test_without_keys_everybody_is_let_in(start_cluster):
    cluster = await start_cluster()
    assert (await cluster.client.get("/v1/models")).status_code == 200
    assert (await cluster.client.get("/v1/models", headers=bearer("anything"))).status_code == 200


async def test_each_call_of_grpc_needs_a_key(cluster, stub):
    calls = [
        lambda **how: stub.Generate(message(), **how),
        lambda **how: stub.GenerateStream(message(), **how).read(),
        lambda **how: stub.Abort(inference_pb2.AbortRequest(request_id="x"), **how),
        lambda **how: stub.ListModels(inference_pb2.ListModelsRequest(), **how),
    ]
    for call in calls:
        for how in ({"timeout": 30}, as_tenant("wrong")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(**how)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert from_rpc_error(caught.value).code.label == "unauthenticated"
            assert "wrong" not in caught.value.details()
        await call(**as_tenant(ALICE))
        await call(timeout=30, metadata=(("x-api-key", BOB),))


async def test_tenants_share_no_kv_on_either_front(cluster, stub):
    for key in (ALICE, ALICE, BOB):
        body = {"prompt": PROMPT, "max_tokens": 1}
        assert (await cluster.client.post(COMPLETIONS, json=body, headers=bearer(key))).status_code == 200
        await stub.Generate(message(options=inference_pb2.GenerateOptions(max_tokens=1)), **as_tenant(key))
    salts = [submit.request.cache_salt for submit in cluster.decode[0].submits]
    alice, bob = set(salts[:4]), set(salts[4:])
    assert len(alice) == len(bob) == 1
    assert not alice & bob


async def test_a_client_cannot_talk_itself_into_the_salt_of_another(cluster):
    async def salt_of(key, cache_salt=""):
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": cache_salt}
        assert (await cluster.client.post(COMPLETIONS, json=body, headers=bearer(key))).status_code == 200
        return cluster.decode[0].submits[-1].request.cache_salt

    alice = await salt_of(ALICE)
    given = [alice, alice.rstrip(":"), f":{alice}"]
    assert root_hash(alice) not in [root_hash(await salt_of(BOB, salt)) for salt in given]


async def test_the_route_of_one_tenant_knows_nothing_of_anothers_prompts(start_cluster, key_file):
    key_file.write(alice={"operator": True}, bob={"operator": True})
    cluster = await start_cluster(security=key_file.security)

    async def cached(key):
        body = {"prompt": PROMPT, "max_tokens": 1}
        response = await cluster.client.post("/v1/route/explain", json=body, headers=bearer(key))
        (route,) = response.json()["data"]
        return route["legs"][0]["candidates"][0]["cached_tokens"]

    body = {"prompt": PROMPT, "max_tokens": 1}
    assert (await cluster.client.post(COMPLETIONS, json=body, headers=bearer(ALICE))).status_code == 200
    assert await cached(ALICE) == 32
    assert await cached(BOB) == 0


async def test_request_ids_of_one_tenant_are_nothing_to_another(cluster, stub):
    cluster.decode[0].allowed = 1
    alice = asyncio.ensure_future(stub.Generate(message(request_id="mine"), **as_tenant(ALICE)))
    bob = asyncio.ensure_future(stub.Generate(message(request_id="mine"), **as_tenant(BOB)))
    await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) == 2)
    assert not (await stub.Abort(inference_pb2.AbortRequest(request_id="other"), **as_tenant(BOB))).found
    assert (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"), **as_tenant(BOB))).found
    assert (await bob).choices[0].finish_reason == common_pb2.FINISH_REASON_ABORT
    assert not (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"), **as_tenant(BOB))).found
    assert not alice.done()
    assert (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"), **as_tenant(ALICE))).found
    assert (await alice).choices[0].finish_reason == common_pb2.FINISH_REASON_ABORT


async def test_a_changed_file_holds_without_a_restart(cluster, key_file, caplog):
    async def status(key):
        return (await cluster.client.get("/v1/models", headers=bearer(key))).status_code

    security = cluster.router.security
    key_file.write(alice={})
    security.check()
    assert (await status(ALICE), await status(BOB)) == (200, 401)
    for broken in ("- name: [", "", f"- {{name: a, hash: {BOB}}}"):
        caplog.clear()
        key_file.path.write_text(broken)
        security.check()
        security.check()
        assert (await status(ALICE), await status(BOB)) == (200, 401)
        (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
        assert str(key_file.path) in record.getMessage()
        assert BOB not in record.getMessage()
    key_file.path.unlink()
    security.reload()
    assert (await status(ALICE), await status(BOB)) == (200, 401)
    key_file.write(bob={})
    security.reload()
    assert (await status(ALICE), await status(BOB)) == (401, 200)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)])
async def test_an_open_router_that_others_reach_is_warned_of(host, warned, key_file, caplog):
    Security(key_file.security, host, CollectorRegistry())
    assert caplog.records == []
    Security(SecurityConfig(), host, CollectorRegistry())
    assert bool(caplog.records) is warned


async def test_one_tenants_limit_is_no_other_tenants(start_cluster, key_file):
    key_file.write(alice={"max_concurrent": 2}, bob={"requests_per_minute": 1})
    decode = FakeDecodePod()
    cluster = await start_cluster(decode=[decode], security=key_file.security)
    decode.allowed = 1

    async def post(key, **body):
        body = {"prompt": PROMPT, "max_tokens": 2, **body}
        return await cluster.client.post(COMPLETIONS, json=body, headers=bearer(key))

    running = asyncio.ensure_future(post(ALICE, n=2))
    await decode.until(lambda: len(decode.submits) == 2)
    refused = await post(ALICE)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert len(decode.submits) == 2
    await decode.allow(None)
    assert (await post(BOB)).status_code == 200
    assert (await running).status_code == 200
    assert (await post(ALICE, n=3)).status_code == 400
    assert len(decode.submits) == 3
    refused = await post(BOB)
    assert refused.status_code == 429
    assert 50 <= int(refused.headers["retry-after"]) <= 60
    assert (await post(ALICE)).status_code == 200
    assert cluster.metric("baton_router_tenant_refused_total", tenant="alice", limit="concurrency") == 1
    assert cluster.metric("baton_router_tenant_refused_total", tenant="bob", limit="requests") == 1
    assert cluster.metric("baton_router_tenant_tokens_total", tenant="bob") == len(PROMPT) + 2


async def test_limits_hold_before_anything_is_tokenised(start_cluster, key_file, monkeypatch):
    key_file.write(alice={"requests_per_minute": 1})
    cluster = await start_cluster(security=key_file.security)
    body = {"prompt": "Hello", "max_tokens": 1}
    assert (await cluster.client.post(COMPLETIONS, json=body, headers=bearer(ALICE))).status_code == 200
    monkeypatch.setattr(cluster.router.service.model(""), "prepare", lambda draft: pytest.fail("too late"))
    assert (await cluster.client.post(COMPLETIONS, json=body, headers=bearer(ALICE))).status_code == 429
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(message(), **as_tenant(ALICE))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc_error(caught.value).retry_after_s > 1


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("limits", [{"requests_per_minute": 1}, {"tokens_per_minute": 1}, {"max_concurrent": 1}])
async def test_what_is_over_a_limit_is_refused_before_its_body_comes(start_cluster, key_file, path, limits):
    key_file.write(alice=limits)
    cluster = await start_cluster(security=key_file.security)
    head = f"POST {path} HTTP/1.1\r\nx-api-key: {ALICE}\r\ncontent-length: 1000\r\n\r\n".encode()
    async with Wire.to(cluster.router.port) as first, Wire.to(cluster.router.port) as second:
        if "max_concurrent" in limits:
            await first.send(head)  # and no more
            row = cluster.router.security.access.account(Tenant("alice"))._row
            while not row.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0)
        else:
            await cluster.client.post(COMPLETIONS, json={"prompt": "Hello, Alice"}, headers=bearer(ALICE))
        await second.send(head, b" " * 500)
        assert (await second.receive()).status == 429


async def test_bodies_that_are_refused_count_as_requests(start_cluster, key_file):
    key_file.write(alice={"requests_per_minute": 2})
    cluster = await start_cluster(security=key_file.security)
    headers = {**bearer(ALICE), "content-type": "application/json"}
    answers = [await cluster.client.post(COMPLETIONS, content=b"{", headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [400, 400, 429]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize", "Detokenize", "Explain"])
async def test_grpc_calls_over_a_limit_are_refused_before_their_message_is_parsed(start_cluster, key_file, method):
    key_file.write(alice={"requests_per_minute": 2})
    cluster = await start_cluster(security=key_file.security)
    codes = []
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        for _ in range(3):
            call = channel.unary_stream(f"/baton.v1.Inference/{method}", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff", **as_tenant(ALICE)).read()
            codes.append(caught.value.code().name)
        abort = channel.unary_unary("/baton.v1.Inference/Abort", None, None)
        await abort(b"", **as_tenant(ALICE))  # has no limit
    assert codes == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]


@pytest.mark.parametrize("num_bytes", [0, 200_000])
async def test_no_request_waits_for_all_large_ones_of_another_tenant(cluster, num_bytes):
    waiting = [asyncio.create_task(others_turn(Tenant("alice"))) for _ in range(20_000)]
    body = {"prompt": "Hello", "max_tokens": 1, "metadata": {"text": " " * num_bytes}}
    answer = await cluster.client.post(COMPLETIONS, json=body, headers=bearer(BOB))
    assert answer.status_code == (400 if num_bytes else 200)
    assert not waiting[-1].done()
    await asyncio.gather(*waiting)


async def test_a_client_that_keeps_its_connection_keeps_no_name(cluster):
    async with httpx.AsyncClient(base_url=cluster.router.http_url, limits=httpx.Limits(max_connections=1)) as client:
        assert (await client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_a_key_caps_the_priority_of_its_requests_on_both_fronts(start_cluster, key_file):
    key_file.write(alice={"min_priority": 2}, bob={"min_priority": -1})
    decode = FakeDecodePod()
    cluster = await start_cluster(decode=[decode], security=key_file.security)
    body = {"prompt": PROMPT, "max_tokens": 1}

    async def post(key, **fields):
        return await cluster.client.post(COMPLETIONS, json={**body, **fields}, headers=bearer(key))

    for key, priority in ((ALICE, 1), (BOB, -2)):
        refused = await post(key, priority=priority)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(message(priority=priority), **as_tenant(key))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await post(ALICE)).status_code == 200
    assert (await post(BOB, priority=-1)).status_code == 200
    assert (await post(BOB)).status_code == 200
    assert [submit.request.priority for submit in decode.submits] == [2, -1, 0]
