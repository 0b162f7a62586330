"""What several choices of one request may have together."""

from __future__ import annotations

import grpc
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from router.requests import bounds

CHOICES = 128
BIASES = dict.fromkeys(range(bounds.MAX_RULED_TOKENS // CHOICES), 1.0)


@pytest.mark.parametrize("several", [{"prompt": "a", "n": CHOICES}, {"prompt": ["a"] * CHOICES}], ids=["n", "prompts"])
async def test_tables_of_tokens_are_bounded_over_all_choices(pair, several):
    body = {**several, "max_tokens": 1, "logit_bias": {str(token_id): bias for token_id, bias in BIASES.items()}}
    assert (await pair.post("/v1/completions", **body)).status_code == 200
    refused = await pair.post("/v1/completions", **body, allowed_token_ids=[5])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")
    one = await pair.post("/v1/completions", prompt="a", max_tokens=1, bad_words=["b" * 30] * 100)
    assert one.status_code == 200


async def test_tables_of_tokens_are_bounded_over_all_choices_of_a_grpc_call(pair):
    options = inference_pb2.GenerateOptions(logit_bias=BIASES, bad_words=["b"], max_tokens=1)
    async with grpc.aio.insecure_channel(pair.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="logit_bias") as raised:
            await stub.Generate(inference_pb2.GenerateRequest(text="a", n=CHOICES, options=options), timeout=30)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
