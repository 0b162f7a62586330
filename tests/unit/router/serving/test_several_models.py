"""Several models behind one router."""

from __future__ import annotations

import asyncio
import json
import shutil

import grpc
import pytest

from common.demo_model import demo_model_path
from common.pb import inference_pb2, inference_pb2_grpc
from router.admission.config import AdmissionConfig
from router.pods.pod import PodState
from router.serving.config import ModelsConfig
from router.testing import FakeDecodePod, FakePrefillPod

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Of two models whose chat templates and sampling defaults differ."""
    found = []
    for name, temperature in (("alpha", 0.25), ("beta", 0.75)):
        directory = tmp_path_factory.mktemp(name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model_path() / file, directory)
        (directory / "chat_template.jinja").write_text(f"{name}: {{{{ messages[0].content }}}}")
        (directory / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
        found.append(str(directory))
    return found


@pytest.fixture
def models(directories):
    alpha, beta = directories
    return {"alpha": alpha, "a": alpha, "beta": beta}


@pytest.fixture
async def cluster(start_cluster, models):
    """A decode pod of each model, in this order, and a prefill pod of alpha."""
    prefill = [FakePrefillPod(model_name="alpha", fingerprint=b"a" * 32)]
    decode = [
        FakeDecodePod(model_name="alpha", fingerprint=b"a" * 32),
        FakeDecodePod(model_name="beta", fingerprint=b"b" * 32, block_size=32, max_model_len=1024),
    ]
    return await start_cluster(prefill, decode, models=models)


async def ask(cluster, model, **body):
    return await cluster.client.post(PATH, json={"model": model, "messages": MESSAGES, "max_tokens": 2, **body})


def model_of(cluster, name):
    return cluster.router.service.model(name)


def states_of(cluster, name):
    return [pod.state for pod in model_of(cluster, name).pods.of_role("decode")]


async def test_each_model_has_its_pods_its_template_and_its_defaults(cluster, tokenizer):
    alpha, beta = cluster.decode
    for asked, name, pod, temperature in (("a", "alpha", alpha, 0.25), ("beta", "beta", beta, 0.75)):
        response = await ask(cluster, asked)
        assert (response.status_code, response.json()["model"]) == (200, name)
        stream = await ask(cluster, asked, stream=True)
        assert json.loads(stream.text.partition("\n")[0].removeprefix("data: "))["model"] == name
        assert len(pod.submits) == 2
        sent = pod.submits[0].request
        assert tokenizer.decode(list(sent.prompt_token_ids)) == f"{name}: Hi"
        assert sent.sampling.temperature == temperature
    for pod, has_prefill_pod in ((alpha, True), (beta, False)):
        assert {submit.HasField("remote_prefill") for submit in pod.submits} == {has_prefill_pod}


async def test_a_model_must_be_named_and_known(cluster):
    unknown, absent = await ask(cluster, "gamma"), await ask(cluster, None)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (absent.status_code, absent.json()["error"]["param"]) == (400, "model")
    for response in (unknown, absent):
        assert "'alpha', 'a', 'beta'" in response.json()["error"]["message"]
    for path, body in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [600]})):
        assert (await cluster.post(path, model="gamma", **body)).status_code == 404
        assert (await cluster.post(path, **body)).status_code == 400
        assert (await cluster.post(path, model="beta", **body)).status_code == 200
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for name, code in (("gamma", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Generate(inference_pb2.GenerateRequest(model=name, text="Hi"), timeout=30)
            assert raised.value.code() is code
        listed = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30)
    assert [(card.name, card.max_model_len) for card in listed.models] == [("alpha", 4096), ("a", 4096), ("beta", 1024)]


async def test_all_names_are_listed(cluster):
    cards = (await cluster.client.get("/v1/models")).json()["data"]
    shown = [(card["id"], card["root"], card["max_model_len"]) for card in cards]
    assert shown == [("alpha", "alpha", 4096), ("a", "alpha", 4096), ("beta", "beta", 1024)]
    assert (await cluster.client.get("/v1/models/a")).json() == cards[1]
    assert (await cluster.client.get("/v1/models/gamma")).status_code == 404


async def test_a_models_pods_come_and_go(cluster):
    alpha, beta = cluster.decode
    await beta.stop()
    await cluster.until(lambda: PodState.DOWN in states_of(cluster, "beta"))
    refused = await ask(cluster, "beta")
    assert (refused.status_code, (await ask(cluster, "alpha")).status_code) == (503, 200)
    assert refused.json()["error"]["message"] == "no decode pod is ready: 1 down"
    health = await cluster.client.get("/readyz")
    assert (health.status_code, [bool(model["reason"]) for model in health.json()["models"]]) == (200, [False, True])
    await alpha.stop()
    await cluster.until(lambda: not cluster.router.cluster.can_serve)
    health = await cluster.client.get("/readyz")
    assert health.status_code == 503
    assert "alpha: no decode pod" in health.json()["reason"]
    assert "beta: no decode pod" in health.json()["reason"]
    await beta.start()
    await cluster.until(lambda: model_of(cluster, "beta").pods.can_serve)
    assert (await ask(cluster, "beta")).status_code == 200
    assert (await cluster.client.get("/readyz")).status_code == 200


async def test_a_pod_of_no_known_model_is_refused_until_it_serves_one(cluster):
    pod = cluster.router.cluster.by_address[cluster.decode[0].address]
    for name, fingerprint, state in (
        ("gamma", b"g" * 32, PodState.REFUSED),
        ("beta", b"a" * 32, PodState.REFUSED),
        ("beta", b"b" * 32, PodState.READY),
    ):
        await cluster.decode[0].stop()
        await cluster.until(lambda: pod.state is PodState.DOWN)
        info = cluster.decode[0].info
        info.model_name, info.fingerprint, info.block_size = name, fingerprint, 32
        info.incarnation += 1
        await cluster.decode[0].start()
        await cluster.until(lambda state=state: pod.state is state)
        assert name != "gamma" or "'gamma', and this router serves alpha, a, beta" in pod.detail
    assert (await ask(cluster, "alpha")).status_code == 503
    for _ in range(4):
        assert (await ask(cluster, "beta")).status_code == 200
    assert [len(each.submits) for each in cluster.decode] == [2, 2]


async def test_the_last_decode_pod_of_a_model_is_not_ejected_whatever_others_have(cluster):
    pods = cluster.router.cluster
    for fake in cluster.decode:
        assert not pods.may_eject(pods.by_address[fake.address], is_certain=True)


async def test_beams_end_with_their_models_tokens(start_cluster, models, tokenizer):
    decode = [FakeDecodePod(model_name=name, fingerprint=name.encode()) for name in ("alpha", "beta")]
    last_token_id = tokenizer.encode("alpha: Hi")[-1]
    assert last_token_id == tokenizer.encode("beta: Hi")[-1]
    decode[0].info.eos_token_ids.append((last_token_id + 1) % 1000 + 24)  # the first that pods answer with
    cluster = await start_cluster([], decode, models=models)
    for model, reason in (("alpha", "stop"), ("beta", "length")):
        answer = await ask(cluster, model, use_beam_search=True, early_stopping=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == reason


async def test_figures_are_of_each_model(cluster):
    for name in ("a", "alpha", "beta", "gamma"):
        await ask(cluster, name)
    await cluster.until_quiet()
    metrics = (await cluster.client.get("/metrics")).text
    for model, count in (("alpha", 2), ("beta", 1)):
        label = f'model_name="{model}"'
        assert f'baton_router_request_success_total{{finished_reason="length",{label}}} {count}.0' in metrics
        assert f"baton_router_inter_token_latency_seconds_count{{{label}}}" in metrics
        assert f'baton_router_request_queue_seconds_count{{{label},priority="normal"}} {count}.0' in metrics
        assert f"baton_router_prompt_tokens_total{{{label}}}" in metrics
    for stranger in ("a", "gamma"):
        assert f'model_name="{stranger}"' not in metrics


async def test_a_full_model_holds_up_no_other(start_cluster, models):
    decode = [FakeDecodePod(model_name=name, fingerprint=name.encode()) for name in ("alpha", "beta")]
    decode[0].allowed = 0
    cluster = await start_cluster([], decode, models=models, admission=AdmissionConfig(max_inflight=1))
    asked = [asyncio.create_task(ask(cluster, "alpha")) for _ in range(2)]
    await decode[0].until(lambda: decode[0].submits)
    while cluster.metric("baton_router_num_requests_queued", priority="normal") != 1:
        assert (await ask(cluster, "beta")).status_code == 200
    assert (await ask(cluster, "beta")).status_code == 200
    assert len(decode[0].submits) == 1
    await decode[0].allow(None)
    assert [response.status_code for response in await asyncio.gather(*asked)] == [200, 200]
    await cluster.until_quiet()


async def test_a_stream_that_loses_its_pod_goes_on_at_another_of_its_model(start_cluster, models):
    decode = [FakeDecodePod(model_name=name, fingerprint=name.encode()) for name in ("alpha", "beta", "alpha")]
    for pod in decode:
        pod.allowed = 2
    cluster = await start_cluster([], decode, models=models)
    first, beta, second = decode
    async with cluster.client.stream(
        "POST", PATH, json={"model": "a", "messages": MESSAGES, "max_tokens": 6, "stream": True}
    ) as response:
        lines = response.aiter_lines()
        while '"content":' not in await anext(lines):
            pass
        lost, other = (first, second) if first.submits else (second, first)
        await other.allow(None)
        await lost.stop()
        rest = [line async for line in lines]
    assert any('"finish_reason":"length"' in line for line in rest)
    assert (len(other.submits), len(beta.submits)) == (1, 0)


async def test_one_model_may_have_several_names_and_pods_need_name_none(start_cluster):
    cluster = await start_cluster(served_model_name=["demo", "gpt-4"])
    for name in ("demo", "gpt-4", None):
        assert (await ask(cluster, name)).json()["model"] == "demo"
    assert [card["id"] for card in (await cluster.client.get("/v1/models")).json()["data"]] == ["demo", "gpt-4"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"models": {"a": "x"}, "model": "y"}, "--models and --model exclude"),
        ({"models": {"a": "x"}, "served_model_name": ["y"]}, "--models and --served-model-name exclude"),
        ({"models": {"": "x"}}, "--models: names must"),
        ({"served_model_name": ["a", "a"]}, "--served-model-name: names must"),
    ],
)
def test_settings_that_contradict_each_other(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ModelsConfig(**settings)
