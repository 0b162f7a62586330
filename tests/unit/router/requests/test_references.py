"""References of schemas that lead outside, wherever a request may have a schema."""

from __future__ import annotations

import json

import grpc
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from common.types import ConstraintKind
from tests.unit.router.gateway.test_tools_http import HERMES
from tests.unit.router.gateway.test_tools_http import start as start

REFERENCE = "http://example.org/schema"
SCHEMA = {"type": "object", "properties": {"x": {"$ref": REFERENCE}}}
TAG = {"format": {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": ">"}}
MESSAGES = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": SCHEMA}
OTHER = {"type": "function", "function": {"name": "g"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TEXT_FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
CHAT = {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "Hi", "response_format": FORMAT}, "response_format"),
        ("chat/completions", {**CHAT, "response_format": FORMAT}, "response_format"),
        ("chat/completions", {**CHAT, "response_format": {"type": "structural_tag", **TAG}}, "response_format"),
        ("chat/completions", {**CHAT, "structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ("chat/completions", {**CHAT, "structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs"),
        ("chat/completions", {**CHAT, "structured_outputs": {"structural_tag": TAG}}, "structured_outputs"),
        (
            "chat/completions",
            {**CHAT, "tools": [OTHER, {"type": "function", "function": FUNCTION}], "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        (
            "messages",
            {**CHAT, "max_tokens": 8, "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
        ("responses", {"input": "Hi", "text": {"format": TEXT_FORMAT}}, "text.format"),
        (
            "responses",
            {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_over_http(start, path, body, param):
    cluster = await start(HERMES, "Hi")
    response = await cluster.post(f"/v1/{path}", **body)
    error = response.json()["error"]
    assert (response.status_code, error.get("param", param)) == (400, param), error
    assert repr(REFERENCE) in error["message"]
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (
            inference_pb2.GenerateRequest(
                text="Hi",
                options={"structured_outputs": {"kind": ConstraintKind.JSON_SCHEMA.value, "text": json.dumps(SCHEMA)}},
            ),
            "structured_outputs",
        ),
        (
            inference_pb2.GenerateRequest(
                chat={
                    "messages": MESSAGES,
                    "tools": [{"name": "f", "parameters": json.dumps(SCHEMA)}],
                    "tool_name": "f",
                }
            ),
            "tools[0].parameters",
        ),
    ],
    ids=["constraint", "tool"],
)
async def test_over_grpc(start, request_, param):
    cluster = await start(HERMES, "Hi")
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(request_, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["baton-error-param"] == param
    assert repr(REFERENCE) in (caught.value.details() or "")
