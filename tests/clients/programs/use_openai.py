"""The `openai` client: chats, streams, completions, tools, structured output, responses, embeddings. Takes a URL."""

import json
import math
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

MODEL = "baton-demo"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


class City(BaseModel):
    """What the model is asked to write."""

    name: Literal["Paris", "Rome", "Oslo"]
    continent: Literal["Europe", "Asia"]
    rank: int = Field(ge=1, le=9)


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)

print("models:", [model.id for model in client.models.list()])

completion = client.completions.create(
    model=MODEL, prompt=["The capital of Italy is", "The capital of Spain is"], max_tokens=8, temperature=0
)
print("completions:", [choice.text for choice in completion.choices], completion.usage.total_tokens, "tokens")

chat = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
print("chat:", repr(chat.choices[0].message.content), chat.choices[0].finish_reason)

stream = client.chat.completions.create(
    model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert streamed == chat.choices[0].message.content
assert chunks[-1].usage == chat.usage
print("stream:", repr(streamed), "in", len(chunks), "chunks")

chat = client.chat.completions.create(
    model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, n=2
)
assert all(len(choice.logprobs.content) == 4 for choice in chat.choices)
print("logprobs:", [(entry.token, round(entry.logprob, 3)) for entry in chat.choices[1].logprobs.content])

chat = client.chat.completions.create(
    model=MODEL, messages=QUESTION, max_tokens=64, temperature=0, tools=[WEATHER, CLOCK], tool_choice="auto"
)
print("tool_choice auto:", chat.choices[0].finish_reason)

for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 100, "temperature": 0, "tool_choice": choice}
    tools = {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
    chat = client.chat.completions.create(**asked, **tools)
    (call,) = chat.choices[0].message.tool_calls
    assert chat.choices[0].finish_reason == "tool_calls"
    print(
        "tool_choice", choice if isinstance(choice, str) else "named", "->", call.function.name, call.function.arguments
    )
    with client.chat.completions.stream(**asked, **tools) as events:
        done = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done == [call.function.arguments]
assert set(json.loads(call.function.arguments)) == {"city", "days"}

history = [
    *QUESTION,
    chat.choices[0].message,
    {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "rain"}'},
]
chat = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=12, temperature=0)
print("after the tool's result:", repr(chat.choices[0].message.content))

parsed = client.chat.completions.parse(
    model=MODEL,
    messages=QUESTION,
    response_format=City,
    max_tokens=200,
    temperature=0,
)
print("parse():", repr(parsed.choices[0].message.parsed))

response = client.responses.create(
    model=MODEL, input="What is the capital of France?", max_output_tokens=16, temperature=0
)
print("responses:", response.status, repr(response.output_text))
events = list(
    client.responses.create(
        model=MODEL, input="What is the capital of France?", max_output_tokens=16, temperature=0, stream=True
    )
)
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
print("responses, streamed:", events[0].type, "...", events[-1].type)

forced = client.responses.create(
    model=MODEL,
    input="What is the capital of France?",
    tools=[{"type": "function", "strict": True, **WEATHER["function"]}],
    tool_choice="required",
    parallel_tool_calls=False,
    max_output_tokens=100,
    temperature=0,
)
print("responses, tools:", [(item.name, item.arguments) for item in forced.output if item.type == "function_call"])

TEXTS = ["Paris is in France.", "Tom has a red boat."]
embeddings = client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64
floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
assert all(
    math.dist(one.embedding, other.embedding) < 1e-5 for one, other in zip(embeddings.data, floats.data, strict=True)
)
print("embeddings:", [len(each.embedding) for each in embeddings.data], embeddings.usage.total_tokens, "tokens")
short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=64)
assert math.isclose(sum(number**2 for number in short.data[0].embedding), 1, rel_tol=1e-5)
print("embeddings, dimensions:", [len(each.embedding) for each in short.data])

try:
    client.chat.completions.create(model="another", messages=QUESTION)
except openai.NotFoundError as error:
    print("an error:", error.status_code, error.body["message"])
