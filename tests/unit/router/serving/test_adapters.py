"""LoRA adapters over fake pods: loaded and unloaded by operators, named as models, kept in agreement."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.errors import UnknownModelError
from common.pb import pods_pb2
from common.types import AdapterName, hash_prompt, root_hash
from router.pods.pod import PodState
from router.requests.request import TokenPrompt
from router.testing import FakeDecodePod, FakePrefillPod, counting_reply
from tests.pods import wait_for
from tests.unit.router.dispatching.test_two_legs import _draft
from tests.unit.router.security.conftest import ALICE, OPERATOR, KeyFile, bearer

A, B = b"a" * 32, b"b" * 32
FILES = {"/a": A, "/b": B, "/copy-of-a": A}
BODY = {"prompt": [600, 601], "max_tokens": 2}


def reply(request):
    """An adapter adds its first byte to each token."""
    return [token + (request.adapter[0] if request.adapter else 0) for token in counting_reply(request)]


def pods(kind, number, **facts):
    fakes = [kind(reply, **facts) for _ in range(number)]
    for fake in fakes:
        fake.adapters = dict(FILES)
    return fakes


@pytest.fixture
async def cluster(start_cluster):
    return await start_cluster(pods(FakePrefillPod, 1), pods(FakeDecodePod, 2))


async def load(cluster, name="polite", path="/a", headers=None, **further):
    body = {"lora_name": name, "lora_path": path, **further}
    return await cluster.client.post("/v1/load_lora_adapter", json=body, headers=headers)


async def unload(cluster, name="polite"):
    return await cluster.post("/v1/unload_lora_adapter", lora_name=name)


async def names(cluster, **options):
    return [card["id"] for card in (await cluster.client.get("/v1/models", **options)).json()["data"]]


async def refusal(response, status, param):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param
    return error["message"]


async def test_an_adapter_answers_by_its_name_until_it_is_unloaded(cluster):
    (base,) = await names(cluster)
    response = await load(cluster)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'polite' added successfully.")
    assert await names(cluster) == [base, "polite"]
    card = (await cluster.client.get("/v1/models/polite")).json()
    assert (card["parent"], card["root"]) == (base, "/a")
    (model,) = (await cluster.client.get("/v1/cluster")).json()["models"]
    assert model["adapters"] == ["polite"]
    answer = await cluster.complete(model="polite", **BODY, return_token_ids=True)
    assert (answer["model"], answer["choices"][0]["token_ids"]) == ("polite", [626 + A[0], 627 + A[0]])
    plain = await cluster.complete(model=base, **BODY, return_token_ids=True)
    assert (plain["model"], plain["choices"][0]["token_ids"]) == (base, [626, 627])
    (prefill,), decode = cluster.prefill, cluster.decode
    assert [each.request.adapter for each in prefill.prefills] == [A, b""]
    assert {each.request.adapter for pod in decode for each in pod.submits} == {A, b""}
    response = await unload(cluster)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'polite' removed successfully.")
    assert await names(cluster) == [base]
    await refusal(await cluster.post("/v1/completions", model="polite", **BODY), 404, "model")
    assert all(pod.names["polite"].digest == b"" for pod in (prefill, *decode))
    await refusal(await unload(cluster), 404, "lora_name")


async def test_prompts_of_an_adapter_have_hashes_of_their_own(cluster):
    await load(cluster)
    service = cluster.router.service
    prompt = list(range(600, 632))
    draft = replace(_draft("a"), prompt=TokenPrompt(prompt), model="polite")
    request = await service.asked("polite", draft.terms.tenant).prepare(draft)
    assert request.block_hashes == b"".join(hash_prompt(prompt, 16, root_hash("", A)))


async def test_what_cannot_be_loaded_is_refused_by_its_field(cluster):
    (base,) = await names(cluster)
    assert "decode pod" in await refusal(await load(cluster, path="/nowhere"), 400, "lora_path")
    await refusal(await load(cluster, base), 409, "lora_name")
    await refusal(await load(cluster, base_model_name="other"), 404, "base_model_name")
    for name in ("", " ", "a\nb", "a\0"):
        await refusal(await load(cluster, name), 400, "lora_name")
    await refusal(await cluster.post("/v1/load_lora_adapter", lora_name="a"), 400, "lora_path")
    assert await names(cluster) == [base]


async def test_a_name_that_is_taken_is_given_to_other_weights_on_request_only(cluster):
    await load(cluster)
    assert (await load(cluster, path="/copy-of-a")).status_code == 200, "the same weights"
    assert "load_inplace" in await refusal(await load(cluster, path="/b"), 409, "lora_name")
    assert (await load(cluster, path="/b", load_inplace=True)).status_code == 200
    answer = await cluster.complete(model="polite", **BODY, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [626 + B[0], 627 + B[0]]


async def test_of_two_loads_of_a_name_at_once_the_one_that_succeeds_has_it(cluster):
    for number in range(8):
        name, paths = f"polite-{number}", ("/a", "/b")
        answers = await asyncio.gather(*(load(cluster, name, path) for path in paths))
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        (won,) = [FILES[path] for path, answer in zip(paths, answers, strict=True) if answer.status_code == 200]
        assert {pod.names[name].digest for pod in (*cluster.prefill, *cluster.decode)} == {won}
        answer = await cluster.complete(model=name, **BODY, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == [626 + won[0], 627 + won[0]]


async def test_pods_that_find_different_weights_get_no_name_and_the_answer_tells_them(cluster):
    odd = cluster.decode[1]
    odd.adapters = {"/a": B}
    message = await refusal(await load(cluster), 409, "lora_path")
    assert odd.address in message
    assert cluster.prefill[0].address in message
    assert not any(pod.names for pod in (*cluster.prefill, *cluster.decode))


async def test_a_pod_that_fails_to_take_the_name_leaves_it_with_none(cluster):
    odd = cluster.decode[1]
    odd.refuses_names = True
    assert (await load(cluster)).status_code == 503
    assert "polite" not in await names(cluster)
    others = (*cluster.prefill, cluster.decode[0])
    await wait_for(lambda: all(not pod.names or not pod.names["polite"].digest for pod in others))


async def test_an_unloaded_name_gets_no_requests_while_pods_cannot_be_told(cluster):
    await load(cluster)
    pods = (*cluster.prefill, *cluster.decode)
    for pod in pods:
        pod.refuses_names = True
    assert (await unload(cluster)).status_code == 503
    assert "polite" not in await names(cluster)
    assert (await cluster.post("/v1/completions", model="polite", **BODY)).status_code == 404
    for pod in pods:
        pod.refuses_names = False
    await wait_for(lambda: not any(pod.names["polite"].digest for pod in pods))


async def test_a_restarted_pod_gets_the_adapters_of_the_others_before_their_requests(cluster):
    await load(cluster)
    restarted, other = cluster.decode
    await restarted.stop()
    restarted.names, restarted.loaded, restarted.loads, restarted.adapters = {}, [], [], {}
    restarted.stats = pods_pb2.PodStats(num_free_blocks=100, num_blocks=100, adapters=pods_pb2.PodAdapters())
    await restarted.start()
    await cluster.until_ready()
    for _ in range(4):
        await cluster.complete(model="polite", **BODY)
    assert (len(restarted.submits), len(other.submits)) == (0, 4)
    await wait_for(lambda: restarted.loads)
    assert restarted.loads[0] == pods_pb2.LoadAdapterRequest(path="/a", digest=A)


async def test_routers_learn_of_adapters_from_pods_alone_and_bring_others_to_them(cluster):
    (prefill,), (first, second) = cluster.prefill, cluster.decode
    first.names["terse"] = pods_pb2.AdapterName(name="terse", revision=5, digest=B, path="/b")
    first.loaded.append(B)
    await first.report_adapters()
    await wait_for(lambda: all("terse" in pod.names for pod in (prefill, second)))
    assert second.names["terse"] == first.names["terse"]
    answer = await cluster.complete(model="terse", **BODY, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [626 + B[0], 627 + B[0]]
    prefill.names["terse"] = pods_pb2.AdapterName(name="terse", revision=6, path="/b")
    await prefill.report_adapters()
    await wait_for(lambda: all(not pod.names["terse"].digest for pod in (first, second)))
    assert (await cluster.post("/v1/completions", model="terse", **BODY)).status_code == 404


async def test_a_request_under_way_outlives_its_adapters_name_and_its_pod(cluster):
    await load(cluster)
    for pod in cluster.decode:
        await pod.allow(2)
    answer = asyncio.create_task(cluster.complete(model="polite", prompt=[600], max_tokens=6, return_token_ids=True))
    first = await wait_for_live(cluster)
    await unload(cluster)
    await first.stop()
    for pod in cluster.decode:
        await pod.allow(None)
    assert (await answer)["choices"][0]["token_ids"] == [625 + A[0] + index for index in range(6)]


async def test_a_pod_that_has_forgotten_an_adapter_fails_no_request(cluster):
    await load(cluster)
    missing = UnknownModelError("adapter is not loaded", param="adapter")
    cluster.decode[0].failure = cluster.prefill[0].failure = missing
    for _ in range(4):
        answer = await cluster.complete(model="polite", **BODY, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == [626 + A[0], 627 + A[0]]
    assert cluster.decode[0].submits
    assert cluster.prefill[0].prefills


async def wait_for_live(cluster):
    await wait_for(lambda: any(pod.live for pod in cluster.decode))
    return next(pod for pod in cluster.decode if pod.live)


async def test_adapters_that_requests_still_have_are_kept(cluster):
    await load(cluster)
    for pod in cluster.decode:
        await pod.allow(1)
    answer = asyncio.create_task(cluster.complete(model="polite", **BODY))
    await wait_for_live(cluster)
    await unload(cluster)
    adapters, pods = cluster.router.service.adapters, (*cluster.prefill, *cluster.decode)
    before = [len(pod.loads) for pod in pods]
    await adapters._keep_needed()
    assert [pod.loads[-1] for pod in pods] == [pods_pb2.LoadAdapterRequest(path="/a", digest=A)] * 3
    assert [len(pod.loads) for pod in pods] == [number + 1 for number in before]
    for pod in cluster.decode:
        await pod.allow(None)
    await answer
    await adapters._keep_needed()
    assert [len(pod.loads) for pod in pods] == [number + 1 for number in before], "none has it any more"


async def test_adapters_of_the_pods_settings_stay(cluster):
    for pod in (*cluster.prefill, *cluster.decode):
        pod.names["fixed"] = pods_pb2.AdapterName(name="fixed", revision=1, digest=A, path="/a", is_permanent=True)
        pod.loaded.append(A)
        await pod.report_adapters()
    served = cluster.router.service.models[0].pods.adapters
    await wait_for(lambda: served.served.get("fixed") == AdapterName("fixed", 1, A, "/a", is_permanent=True))
    assert "settings" in await refusal(await unload(cluster, "fixed"), 409, "lora_name")
    assert "settings" in await refusal(await load(cluster, "fixed", "/b", load_inplace=True), 409, "lora_name")


async def test_pods_that_report_invalid_adapters_are_refused(cluster):
    odd = cluster.decode[0]
    odd.loaded.append(b"short")
    await odd.report_adapters()
    pod = cluster.router.cluster.by_address[odd.address]
    await cluster.until(lambda: pod.state is PodState.REFUSED)
    assert "adapters" in pod.detail


async def test_loading_is_for_operators_and_keys_may_be_limited_to_adapters(start_cluster, tmp_path):
    key_file = KeyFile(tmp_path / "keys.yaml")
    key_file.write(alice={}, operator={"operator": True})
    cluster = await start_cluster(pods(FakePrefillPod, 1), pods(FakeDecodePod, 1), security=key_file.security)
    assert (await load(cluster, headers=bearer(ALICE))).status_code == 403
    assert (await load(cluster, headers=bearer(OPERATOR))).status_code == 200
    assert (await load(cluster, "terse", "/b", headers=bearer(OPERATOR))).status_code == 200
    base = cluster.router.service.models[0].name
    assert await names(cluster, headers=bearer(ALICE)) == [base, "polite", "terse"]
    card = (await cluster.client.get("/v1/models/polite", headers=bearer(ALICE))).json()
    assert card["root"] == "polite", "paths are for operators"
    key_file.write(alice={"models": ["terse"]}, operator={"operator": True})
    cluster.router.reload()
    await wait_for_names(cluster, ["terse"])
    for model, status in (("terse", 200), ("polite", 404), (base, 404)):
        response = await cluster.client.post("/v1/completions", json={"model": model, **BODY}, headers=bearer(ALICE))
        assert response.status_code == status
        response = await cluster.client.post("/tokenize", json={"model": model, "prompt": "a"}, headers=bearer(ALICE))
        assert response.status_code == status
    response = await cluster.client.post("/v1/completions", json=BODY, headers=bearer(ALICE))
    assert "'polite'" not in await refusal(response, 400, "model")


async def wait_for_names(cluster, expected):
    async def are_listed():
        return await names(cluster, headers=bearer(ALICE)) == expected

    await wait_for(are_listed)
