"""Text of clients in the logs of all processes: nothing of it passes for a line of the log, or reaches a terminal.

What is sent is made from the OpenAPI document, from the structs behind fields that it leaves open, and from the
descriptors of the gRPC services, so that new fields are in it. gRPC's metadata is not: it holds printable characters
only, by the protocol.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import grpc
import httpx
import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from common.pb import admin_pb2, inference_pb2
from router.gateway.bodies.structured import ResponseFormat, StructuredOutputs
from router.gateway.bodies.tools import _NamedChoice, _Tool
from tests.e2e.cluster import Cluster

FORGED = "[router] forged"
PLANTED = f"a\n{FORGED}\r{FORGED} \x1b[2J\x9b2J\x85{FORGED}\u2028{FORGED}\u202e\x7f"
# Fields that the document leaves open.
OPEN = {
    "response_format": msgspec.json.schema(ResponseFormat),
    "structured_outputs": msgspec.json.schema(StructuredOutputs),
    "tools": msgspec.json.schema(list[_Tool]),
    "tool_choice": msgspec.json.schema(_NamedChoice | str),
    "tool_calls": msgspec.json.schema(list[_Tool]),  # with `function.name`, as tools have it
}
ANYTHING = [
    PLANTED,
    [PLANTED],
    {PLANTED: PLANTED},
    {"type": PLANTED},
    {"$ref": PLANTED},
    {"type": "string", "pattern": PLANTED},
    {"properties": {PLANTED: {"type": "integer"}}, "required": [PLANTED]},
    [{"id": PLANTED, "type": "function", "function": {"name": "f", "arguments": PLANTED}}],
]
MESSAGES = [{"role": "user", "content": "Hi"}]
BASES: dict[str, dict[str, Any]] = {
    "CompletionBody": {"prompt": "Hi", "max_tokens": 1},
    "ChatBody": {"messages": MESSAGES, "max_tokens": 1},
    "MessagesBody": {"messages": MESSAGES, "max_tokens": 1},
    "CountBody": {"messages": MESSAGES},
    "ResponsesBody": {"input": "Hi", "max_output_tokens": 1},
    "TokenizeTextBody": {"prompt": "Hi"},
    "TokenizeChatBody": {"messages": MESSAGES},
    "DetokenizeBody": {"tokens": [5]},
    "EmbeddingBody": {"input": "Hi"},
    "PoolingBody": {"input": "Hi"},
    "ClassifyBody": {"input": "Hi"},
    "ScoreBody": {"text_1": "Hi", "text_2": "Hi"},
    "RerankBody": {"query": "Hi", "documents": ["Hi"]},
    "LoadAdapterBody": {"lora_name": "x", "lora_path": "/nowhere"},
    "UnloadAdapterBody": {"lora_name": "x"},
}
NUM_WARNINGS = 20_000
WARNED_ABOUT = {"regex": "x" + NUM_WARNINGS * "^"}  # of each a library writes a line to standard error itself
TIMEOUT_S = 60
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
)


class Planter:
    """Makes values of JSON schemas that have the text at one place each, which is every place in turn."""

    def __init__(self, components: dict[str, Any]) -> None:
        self._components = components

    def values(self, schema: dict[str, Any], name: str = "", depth: int = 0) -> Iterator[Any]:
        schema = self._resolved(schema)
        if "anyOf" in schema:
            for each in schema["anyOf"]:
                yield from self.values(each, name, depth)
        elif depth > 6:
            return
        elif "properties" in schema:
            yield from self._objects(schema, depth)
        elif schema.get("type") == "array":
            yield from ([value] for value in self.values(schema.get("items", {}), name, depth + 1))
        elif schema.get("type") == "object":
            yield {PLANTED: PLANTED}
            rest = schema.get("additionalProperties")
            if isinstance(rest, dict):
                yield from ({"k": value} for value in self.values(rest, name, depth + 1))
        elif {"type", "enum", "const"}.isdisjoint(schema):
            yield from ANYTHING
            if name in OPEN:
                yield from Planter(OPEN[name].get("$defs", {})).values(OPEN[name], "", depth + 1)
        else:
            yield PLANTED  # also where it is of the wrong type: errors quote values

    def _objects(self, schema: dict[str, Any], depth: int) -> Iterator[dict[str, Any]]:
        needed = schema.get("required", ()) if depth else ()  # a whole body has a base
        required = {name: self._sample(schema["properties"][name], name) for name in needed}
        yield {**required, PLANTED: 1}
        for name, inner in schema["properties"].items():
            for value in self.values(inner, name, depth + 1):
                yield {**required, name: value}

    def _sample(self, schema: dict[str, Any], name: str) -> Any:
        schema = self._resolved(schema)
        for choice in schema.get("anyOf", schema.get("enum", ())):
            return self._sample(choice, name) if isinstance(choice, dict) else choice
        if "properties" in schema:
            wanted = schema.get("required", ())
            return {each: self._sample(schema["properties"][each], each) for each in wanted}
        by_type = {"array": [], "integer": 1, "number": 1, "boolean": True, "object": {}}
        return by_type.get(schema.get("type", ""), {"role": "user", "type": "function"}.get(name, "x"))

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self._components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def bodies(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths, and bodies for them."""
    components = document["components"]["schemas"]
    planter = Planter(components)
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        for reference in schema.get("anyOf", [schema] if schema else []):
            name = reference["$ref"].rpartition("/")[2]
            for value in planter.values(reference):
                yield path, {**BASES[name], **value}
    yield "/v1/completions", {**BASES["CompletionBody"], "structured_outputs": WARNED_ABOUT}


def targets(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Methods and paths with the text in a parameter."""
    encoded = quote(PLANTED, safe="")
    yield "GET", f"/{encoded}"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    yield method.upper(), path.replace(f"{{{parameter['name']}}}", encoded)
                elif parameter["in"] == "query":
                    plain = re.sub(r"\{\w+\}", "x", path)
                    yield method.upper(), f"{plain}?{parameter['name']}={encoded}"


def heads(document: dict[str, Any]) -> Iterator[bytes]:
    """Request lines and headers with what of the text can be in them, and with what cannot."""
    names = {"Host", "User-Agent", "Origin", "Authorization", "x-api-key", "Content-Type"}
    for methods in document["paths"].values():
        for operation in methods.values():
            names |= {each["name"] for each in operation.get("parameters", ()) if each["in"] == "header"}
    body = json.dumps(BASES["CompletionBody"]).encode()
    rest = b"Content-Length: %d\r\nContent-Type: application/json\r\n" % len(body)
    for text in (PLANTED, PLANTED.replace("\n", " ").replace("\r", " "), f"a {FORGED}\x85{FORGED}", f"a\n {FORGED}"):
        planted = text.encode()
        for name in names:
            yield b"POST /v1/completions HTTP/1.1\r\n%s: %s\r\n%s\r\n%s" % (name.encode(), planted, rest, body)
        yield b"POST /%s HTTP/1.1\r\nHost: x\r\n\r\n" % planted
        yield b"%s / HTTP/1.1\r\nHost: x\r\n\r\n" % planted
        yield b"GET / %s\r\nHost: x\r\n\r\n" % planted


def messages(descriptor: Descriptor, depth: int = 0) -> Iterator[Message]:
    """Messages with the text in one field each."""
    if depth > 4:
        return
    for field in descriptor.fields:
        for value in _field_values(field, depth):
            yield GetMessageClass(descriptor)(**{field.name: value})


def _field_values(field: FieldDescriptor, depth: int) -> Iterator[Any]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        if key.type == FieldDescriptor.TYPE_STRING and value.type == FieldDescriptor.TYPE_STRING:
            yield {PLANTED: "1"}
            yield {"k": PLANTED}
        return
    values: Iterator[Any] | Sequence[Any] = ()
    if entry is not None:
        values = messages(entry, depth + 1)
    elif field.type == FieldDescriptor.TYPE_STRING:
        values = [PLANTED]
    yield from ([each] for each in values) if field.is_repeated else values


def call_all(channel: grpc.Channel) -> int:
    """Calls each method with each of its messages. Returns how many."""
    num_calls = 0
    for service in SERVICES:
        for method in service.methods:
            answer = GetMessageClass(Default().FindMessageTypeByName(method.output_type.full_name))
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = kind(
                f"/{service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString,
            )
            for message in messages(method.input_type):
                if isinstance(message, inference_pb2.GenerateRequest):
                    message.options.max_tokens = 1
                    if message.WhichOneof("prompt") is None:
                        message.text = "Hi"
                num_calls += 1
                with contextlib.suppress(grpc.RpcError):
                    answers = call(message, timeout=5 if service.name == "Health" else TIMEOUT_S)
                    if method.server_streaming and service.name != "Health":
                        list(answers)
    return num_calls


def send(url: str, head: bytes) -> None:
    """Sends raw bytes and reads what comes back, if anything does."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


@pytest.mark.slow
@pytest.mark.parametrize(("log_format", "workers"), [("console", 1), ("json", 2)])
def test_no_text_of_a_client_is_a_line_of_a_log(tmp_path: Path, log_format: str, workers: int) -> None:
    config = tmp_path / "baton.yaml"
    settings = {"log_level": "debug", "log_format": log_format, "router_workers": workers}
    config.write_text(json.dumps({"cluster": settings, "router": {"remote_prefill": "prefer"}}))
    cluster = Cluster("--config", str(config))
    try:
        cluster.wait_ready()
        with httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S) as client:
            document = client.get("/openapi.json").json()
            sent = list(bodies(document))
            for path, body in sent:
                client.post(path, json=body)
            for method, target in targets(document):
                client.request(method, target)
        for head in heads(document):
            send(cluster.url, head)
        with grpc.insecure_channel(cluster.grpc_address) as channel:
            num_calls = call_all(channel)
        assert cluster.stop() == 0
    finally:
        cluster.close()
    assert len(sent) > 500
    assert num_calls > 30
    forged = re.compile(r"(\[[\w.-]+\]\s*)?" + re.escape(FORGED))
    bad = [line for line in cluster.lines if forged.match(line) or not line.isprintable()]
    assert not bad, f"{len(bad)} of {len(cluster.lines)} lines, such as {bad[:5]}"
    for name in ("router", "decode-0"):  # it is there, escaped
        assert any(line.startswith(f"[{name}") and FORGED in line for line in cluster.lines), name
    num_warnings = sum("captured_output" in line for line in cluster.lines)
    assert 0 < num_warnings < NUM_WARNINGS / 10
