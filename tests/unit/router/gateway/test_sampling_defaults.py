"""The model's sampling defaults, over HTTP and gRPC."""

from __future__ import annotations

import json
import logging

import grpc
import pytest

from common.pb import inference_pb2, inference_pb2_grpc

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
GIVEN = {
    "temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.25, "max_tokens": 5,
}  # fmt: skip
DEFAULTS = {
    "temperature": 0.75, "top_p": 0.875, "top_k": 20, "min_p": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 30,
}  # fmt: skip
AS_PARAMS = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in DEFAULTS.items()}
UNSET = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return str(tmp_path)


async def sampled(cluster, front, **given):
    """The parameters that the decode pod got."""
    if front == "grpc":
        async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            options = inference_pb2.GenerateOptions(**given)
            await stub.Generate(inference_pb2.GenerateRequest(text="Hello", options=options), timeout=30)
    else:
        body = HELLO if "chat" in front else {"prompt": "Hello"}
        response = await cluster.post(front, **body, **given)
        assert response.status_code == 200, response.text
    sampling = cluster.decode[0].submits[-1].request.sampling
    return {name: getattr(sampling, name) for name in AS_PARAMS}


FRONTS = ["/v1/completions", "/v1/chat/completions", "grpc"]


@pytest.mark.parametrize("front", FRONTS)
async def test_the_fronts_agree(start_cluster, directory, front, caplog):
    caplog.set_level(logging.INFO)
    cluster = await start_cluster(generation_config=directory)
    assert await sampled(cluster, front) == AS_PARAMS
    assert await sampled(cluster, front, **GIVEN) == GIVEN
    (line,) = [record.getMessage() for record in caplog.records if "sampling defaults" in record.getMessage()]
    assert "temperature=0.75" in line
    assert "max_new_tokens=30" in line


@pytest.mark.parametrize("front", FRONTS)
async def test_zero_is_a_value(start_cluster, directory, front):
    """Not the absence of one."""
    cluster = await start_cluster(generation_config=directory)
    zeros = await sampled(cluster, front, temperature=0, top_k=0, min_p=0)
    assert (zeros["temperature"], zeros["top_k"], zeros["min_p"]) == (0, 0, 0)


@pytest.mark.parametrize("front", FRONTS)
async def test_the_operators_max_new_tokens_is_a_limit(start_cluster, front):
    cluster = await start_cluster(generation_config="none", override_generation_config={"max_new_tokens": 7})
    assert await sampled(cluster, front, max_tokens=100) == {**UNSET, "max_tokens": 7}
    assert (await sampled(cluster, front))["max_tokens"] == 7
    assert (await sampled(cluster, front, max_tokens=3))["max_tokens"] == 3


async def test_a_default_takes_no_more_than_the_context_has_room_for(start_cluster):
    cluster = await start_cluster(override_generation_config={"max_new_tokens": 4000})
    await cluster.complete(prompt=[5] * 4000)
    assert cluster.decode[0].submits[-1].request.sampling.max_tokens == 96
