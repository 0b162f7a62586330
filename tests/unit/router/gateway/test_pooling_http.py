"""Requests that pool, over fake pods: which pod, what is refused, retries, limits and endings."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.errors import InvalidRequestError, OverloadedError, UnavailableError
from common.types.pooling import POOLING_TASKS
from router.gateway.pooling import answers
from router.testing import FakeDecodePod, FakePrefillPod, fake_numbers

PATHS = {
    "/v1/embeddings": ({"input": "Hello"}, answers.EmbeddingList),
    "/v1/classify": ({"input": "Hello"}, answers.ClassifiedList),
    "/v1/score": ({"text_1": "Hello", "text_2": ["a", "b"]}, answers.ScoreList),
    "/v1/rerank": ({"query": "Hello", "documents": ["a", {"text": "b"}]}, answers.Ranking),
    "/pooling": ({"input": "Hello"}, answers.PooledList),
}


def pods(number=1, **facts):
    return [FakePrefillPod(pooling=POOLING_TASKS, **facts) for _ in range(number)]


async def ask(cluster, path, status=200, **body):
    response = await cluster.post(path, **body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("path", PATHS)
async def test_answers_have_the_form_that_is_described(start_cluster, path):
    cluster = await start_cluster(pods(), [])
    body, form = PATHS[path]
    response = await cluster.post(path, **body)
    msgspec.json.decode(response.content, type=form)
    assert response.headers["x-baton-queue-ms"] == "0"
    assert response.headers["server-timing"]


async def test_inputs_go_to_prefill_pods_and_to_decode_pods_without_them(start_cluster):
    decode = FakeDecodePod(pooling=POOLING_TASKS)
    cluster = await start_cluster(pods(2), [decode], prefill_policy="round_robin")
    await ask(cluster, "/v1/embeddings", input=[[5], [6], [7], [8]])
    assert [len(pod.pooled) for pod in cluster.prefill] == [2, 2]
    for pod in cluster.prefill:
        await pod.stop()
    await cluster.until(lambda: not cluster.router.cluster.ready_prefill())
    found = await ask(cluster, "/v1/embeddings", input=[9])
    assert found["data"][0]["embedding"] == fake_numbers([9], 4).tolist()
    assert len(decode.pooled) == 1


@pytest.mark.parametrize("error", [UnavailableError("gone"), OverloadedError("full")])
async def test_an_input_whose_pod_fails_goes_to_another(start_cluster, error):
    cluster = await start_cluster(pods(2), [], prefill_policy="session_affinity", max_attempts=2)
    session = {"x-session-id": "mine"}  # whose requests would all go to the same pod
    await cluster.client.post("/v1/embeddings", json={"input": [4]}, headers=session)
    (chosen,) = [pod for pod in cluster.prefill if pod.pooled]
    chosen.pooling_failure = error
    response = await cluster.client.post("/v1/embeddings", json={"input": [[5], [6], [7]]}, headers=session)
    found = [each["embedding"] for each in response.json()["data"]]
    assert found == [fake_numbers([each], 4).tolist() for each in (5, 6, 7)]
    assert cluster.metric("baton_router_prefill_retries_total", reason=error.code.label) >= 1
    await cluster.until_quiet()


async def test_other_failures_and_invalid_answers_end_it(start_cluster):
    cluster = await start_cluster(pods(), [], max_attempts=2)
    cluster.prefill[0].pooling_failure = InvalidRequestError("no", param="dimensions")
    assert (await ask(cluster, "/v1/embeddings", 400, input=[5]))["error"]["param"] == "dimensions"
    cluster.prefill[0].pooling_failure = None
    cluster.prefill[0].numbers = lambda tokens, size: fake_numbers(tokens, size + 1)
    assert "invalid answer" in (await ask(cluster, "/v1/embeddings", 503, input=[5], dimensions=2))["error"]["message"]
    await cluster.until_quiet()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", [5]]}, "input"),
        ("/v1/embeddings", {"input": [5] * 65}, "input"),
        ("/v1/embeddings", {"input": [5000]}, "input"),
        ("/v1/embeddings", {"input": [[5]] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/pooling", {"input": "a", "task": "generate"}, "task"),
        ("/v1/classify", {"input": "a"}, "model"),
        ("/v1/completions", {"prompt": "a"}, "model"),
    ],
)
async def test_what_a_client_does_wrong_is_named_and_starts_nothing(start_cluster, path, body, param):
    model = [FakePrefillPod(pooling=("embed", "token_embed"), max_model_len=64)]
    decode = [FakeDecodePod(pooling=("embed", "token_embed"), max_model_len=64)]
    cluster = await start_cluster(model, decode)
    status = 404 if body.get("model") else 400
    assert (await ask(cluster, path, status, **body))["error"]["param"] == param
    assert cluster.prefill[0].pooled == []


async def test_what_fits_the_context_exactly_or_is_cut_is_pooled(start_cluster):
    cluster = await start_cluster(pods(max_model_len=64), [])
    assert (await ask(cluster, "/v1/embeddings", input=[5] * 64))["usage"]["total_tokens"] == 64
    cut = await ask(cluster, "/v1/embeddings", input=list(range(100)), truncate_prompt_tokens=-1)
    assert cut["data"][0]["embedding"] == fake_numbers(list(range(36, 100)), 4).tolist()


async def test_a_client_that_goes_away_ends_its_inputs_on_the_pod(start_cluster):
    cluster = await start_cluster(pods(), [])
    pod = cluster.prefill[0]
    pod.may_answer.clear()
    call = asyncio.create_task(cluster.post("/v1/embeddings", input=[[5], [6]]))
    await pod.until(lambda: len(pod.pooled) == 2)
    call.cancel()
    await pod.until(lambda: pod.num_cancelled == 2)
    await cluster.until_quiet()
    assert cluster.router.service.num_under_way == 0


async def test_deadlines_and_aborts_end_it(start_cluster):
    cluster = await start_cluster(pods(), [])
    pod, service = cluster.prefill[0], cluster.router.service
    pod.may_answer.clear()
    late = await cluster.client.post("/v1/embeddings", json={"input": [5]}, headers={"x-request-timeout-ms": "50"})
    assert late.status_code == 504
    num_asked = len(pod.pooled) + 1  # it may have been too late to ask the pod
    call = asyncio.create_task(cluster.post("/v1/embeddings", input=[5], request_id="mine"))
    await pod.until(lambda: len(pod.pooled) == num_asked)
    (run,) = service._pooling.values()
    assert service.abort("mine", run.requests[0].terms.tenant)
    assert (await call).json()["error"]["code"] == "cancelled"
    await pod.until(lambda: pod.num_cancelled == num_asked)


async def test_inputs_wait_for_room_while_chats_need_none_of_it(start_cluster):
    """One request of two inputs fills the pod; the next one waits, in a queue that chats are not in."""
    prefill, decode = pods(connector="none"), [FakeDecodePod(pooling=POOLING_TASKS)]
    prefill[0].info.pooling.tasks.append("generate")
    decode[0].info.pooling.tasks.append("generate")
    prefill[0].info.max_num_seqs = 1
    cluster = await start_cluster(prefill, decode, remote_prefill="never")
    prefill[0].may_answer.clear()
    first = asyncio.create_task(cluster.post("/v1/embeddings", input=[[5], [6]]))
    await prefill[0].until(lambda: len(prefill[0].pooled) == 2)
    second = asyncio.create_task(cluster.post("/v1/embeddings", input=[7]))
    gate = cluster.router.service.models[0].pooling_gate
    while not gate.num_waiting:  # noqa: ASYNC110  nothing tells of it
        await asyncio.sleep(0)
    assert (await cluster.complete(prompt="Hello", max_tokens=2))["usage"]["completion_tokens"] == 2
    assert len(prefill[0].pooled) == 2
    prefill[0].may_answer.set()
    assert (await first).status_code == (await second).status_code == 200


async def test_one_request_has_as_many_tokens_under_way_as_a_step_takes(start_cluster):
    """So that others' prompts need not wait for all of its own; a prompt longer than a step goes alone."""
    prefill = pods()
    prefill[0].info.max_num_batched_tokens = 8
    cluster = await start_cluster(prefill, [])
    pod = prefill[0]
    pod.may_answer.clear()
    call = asyncio.create_task(cluster.post("/v1/embeddings", input=[[5] * 4, [6] * 4, [7] * 9, [8], [9]]))
    await pod.until(lambda: len(pod.pooled) == 2)
    assert (await cluster.client.get("/health")).status_code == 200  # the router has had time to send more
    assert [len(each.request.prompt_token_ids) for each in pod.pooled] == [4, 4]
    pod.may_answer.set()
    assert (await call).status_code == 200
    assert sorted(len(each.request.prompt_token_ids) for each in pod.pooled) == [1, 1, 4, 4, 9]


async def test_figures_and_timelines(start_cluster):
    cluster = await start_cluster(pods(), [])
    cluster.prefill[0].num_cached_tokens = 1
    found = await ask(cluster, "/v1/embeddings", input=[[5, 6], [7, 8]], request_id="mine")
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert cluster.metric("baton_router_pooled_inputs_total", task="embed") == 2
    assert cluster.metric("baton_router_prompt_tokens_total") == 4
    assert cluster.metric("baton_router_pooling_latency_seconds_count") == 1
    timeline = (await cluster.client.get("/v1/requests/mine")).json()
    summary = timeline["request"]
    assert (summary["status"], summary["num_prompt_tokens"]) == ("finished", 4)


async def test_the_numbers_of_a_request_are_bounded_over_all_its_inputs(start_cluster, monkeypatch):
    cluster = await start_cluster(pods(), [])
    monkeypatch.setattr("router.gateway.pooling.asked.MAX_POOLED_REQUEST_BYTES", 5 * 4 * 4)  # vectors of four numbers
    vectors = await ask(cluster, "/pooling", task="token_embed", input=[[5, 6], [7, 8, 9]])
    assert [len(entry["data"]) for entry in vectors["data"]] == [2, 3]
    refused = await ask(cluster, "/pooling", status=400, task="token_embed", input=[[5, 6], [7, 8, 9, 10]])
    assert refused["error"]["param"] == "input"
    assert len(cluster.prefill[0].pooled) == 2
