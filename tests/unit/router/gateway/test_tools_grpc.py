"""Tools and reasoning over gRPC: all of it is what HTTP has."""

from __future__ import annotations

from contextlib import asynccontextmanager

import grpc
import pytest

from baton import AsyncClient
from baton.constraints import Constraint
from baton.errors import InvalidRequestError
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc.errors import from_rpc_error
from tests.unit.router.gateway.test_tools_http import ANSWER, ASKS, CHAT, HERMES, THINKS, WEATHER
from tests.unit.router.gateway.test_tools_http import start as start

FORCED = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
NAMED = {"type": "function", "function": {"name": "weather"}}


@asynccontextmanager
async def grpc_stub(cluster):
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def chat_message(**fields):
    """Of ASKS."""
    tool = inference_pb2.Tool(name="weather", parameters='{"type": "object"}')
    fields = {"tools": [tool], **fields}
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=[{"role": "user", "content": "Weather?"}], **fields),
        options=inference_pb2.GenerateOptions(seed=7),
    )


def of_http(choice):
    """The answer's parts and the ids of its calls."""
    message = choice["message"]
    calls = [(call["id"], *call["function"].values()) for call in message.get("tool_calls", [])]
    return message["content"] or "", message.get("reasoning", ""), calls


def of_client(parts):
    """The same of a Choice, or of Pieces."""
    calls = [call for part in parts for call in part.tool_calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    return (
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        [(call.id, call.name, call.arguments) for call in calls],
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [WEATHER], "include_reasoning": False},
        {"tools": [WEATHER], "separate_reasoning": False},
    ],
)
async def test_answers_are_those_of_http(start, fields):
    cluster = await start(THINKS, ANSWER)
    request = {"seed": 7, "request_id": "one", "n": 2, **fields}
    http = (await cluster.post(CHAT, messages=ASKS, **request)).json()
    async with AsyncClient(cluster.router.grpc_address) as client:
        whole = await client.chat(ASKS, **request)
        pieces = [piece async for piece in client.stream_chat(ASKS, **request)]
    expected = [of_http(choice) for choice in http["choices"]]
    assert [of_client([choice]) for choice in whole.choices] == expected
    assert [of_client([piece for piece in pieces if piece.index == index]) for index in (0, 1)] == expected
    details = http["usage"].get("completion_tokens_details", {})
    assert whole.usage.reasoning_tokens == details.get("reasoning_tokens")
    last = [piece for piece in pieces if piece.finish_reason is not None]
    for endings in (whole.choices, last):
        assert [each.finish_reason.label for each in endings] == [each["finish_reason"] for each in http["choices"]]
    assert [piece.usage.reasoning_tokens for piece in last] == (
        [None, None] if not details else [details["reasoning_tokens"] // 2] * 2
    )
    await cluster.until_quiet()


async def test_the_template_gets_what_it_gets_over_http(start):
    """Tools, calls of earlier turns and their results, for answers and for Tokenize."""
    cluster = await start(HERMES.replace("message.content", "message | tojson"), ANSWER)

    async def http_prompt(messages, **fields):
        await cluster.post(CHAT, messages=messages, **fields)
        return list(cluster.decode[0].submits[-1].request.prompt_token_ids)

    async with AsyncClient(cluster.router.grpc_address) as client, grpc_stub(cluster) as stub:
        answer = (await client.chat(ASKS, tools=[WEATHER], max_tokens=200)).choices[0]
        (call, _) = answer.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        function = {"name": call.name, "arguments": call.arguments}
        sent = [*ASKS, {"role": "assistant", "tool_calls": [call]}, result]
        plain = [{"id": call.id, "type": "function", "function": function}]
        told = [*ASKS, {"role": "assistant", "content": None, "tool_calls": plain}, result]
        for fields in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}):
            expected = await http_prompt(told, **fields)
            for messages in (sent, told):
                await client.chat(messages, **fields)
                assert list(cluster.decode[0].submits[-1].request.prompt_token_ids) == expected
        message = chat_message()
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=message.chat), timeout=30)
        await stub.Generate(message, timeout=30)
        assert tokens.token_ids == cluster.decode[0].submits[-1].request.prompt_token_ids


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}],
)
async def test_forced_calls_have_the_constraint_of_http(start, fields):
    cluster = await start(THINKS, FORCED)
    request = {"tools": [WEATHER], "seed": 7, "request_id": "one", **fields}
    http = (await cluster.post(CHAT, messages=ASKS, **request)).json()
    constraint = cluster.decode[0].submits[-1].request.sampling.structured_outputs
    async with AsyncClient(cluster.router.grpc_address) as client:
        (choice,) = (await client.chat(ASKS, **request)).choices
    assert cluster.decode[0].submits[-1].request.sampling.structured_outputs == constraint
    assert of_client([choice]) == of_http(http["choices"][0])
    assert len(choice.tool_calls) == 1


async def test_a_constraint_that_pods_refuse_is_named_as_it_was_given(start):
    cluster = await start(THINKS, FORCED)
    for pod in (*cluster.prefill, *cluster.decode):
        pod.failure = InvalidRequestError("no such schema", param="structured_outputs")
    async with AsyncClient(cluster.router.grpc_address) as client:
        for fields, param in [
            ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
            ({"structured_outputs": Constraint.regex("a")}, "structured_outputs"),
        ]:
            with pytest.raises(InvalidRequestError, match="no such schema") as caught:
                await client.chat(ASKS, **fields)
            assert caught.value.param == param


async def test_a_constrained_answer_has_no_reasoning(start):
    cluster = await start(THINKS, ANSWER)
    async with AsyncClient(cluster.router.grpc_address) as client:
        (choice,) = (await client.chat(ASKS, structured_outputs=Constraint.regex("(.|\n)*"))).choices
    assert (choice.text, choice.reasoning) == (ANSWER, "")


async def test_a_resumed_stream_has_the_same_calls(start):
    cluster = await start(THINKS, ANSWER)
    message = chat_message()
    message.resumable, message.request_id = True, "one"
    async with grpc_stub(cluster) as stub:
        expected = [chunk async for chunk in stub.GenerateStream(message, timeout=30)]
        assert sum(len(chunk.tool_calls) for chunk in expected) == 2
        for number in range(0, len(expected) - 1, 13):
            message.last_event_id = expected[number].event_id
            rest = [chunk async for chunk in stub.GenerateStream(message, timeout=30)]
            assert spoken(rest) == spoken(expected[number + 1 :])


def spoken(chunks):
    """What a client makes of them, however tokens are put together in chunks."""
    return (
        "".join(chunk.text for chunk in chunks),
        "".join(chunk.reasoning for chunk in chunks),
        [call for chunk in chunks for call in chunk.tool_calls],
        chunks[-1].event_id,
        chunks[-1].finish_reason,
    )


BAD = [
    ({"tools": [inference_pb2.Tool(name="f", parameters="{")]}, "tools[0].parameters"),
    ({"tools": [inference_pb2.Tool(name="f", parameters="{} , {}")]}, "tools[0].parameters"),
    ({"tools": [inference_pb2.Tool(name="f", parameters="[" * 100_000)]}, "tools[0].parameters"),
    ({"tools": [inference_pb2.Tool(name="f", parameters="[1]")]}, "tools[0].parameters"),
    ({"tools": [inference_pb2.Tool(name="f", parameters='{"a":' * 65 + "1" + "}" * 65)]}, "tools[0].parameters"),
    ({"tools": [inference_pb2.Tool(name="f", description="x" * 2**19)]}, "tools"),
    ({"tools": [inference_pb2.Tool(name="f", parameters='{"a": "\\ud800"}')]}, "tools[0].parameters"),
    ({"tools": [inference_pb2.Tool()]}, "tools[0].name"),
    ({"tools": [inference_pb2.Tool(name="f")] * 2}, "tools[1].name"),
    ({"tools": [inference_pb2.Tool(name=str(number)) for number in range(513)]}, "tools"),
    ({"tool_name": "other"}, "tool_choice"),
    ({"tool_mode": 9}, "tool_choice"),
    ({"tools": [], "tool_mode": inference_pb2.TOOL_MODE_REQUIRED}, "tool_choice"),
]


async def test_bad_tools_are_refused_by_name(start):
    cluster = await start(HERMES, "Hi")
    async with grpc_stub(cluster) as stub:
        for fields, param in BAD:
            for call in (stub.Generate, stub.Explain):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(chat_message(**fields), timeout=30)
                refused = caught.value.code(), from_rpc_error(caught.value).param
                assert refused == (grpc.StatusCode.INVALID_ARGUMENT, param), caught.value.details()
        both = chat_message(tool_mode=inference_pb2.TOOL_MODE_REQUIRED)
        both.options.structured_outputs.text = "{}"
        both.options.structured_outputs.kind = 1
        with pytest.raises(grpc.aio.AioRpcError, match="give structured_outputs or force calls, not both"):
            await stub.Generate(both, timeout=30)


async def test_what_cannot_be_a_message_is_named_by_the_client(start):
    cluster = await start(HERMES, "Hi", tool_parser="none")
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    async with AsyncClient(cluster.router.grpc_address) as client:
        for messages, fields, param in [
            (ASKS, {"tools": [{"name": "f"}]}, "tools[0]"),
            (ASKS, {"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0]"),
            (ASKS, {"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
            (ASKS, {"tools": [WEATHER], "tool_choice": {"name": "f"}}, "tool_choice"),
            ([called], {}, "messages[0].tool_calls[0]"),
            (ASKS, {"tools": [WEATHER]}, "tools"),  # by the router: calls are not parsed
        ]:
            with pytest.raises(InvalidRequestError) as caught:
                await client.chat(messages, **fields)
            assert caught.value.param == param
