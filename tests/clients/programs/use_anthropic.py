"""The `anthropic` client: messages, streams, tools, token counts. Takes the router's URL."""

import asyncio
import sys

import anthropic

MODEL = "baton-demo"
GREEDY = {"extra_body": {"temperature": 0}}  # of which newer versions of the client know nothing
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "weather",
    "description": "Returns the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}, "required": ["city"]},
}

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)

message = client.messages.create(model=MODEL, system="Be brief.", messages=QUESTION, max_tokens=16, **GREEDY)
print("messages:", repr(message.content[0].text), message.stop_reason, message.usage.output_tokens, "tokens")

with client.messages.stream(model=MODEL, system="Be brief.", messages=QUESTION, max_tokens=16, **GREEDY) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
assert streamed == message.content[0].text
assert (final.stop_reason, final.usage.output_tokens) == (message.stop_reason, message.usage.output_tokens)
print("stream:", repr(streamed))

asked = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 100, **GREEDY}
for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
    forced = {"tool_choice": {**choice, "disable_parallel_tool_use": True}}
    message = client.messages.create(**asked, **forced)
    (call,) = message.content
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**asked, **forced) as stream:
        (streamed_call,) = stream.get_final_message().content
    assert (streamed_call.name, streamed_call.input) == (call.name, call.input)
    print("tool_choice", choice["type"], "->", call.name, call.input)

result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
history = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
message = client.messages.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=12, **GREEDY)
print("after the tool's result:", message.stop_reason)

print("count_tokens:", client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens)


async def ask() -> str:
    """Streams with the asynchronous client."""
    async with (
        anthropic.AsyncAnthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120) as other,
        other.messages.stream(model=MODEL, messages=QUESTION, max_tokens=16, **GREEDY) as stream,
    ):
        return "".join([text async for text in stream.text_stream])


print("asynchronous:", repr(asyncio.run(ask())))

try:
    client.messages.create(model="another", messages=QUESTION, max_tokens=16)
except anthropic.NotFoundError as error:
    print("an error:", error.status_code, error.body["error"]["message"])
