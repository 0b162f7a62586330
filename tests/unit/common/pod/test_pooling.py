"""The Pooling service of both kinds of pods, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common.engine.executor.fake import FAKE_POOLING, expected_numbers
from common.errors import EngineDeadError, ErrorCode, UnavailableError
from common.pb import pods_pb2
from common.pb.pods_pb2_grpc import PodStub, PoolingStub
from common.rpc.convert import pooling_to_pb
from common.rpc.errors import from_rpc_error
from common.types import PoolingParams
from tests.pods import DEADLINE_S, RunningPod, decode_pod, engine_request, prefill_pod, prompt_of, wait_for

EMBED = PoolingParams(task="embed")


@pytest.fixture(params=[prefill_pod, decode_pod])
async def pod(request: pytest.FixtureRequest) -> AsyncIterator[RunningPod]:
    async with request.param({}) as running:
        yield running


def pool(pod: RunningPod, prompt: list[int], pooling: PoolingParams = EMBED, request_id: str = "a") -> Any:
    request = engine_request(request_id, prompt, pooling=pooling_to_pb(pooling))
    return PoolingStub(pod.channel).Pool(pods_pb2.PoolRequest(request=request), timeout=DEADLINE_S)


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


@pytest.mark.parametrize(
    "pooling",
    [
        EMBED,
        PoolingParams(task="embed", dimensions=2),
        PoolingParams(task="token_embed"),
        PoolingParams(task="classify"),
    ],
)
async def test_answers_with_the_numbers_of_the_prompt(pod: RunningPod, pooling: PoolingParams) -> None:
    prompt = prompt_of(75)
    response = await pool(pod, prompt, pooling)
    assert response.values == expected_numbers(prompt, pooling)
    assert response.row_size == FAKE_POOLING.row_size(pooling)
    assert response.timing.compute_s > 0
    assert pod.metric("baton_pod_request_success_total", finished_reason="stop") == 1


async def test_says_what_can_be_asked_of_its_model(pod: RunningPod) -> None:
    info = await PodStub(pod.channel).GetInfo(pods_pb2.GetInfoRequest(), timeout=DEADLINE_S)
    assert tuple(info.pooling.tasks) == FAKE_POOLING.tasks
    assert (info.pooling.embedding_size, tuple(info.pooling.labels)) == (4, ("left", "right"))


async def test_prefix_hits_count_only_where_the_last_token_is_all_that_is_pooled(pod: RunningPod) -> None:
    prompt = prompt_of(75)
    await pool(pod, prompt)
    again = await pool(pod, prompt, request_id="b")
    assert again.num_cached_tokens > 0
    tokens = PoolingParams(task="token_embed")
    of_tokens = await pool(pod, prompt, tokens, request_id="c")
    assert (of_tokens.num_cached_tokens, of_tokens.values) == (0, expected_numbers(prompt, tokens))


@pytest.mark.parametrize(
    ("prompt", "pooling", "param"),
    [
        ([], EMBED, "prompt_token_ids"),
        ([1, 2], PoolingParams(task="embed", dimensions=5), "dimensions"),
        ([1, 2], PoolingParams(task="classify", dimensions=1), "dimensions"),
    ],
)
async def test_bad_requests_name_the_field(
    pod: RunningPod, prompt: list[int], pooling: PoolingParams, param: str
) -> None:
    error = await refusal(pool(pod, prompt, pooling))
    assert (error.code, error.param) == (ErrorCode.INVALID_ARGUMENT, param)
    missing = PoolingStub(pod.channel).Pool(pods_pb2.PoolRequest(request=engine_request("b", [1])), timeout=DEADLINE_S)
    assert (await refusal(missing)).param == "pooling"


async def test_a_cancelled_call_leaves_nothing_behind(pod: RunningPod) -> None:
    pod.gate.shut()
    call = pool(pod, prompt_of(75))
    await wait_for(lambda: pod.gate.is_holding)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # Before its answer, which would end it well.
    await wait_for(lambda: pod.metric("baton_pod_request_success_total", finished_reason="abort") == 1)
    pod.gate.open()
    await pod.wait_clean()


async def test_a_draining_pod_finishes_what_it_has_and_takes_no_more(pod: RunningPod) -> None:
    prompt = prompt_of(20)
    pod.gate.shut()
    call = pool(pod, prompt)
    await wait_for(lambda: pod.gate.is_holding)
    pod.context.admission.drain()
    assert isinstance(await refusal(pool(pod, prompt, request_id="b")), UnavailableError)
    pod.gate.open()
    assert (await call).values == expected_numbers(prompt, EMBED)


async def test_an_engine_that_dies_ends_its_calls(pod: RunningPod) -> None:
    pod.executor.failure = RuntimeError("broken")
    error = await refusal(pool(pod, prompt_of(20)))
    assert error.code in (ErrorCode.UNAVAILABLE, EngineDeadError("").code)
