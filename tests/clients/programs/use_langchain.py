"""LangChain's OpenAI classes: chats, streams, `bind_tools`, `with_structured_output`, embeddings. Takes a URL."""

import asyncio
import math
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

MODEL = "baton-demo"
QUESTION = HumanMessage("What is the capital of France?")


@tool
def weather(city: Literal["Oslo", "Paris"], hour: Literal[6, 12, 18]) -> str:
    """Returns the weather of a city."""
    return f"Rain in {city} at {hour}."


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    continent: Literal["Europe", "Asia"]


options = {"model": MODEL, "base_url": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**options, max_completion_tokens=100)

answer = chat.invoke([QUESTION])
print("invoke:", repr(answer.content), answer.usage_metadata["total_tokens"], "tokens")
assert "".join(chunk.content for chunk in chat.stream([QUESTION])) == answer.content
assert [other.content for other in asyncio.run(chat.abatch([[QUESTION]] * 4))] == [answer.content] * 4

for choice in ("required", "weather"):
    caller = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    called = caller.invoke([QUESTION])
    (call,) = called.tool_calls
    print("bind_tools, tool_choice", choice, "->", call["name"], call["args"])
result = weather.invoke(call)
assert isinstance(result, ToolMessage)
print("after the tool's result:", repr(chat.bind_tools([weather]).invoke([QUESTION, called, result]).content))

writer = ChatOpenAI(**options, max_completion_tokens=200)
for method in ("json_schema", "function_calling"):
    city = writer.with_structured_output(City, method=method).invoke([QUESTION])
    assert isinstance(city, City)
    print("with_structured_output,", method, "->", repr(city))
responses = ChatOpenAI(**options, max_completion_tokens=100, use_responses_api=True)
print("the Responses API:", repr(responses.invoke([QUESTION]).text))
print("a completion:", repr(OpenAI(**options, max_tokens=8).invoke("The capital of Italy is")))

# Texts go as they are: otherwise LangChain would send numbers of OpenAI's tokens, which mean others to the model.
embeddings = OpenAIEmbeddings(
    model=MODEL,
    base_url=options["base_url"],
    api_key="none",
    dimensions=64,
    check_embedding_ctx_length=False,
    max_retries=0,
)
TEXTS = ["Paris is in France.", "Tom has a red boat."]
vectors = embeddings.embed_documents(TEXTS)
assert [len(vector) for vector in vectors] == [64, 64]
assert all(math.isclose(sum(number**2 for number in vector), 1, rel_tol=1e-5) for vector in vectors)
assert math.dist(embeddings.embed_query(TEXTS[1]), vectors[1]) < 1e-5
assert math.dist(asyncio.run(embeddings.aembed_query(TEXTS[0])), vectors[0]) < 1e-5
print("embeddings:", len(vectors), "of", len(vectors[0]), "numbers")
