"""What happens between a router and its pods: dispatch, faults, cancellation, limits."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from common.errors import BatonError, OverloadedError, PromptTooLongError, UnavailableError
from common.pb import common_pb2, pods_pb2
from common.rpc.convert import sampling_to_pb
from common.types import ExtraKey, hash_prompt, root_hash
from router.admission.config import AdmissionConfig
from router.dispatching.config import SurvivalConfig
from router.dispatching.generation import Generation
from router.fairness.tenant import Tenant
from router.gateway import completions
from router.gateway import endpoint as endpoint_module
from router.pods.session import DecodeSession
from router.requests.ids import RunningIds
from router.requests.request import Draft, TokenPrompt
from router.requests.terms import Terms
from router.testing import FakeDecodePod, FakePrefillPod, counting_reply, fixed_reply
from router.wire.exchange import TENANT

PROMPT = [600, 601, 602]  # followed by tokens that are whole words
LONG_PROMPT = [600] * 1000
TOKENS = list(counting_reply(common_pb2.EngineRequest(prompt_token_ids=PROMPT, sampling={"max_tokens": 8})))
BODY = {"prompt": PROMPT, "max_tokens": 8}


@pytest.fixture
def text(tokenizer):
    """Text of the first n tokens of the answer."""
    from common.tokenization.detokenizer import create_detokenizer

    def text(num_tokens=8):
        detokenizer = create_detokenizer(tokenizer, context=PROMPT)
        return "".join(map(detokenizer.push, TOKENS[:num_tokens])) + detokenizer.finish()

    return text


class Stream:
    """A streamed completion, event by event."""

    def __init__(self, cluster, **body):
        self._request = cluster.client.stream("POST", "/v1/completions", json={**BODY, "stream": True, **body})
        self.text = ""

    async def __aenter__(self):
        self.response = await self._request.__aenter__()
        self._lines = self.response.aiter_lines()
        return self

    async def __aexit__(self, *exc_info):
        await self._lines.aclose()
        await self._request.__aexit__(*exc_info)

    async def next(self):
        """The next event, parsed; None at the end."""
        async for line in self._lines:
            if line == "data: [DONE]":
                return None
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "choices" in event:
                    self.text += event["choices"][0]["text"]
                return event
        raise AssertionError("the stream broke off")

    async def rest(self):
        """All remaining events."""
        return [event async for event in aiter_until_none(self.next)]


async def aiter_until_none(get):
    while (event := await get()) is not None:
        yield event


async def test_both_legs_get_the_same_request(pair):
    await pair.complete(**BODY, seed=3)
    submit, prefill = pair.decode[0].submits[0], pair.prefill[0].prefills[0]
    assert submit.request == prefill.request
    assert submit.remote_prefill.transfer_id == prefill.transfer_id != ""
    assert submit.remote_prefill.epoch == prefill.epoch == 1
    assert submit.remote_prefill.prefill_address == pair.prefill[0].address
    assert 600 < submit.timeout_s <= 605


async def test_pods_learn_everything_about_the_request(pair):
    service = pair.router.service
    draft = replace(
        _draft("a"),
        prompt=TokenPrompt(LONG_PROMPT),
        cache_salt="tenant",
        priority=3,
        terms=Terms(itl_slo_s=0.05),
        extra_keys=(ExtraKey(20, 500, b"digest"),),
    )
    request = await service.model("").prepare(draft)
    async with service.run([request]) as run:
        async for _ in run.generations[0]:
            pass
    sent = pair.decode[0].submits[0].request
    assert sent == common_pb2.EngineRequest(
        request_id=sent.request_id,
        prompt_token_ids=LONG_PROMPT,
        sampling=sampling_to_pb(request.sampling),
        cache_salt=request.cache_salt,
        priority=3,
        target_itl_ms=50,
        data_parallel_rank=0,
        extra_keys=[common_pb2.ExtraKey(start=20, end=500, digest=b"digest")],
    )
    assert sent.cache_salt
    # What the router looks for in its index is what pods compute.
    expected = hash_prompt(LONG_PROMPT, 16, root_hash(sent.cache_salt), draft.extra_keys)
    assert request.block_hashes == b"".join(expected)


async def test_the_first_token_does_not_wait_for_decode(pair, text):
    pair.decode[0].allowed = 0
    async with Stream(pair) as stream:
        await stream.next()
        assert stream.text == text(1)
        await pair.decode[0].allow(None)
        await stream.rest()
    assert stream.text == text()
    await pair.until_quiet()


async def test_the_answer_does_not_wait_for_a_late_prefill_response(pair, text):
    pair.prefill[0].may_answer.clear()
    body = await pair.complete(**BODY)
    assert body["choices"][0]["text"] == text()
    await pair.prefill[0].until(lambda: pair.prefill[0].num_cancelled == 1)


@pytest.mark.parametrize("reply", [counting_reply, fixed_reply([2])], ids=["max_tokens", "end_of_sequence"])
async def test_prefill_alone_can_end_a_request(pair, reply):
    pair.prefill[0].reply = pair.decode[0].reply = reply
    pair.decode[0].allowed = 0
    body = await pair.complete(prompt=PROMPT, max_tokens=1 if reply is counting_reply else 5)
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == ("length" if reply is counting_reply else "stop")
    await pair.decode[0].until(lambda: pair.decode[0].aborts)
    await pair.until_quiet()


@pytest.mark.parametrize("failure", [UnavailableError("draining"), OverloadedError("full"), BatonError("bug")])
async def test_decode_is_told_when_prefill_fails(pair, text, failure):
    pair.decode[0].recomputes_only = True
    pair.prefill[0].failure = failure
    body = await pair.complete(**BODY)
    assert body["choices"][0]["text"] == text()
    (told,) = pair.decode[0].prefill_failures
    assert (told.epoch, told.reason) == (1, failure.code.value.number)
    assert pair.metric("baton_router_prefill_failures_total", code=failure.code.label) == 1


@pytest.mark.parametrize(
    ("setting", "asked", "expected"),
    [
        ({}, {}, common_pb2.KV_FAILURE_POLICY_RECOMPUTE),
        ({}, {"kv_failure_policy": "fail"}, common_pb2.KV_FAILURE_POLICY_FAIL),
        ({"kv_failure_policy": "fail"}, {}, common_pb2.KV_FAILURE_POLICY_FAIL),
        ({"kv_failure_policy": "fail"}, {"kv_failure_policy": "recompute"}, common_pb2.KV_FAILURE_POLICY_RECOMPUTE),
    ],
)
async def test_the_request_overrules_the_routers_kv_failure_policy(start_cluster, setting, asked, expected):
    cluster = await start_cluster(**setting)
    await cluster.complete(**BODY, **asked)
    response = await cluster.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, **asked
    )
    assert response.status_code == 200
    assert [submit.kv_failure_policy for submit in cluster.decode[0].submits] == [expected] * 2


async def test_kv_that_must_not_be_recomputed_fails_the_request(start_cluster):
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod(), FakeDecodePod()])
    for decode in cluster.decode:
        decode.recomputes_only = True
    cluster.prefill[0].failure = OverloadedError("full")
    response = await cluster.post("/v1/completions", **BODY, kv_failure_policy="fail")
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unavailable", "kv_failure_policy")
    assert sum(len(decode.submits) for decode in cluster.decode) == 1  # nobody was asked to compute it instead
    await cluster.until_quiet()


async def test_kv_that_fails_after_the_first_token_ends_the_stream_with_an_error(pair, text):
    """The prefill pod has answered, but its KV does not arrive: to go on would mean to compute the prompt again."""
    pair.decode[0].allowed = 0
    async with Stream(pair, kv_failure_policy="fail") as stream:
        await stream.next()
        pair.decode[0].failure = UnavailableError("the KV did not come", param="kv_failure_policy")
        await pair.decode[0].allow(None)
        events = await stream.rest()
    assert events[-1]["error"]["param"] == "kv_failure_policy"
    assert stream.text == text(1)
    assert len(pair.decode[0].submits) == 1
    await pair.until_quiet()


async def test_a_lost_decode_pod_is_no_failure_of_the_kv(start_cluster, text):
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod(), FakeDecodePod()], kv_failure_policy="fail")
    for decode in cluster.decode:
        decode.allowed = 3
    async with Stream(cluster) as stream:
        while stream.text != text(3):
            await stream.next()
        dying, other = cluster.decode if cluster.decode[0].submits else reversed(cluster.decode)
        await other.allow(None)
        await dying.stop()
        await stream.rest()
    assert stream.text == text()


async def test_a_prefill_pod_dies_during_many_requests(start_cluster, text):
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod(), FakeDecodePod()])
    prefill = cluster.prefill[0]
    prefill.may_answer.clear()
    for decode in cluster.decode:
        decode.recomputes_only = True
    answers = [asyncio.create_task(cluster.complete(**BODY)) for _ in range(20)]
    await prefill.until(lambda: len(prefill.prefills) == 20)
    await prefill.stop()
    assert {body["choices"][0]["text"] for body in await asyncio.gather(*answers)} == {text()}
    assert [len(decode.submits) for decode in cluster.decode] == [10, 10]
    await cluster.until_quiet()


async def test_a_stream_continues_on_another_decode_pod(start_cluster, text):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()])
    for decode in cluster.decode:
        decode.allowed = 3
    async with Stream(cluster, seed=7) as stream:
        while stream.text != text(3):
            await stream.next()
        dying, other = cluster.decode if cluster.decode[0].submits else reversed(cluster.decode)
        await other.allow(None)
        await dying.stop()
        await stream.rest()
    assert stream.text == text()
    before, after = dying.submits[0].request, other.submits[0].request
    assert list(after.output_token_ids) == TOKENS[:3]
    assert (after.sampling, after.prompt_token_ids) == (before.sampling, before.prompt_token_ids)
    assert cluster.metric("baton_router_redispatch_total", reason="pod_lost") == 1
    await cluster.until_quiet()


async def test_a_stream_waits_for_its_only_decode_pod_to_come_back(start_cluster, text):
    cluster = await start_cluster([], [FakeDecodePod()], survival=SurvivalConfig(pod_wait_s=60))
    decode = cluster.decode[0]
    decode.allowed = 3
    async with Stream(cluster) as stream:
        while stream.text != text(3):
            await stream.next()
        await decode.stop()
        await decode.allow(None)
        await decode.start()
        await stream.rest()
    assert stream.text == text()


async def test_attempts_are_bounded_and_the_stream_says_why_it_ended(start_cluster, text):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()], survival=SurvivalConfig(max_attempts=2))
    for decode in cluster.decode:
        decode.allowed = 3
    async with Stream(cluster) as stream:
        while stream.text != text(3):
            await stream.next()
        for decode in cluster.decode:
            decode.failure = UnavailableError("the engine died")
            await decode.allow(None)
        events = await stream.rest()
    assert events[-1]["error"]["code"] == "unavailable"
    assert "the engine died" in events[-1]["error"]["message"]
    assert stream.text == text(3)
    assert sum(len(decode.submits) for decode in cluster.decode) == 2
    assert cluster.metric("baton_router_request_errors_total", code="unavailable") == 1
    await cluster.until_quiet()


async def test_pods_that_disagree_never_make_one_answer(start_cluster, text):
    """The client has prefill's token already: decode must go on from that one."""
    wrong = FakeDecodePod(lambda request: [7, *counting_reply(request)[1:]])
    cluster = await start_cluster([FakePrefillPod()], [wrong])
    wrong.allowed = 0
    async with Stream(cluster) as stream:
        await stream.next()
        await wrong.allow(None)
        await stream.rest()
    assert stream.text == text()
    assert [list(submit.request.output_token_ids) for submit in wrong.submits] == [[], TOKENS[:1]]
    assert cluster.metric("baton_router_token_mismatch_total") == 1


@pytest.mark.parametrize("num_prefill_pods", [0, 1])
async def test_a_decode_pod_that_is_lost_as_it_is_asked_leaves_no_claims(start_cluster, monkeypatch, num_prefill_pods):
    def submit(session, *_):
        raise UnavailableError("the session broke")

    monkeypatch.setattr(DecodeSession, "submit", submit)
    cluster = await start_cluster([FakePrefillPod() for _ in range(num_prefill_pods)])
    response = await cluster.post("/v1/completions", **BODY)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the session broke")
    await cluster.until_quiet()


async def test_an_error_of_the_pod_has_its_status(start_cluster):
    cluster = await start_cluster()
    cluster.decode[0].failure = PromptTooLongError("too long for this pod", param="prompt")
    response = await cluster.post("/v1/completions", **BODY)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "too long for this pod"
    assert len(cluster.decode[0].submits) == 1


async def test_a_full_pod_is_passed_over_and_full_pods_shed_load(start_cluster, text):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()])
    cluster.decode[0].failure = OverloadedError("queue is full")
    for _ in range(2):
        assert (await cluster.complete(**BODY))["choices"][0]["text"] == text()
    cluster.decode[1].failure = OverloadedError("queue is full")
    response = await cluster.post("/v1/completions", **BODY)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("after_first_token", [False, True])
async def test_a_client_that_goes_away_ends_both_legs(pair, caplog, after_first_token):
    prefill, decode = pair.prefill[0], pair.decode[0]
    prefill.may_answer.clear()
    decode.allowed = 1 if after_first_token else 0
    if after_first_token:
        async with Stream(pair) as stream:
            await stream.next()
    else:
        request = asyncio.create_task(pair.post("/v1/completions", **BODY))
        await prefill.until(lambda: prefill.prefills)
        await decode.until(lambda: decode.submits)
        request.cancel()
    await prefill.until(lambda: prefill.num_cancelled == 1)
    await decode.until(lambda: decode.aborts == [decode.submits[0].request.request_id])
    await pair.router.service._idle.wait()
    await pair.until_quiet()
    assert pair.metric("baton_router_request_errors_total", code="cancelled") == 1
    assert pair.metric("baton_router_num_requests_inflight") == 0
    assert "asyncio" not in {record.name for record in caplog.records}  # no callback failed


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_ends_both_legs(start_cluster, stream):
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod()], request_timeout_s=2.0)
    cluster.decode[0].allowed = 2
    if stream:
        async with Stream(cluster) as events:
            error = (await events.rest())[-1]["error"]
    else:
        response = await cluster.post("/v1/completions", **BODY)
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert error["message"] == "the request was not finished within 2 s"
    await cluster.until_quiet()


async def test_a_client_that_stops_reading_is_given_up(start_cluster, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_LAST_CHUNK_S", 0.1)
    cluster = await start_cluster(request_timeout_s=0.2)
    service = cluster.router.service
    endpoint = completions.CompletionsEndpoint(
        completions.COMPLETIONS, service, cluster.router.security.access, RunningIds()
    )
    messages = [{"type": "http.request", "body": json.dumps({**BODY, "stream": True}).encode()}]

    async def receive():
        return messages.pop() if messages else await asyncio.Future()

    async def send(message):
        await asyncio.Future()

    await asyncio.wait_for(endpoint({"headers": [], TENANT: Tenant()}, receive, send), 30)
    assert cluster.metric("baton_router_request_errors_total", code="deadline_exceeded") == 1
    await cluster.until_quiet()


async def test_after_the_grace_period_a_stream_ends_with_an_error(start_cluster):
    cluster = await start_cluster(shutdown_grace_s=0.1)
    cluster.decode[0].allowed = 2
    async with Stream(cluster) as stream:
        await stream.next()
        stopping = asyncio.create_task(cluster.router.stop())
        events = await stream.rest()
    assert events[-1]["error"]["code"] == "unavailable"
    assert "shutting down" in events[-1]["error"]["message"]
    await stopping
    await cluster.until_quiet()


async def test_a_request_that_chokes_on_its_news_leaves_the_others_alone(start_cluster, text, monkeypatch):
    take_delta, faults = Generation.on_delta, iter([ValueError("a finish reason from the future")])

    def choke_once(generation, delta, now):
        if (fault := next(faults, None)) is not None:
            raise fault
        take_delta(generation, delta, now)

    monkeypatch.setattr(Generation, "on_delta", choke_once)
    cluster = await start_cluster()
    answers = await asyncio.gather(*(cluster.complete(**BODY) for _ in range(4)))
    assert {body["choices"][0]["text"] for body in answers} == {text()}
    assert len(cluster.decode[0].submits) == 5
    await cluster.until_quiet()


async def test_nothing_starts_once_the_router_is_shutting_down(start_cluster):
    cluster = await start_cluster()
    service = cluster.router.service
    request = await service.model("").prepare(_draft("late"))
    service.stop_accepting()
    with pytest.raises(UnavailableError, match="shutting down"):
        async with service.run([request]):
            pass
    assert cluster.decode[0].submits == []


async def test_too_many_at_once_are_refused(start_cluster, text):
    cluster = await start_cluster(admission=AdmissionConfig(max_inflight=2, max_queued=0))
    await cluster.decode[0].allow(0)
    running = [asyncio.create_task(cluster.complete(**BODY)) for _ in range(2)]
    await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) == 2)
    response = await cluster.post("/v1/completions", **BODY)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    await cluster.decode[0].allow(None)
    assert {body["choices"][0]["text"] for body in await asyncio.gather(*running)} == {text()}
    assert (await cluster.complete(**BODY))["choices"][0]["text"] == text()


async def test_a_slow_client_gets_merged_deltas(start_cluster):
    cluster = await start_cluster()
    service = cluster.router.service
    request = await service.model("").prepare(_draft("slow"))
    async with service.run([request]) as run:
        (generation,) = run.generations
        async with asyncio.timeout(60):
            while not generation.generation.is_over:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        deltas = [delta async for delta in generation]
    assert [delta.token_ids for delta in deltas] == [TOKENS]


def _draft(request_id):
    return Draft(
        request_id=request_id, model=None, prompt=TokenPrompt(PROMPT), prompt_param="prompt",
        sampling={}, max_tokens=8, default_max_tokens=None, seed=1, arrived_at=time.monotonic(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "prompt", "remote", "reason"),
    [
        ({"remote_prefill": "prefer"}, PROMPT, True, "planned"),
        ({"remote_prefill": "never"}, PROMPT, False, "colocated"),
        ({"remote_prefill": "auto"}, LONG_PROMPT, True, "lower_ttft"),
        ({"remote_prefill": "auto", "min_remote_prefill_tokens": 1001}, LONG_PROMPT, False, "short_prompt"),
        ({"remote_prefill": "always", "min_remote_prefill_tokens": 4}, PROMPT, True, "planned"),
    ],
)
async def test_where_the_prompt_is_prefilled(start_cluster, settings, prompt, remote, reason):
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod()], **settings)
    await cluster.complete(prompt=prompt, max_tokens=4)
    assert len(cluster.prefill[0].prefills) == remote
    assert cluster.decode[0].submits[0].HasField("remote_prefill") == remote
    assert cluster.metric("baton_router_dispatch_total", prefill="remote" if remote else "local", reason=reason) == 1


async def test_a_conversation_goes_on_where_its_kv_is(start_cluster):
    """The second time the decode pod is taken to hold the prompt, and the prefill pod has much to do."""
    prefill = FakePrefillPod()
    cluster = await start_cluster([prefill], [FakeDecodePod()], remote_prefill="auto")
    await cluster.complete(prompt=LONG_PROMPT, max_tokens=4)
    await prefill.set_stats(pods_pb2.PodStats(num_queued_tokens=20_000, num_waiting=9, num_blocks=100))
    (pod,) = cluster.router.cluster.prefill_pods
    async with asyncio.timeout(60):
        while pod.engines[0].load.current().num_requests != 9:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await cluster.complete(prompt=LONG_PROMPT, max_tokens=4)
    assert len(prefill.prefills) == 1
    assert cluster.metric("baton_router_dispatch_total", prefill="local", reason="lower_ttft") == 1


async def test_that_no_prefill_pod_is_ready_is_logged_once_per_change(start_cluster, caplog):
    caplog.set_level("INFO", "router.dispatching.dispatcher")
    cluster = await start_cluster([FakePrefillPod()], remote_prefill="prefer")
    (prefill,) = cluster.prefill
    for is_serving in (False, True, False):
        await prefill.set_serving(is_serving)
        await cluster.until(lambda: len(cluster.router.cluster.models[0].prefill_table) == is_serving)  # noqa: B023
        await cluster.complete(**BODY)
        await cluster.complete(**BODY)
    lack = "no prefill pod is ready that fits a decode pod: decode pods compute the prompts"
    said = [record.message for record in caplog.records if record.name == "router.dispatching.dispatcher"]
    assert said == [lack, "prompts go to prefill pods again", lack]


async def test_without_a_fit_prefill_pod_decode_prefills_unless_that_is_forbidden(start_cluster):
    lenient = await start_cluster([FakePrefillPod(connector="another")])
    await lenient.complete(**BODY)
    assert lenient.metric("baton_router_dispatch_total", prefill="local", reason="no_prefill_pod") == 1
    strict = await start_cluster([FakePrefillPod(connector="another")], remote_prefill="always")
    response = await strict.post("/v1/completions", **BODY)
    assert response.status_code == 503
    assert "prefill" in response.json()["error"]["message"]
    assert [pod.prefills for pod in (*lenient.prefill, *strict.prefill)] == [[], []]
