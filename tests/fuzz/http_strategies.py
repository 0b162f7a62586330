"""HTTP requests that somebody might send: good ones, nearly good ones, and bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from router.gateway.anthropic.bodies import MessagesBody
from router.gateway.openai.chat_bodies import ChatBody
from router.gateway.openai.completion_bodies import CompletionBody
from router.gateway.openai.token_bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from router.gateway.responses.bodies import ResponsesBody

PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/route/explain",
    "/tokenize",
    "/detokenize",
]
MAX_BODY_BYTES = 4096  # of the router that gets them
API_KEY = "key-of-fuzzed-requests-0123456789"  # where there are keys

_BODIES = (
    CompletionBody, ChatBody, MessagesBody, ResponsesBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody,
)  # fmt: skip
_FIELDS = sorted({field.encode_name for body in _BODIES for field in msgspec.structs.fields(body)})
_ODD_JSON = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"1E400000000",
    b"9" * 400,
    b"0.1e-999",
    b"[" * 1500,
    b"[" * 1500 + b"]" * 1500,
    b'{"a":' * 700 + b"1" + b"}" * 700,
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b"tru",
    b"",
    b'"',
    b"[1,]",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"4294967296",
]

_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 40)
    | st.floats(allow_nan=False, allow_infinity=False)  # which JSON does not have; _ODD_JSON does
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_values = _json_values.map(lambda value: json.dumps(value).encode()) | st.sampled_from(_ODD_JSON)
_members = st.tuples(st.sampled_from(_FIELDS) | st.text(max_size=6), _values)

_token_ids = st.integers(0, 2100)
_sampling: dict[str, st.SearchStrategy[Any]] = {  # of both APIs
    "logit_bias": st.dictionaries(_token_ids.map(str), st.floats(-110, 110), max_size=3),
    "allowed_token_ids": st.lists(_token_ids, max_size=3),
    "bad_words": st.lists(st.text(max_size=4), max_size=3),
    "prompt_logprobs": st.integers(0, 21),
    "return_token_ids": st.booleans(),
    "truncate_prompt_tokens": st.integers(-2, 4),
    "spaces_between_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "use_beam_search": st.booleans(),
    "length_penalty": st.floats(-11, 11),
    "early_stopping": st.booleans() | st.sampled_from(["never", "ever"]),
    "vllm_xargs": st.dictionaries(st.text(max_size=2), st.integers() | st.text(max_size=2), max_size=2),
}

good_completions = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["Hi", "a b c", [5, 6, 7], ["x", "y"], [[1, 2], [3]], "\x00", "\U0001f600" * 3])},
    optional={
        **_sampling,
        "max_tokens": st.integers(0, 12),
        "n": st.integers(1, 4),
        "stream": st.booleans(),
        "stream_options": st.dictionaries(
            st.sampled_from(["include_usage", "continuous_usage_stats", "include_event_ids"]), st.booleans()
        ),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 20),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=17),
        "temperature": st.floats(0, 2),
        "top_k": st.integers(-1, 2**32),
        "seed": st.integers(0, 2**64),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(st.integers(0, 3000), max_size=4),
        "dry_run": st.booleans(),
        "request_id": st.sampled_from(["same", "x" * 128, "é", "a/b", ""]),
        "session_id": st.text(max_size=5),
        "cache_salt": st.text(max_size=5),
        "priority": st.integers(-(2**31), 2**31),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)
_part = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={"text": st.text(max_size=5)})
_parts = st.lists(st.text(max_size=5) | _part, max_size=3)
_arguments = st.sampled_from(["{}", "[", "", "[" * 3000]) | _json_values
_function = st.fixed_dictionaries({}, optional={"name": _json_values, "arguments": _arguments})
_tool_calls = st.lists(st.fixed_dictionaries({}, optional={"id": _json_values, "function": _function}), max_size=2)
_history = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "odd"])},
    optional={
        "content": st.none() | st.text(max_size=10) | _parts,
        "name": st.text(max_size=5),
        "tool_calls": _tool_calls | _json_values,
        "tool_call_id": st.text(max_size=5),
        "function_call": _json_values,
        "reasoning": st.text(max_size=5),
        "reasoning_content": st.text(max_size=5),
    },
)
good_chats = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "system", "assistant", "odd"]), "content": st.text(max_size=10)}
            )
            | _history,
            max_size=3,
        )
    },
    optional={
        **_sampling,
        "continue_final_message": st.booleans(),
        "max_tokens": st.integers(1, 12),
        "n": st.integers(1, 4),
        "stream": st.booleans(),
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 20),
        "add_generation_prompt": st.booleans(),
        "documents": st.lists(st.dictionaries(st.text(max_size=3), _json_values, max_size=2), max_size=2),
        "reasoning_effort": st.sampled_from(["none", "low", ""]),
        "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": _function}), max_size=3),
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | _json_values,
        "parallel_tool_calls": st.booleans(),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["messages", "bos_token", "raise_exception", "x", "add_generation_prompt", "namespace"]),
            _json_values,
            max_size=2,
        ),
    },
)

_block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"])},
    optional={
        "text": st.text(max_size=5), "thinking": st.text(max_size=5), "id": st.text(max_size=5),
        "name": st.text(max_size=5), "input": _json_values, "tool_use_id": st.text(max_size=5),
        "content": st.text(max_size=5),
    },
)  # fmt: skip
_turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=5) | st.lists(_block, max_size=3)}
)
good_messages = st.fixed_dictionaries(
    {"messages": st.lists(_turns, max_size=3), "max_tokens": st.integers(1, 12)},
    optional={
        "stream": st.booleans(),
        "system": st.text(max_size=5) | st.lists(_block, max_size=2),
        "tools": st.lists(st.fixed_dictionaries({"name": st.text(max_size=5)}), max_size=2),
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"])}),
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled", "adaptive"])}),
        "stop_sequences": st.lists(st.text(max_size=3), max_size=2),
    },
)
_item = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=5) | _parts,
        "call_id": st.text(max_size=5), "name": st.text(max_size=5), "arguments": st.sampled_from(["{}", "["]),
        "output": st.text(max_size=5), "summary": _parts,
    },
)  # fmt: skip
good_responses = st.fixed_dictionaries(
    {"input": st.text(max_size=5) | st.lists(_item, max_size=4)},
    optional={
        "stream": st.booleans(),
        "max_output_tokens": st.integers(1, 12),
        "instructions": st.text(max_size=5),
        "tools": st.lists(
            st.fixed_dictionaries({"type": st.just("function"), "name": st.text(max_size=5)}), max_size=2
        ),
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | _json_values,
        "text": st.fixed_dictionaries({}, optional={"format": _json_values}),
        "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    },
)

good_tokens = st.fixed_dictionaries(
    {"prompt": st.text(max_size=20)}, optional={"return_token_strs": st.booleans(), "add_special_tokens": st.booleans()}
) | st.fixed_dictionaries({"tokens": st.lists(st.integers(-1, 3000), max_size=8)})


def _object(members: Sequence[tuple[str, bytes]]) -> bytes:
    """As JSON; names may come twice."""
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in members) + b"}"


def _with_members(good: dict[str, object], extra: Sequence[tuple[str, bytes]], first: bool) -> bytes:
    members = [(name, json.dumps(value).encode()) for name, value in good.items()]
    return _object([*extra, *members] if first else [*members, *extra])


_good_bodies = good_completions | good_chats | good_messages | good_responses | good_tokens
bodies = (
    _good_bodies.map(lambda body: json.dumps(body).encode())
    | st.builds(_with_members, _good_bodies, st.lists(_members, min_size=1, max_size=3), st.booleans())
    | st.lists(_members, max_size=6).map(_object)
    | _values
    | st.binary(max_size=60)
    | st.integers(MAX_BODY_BYTES - 2, MAX_BODY_BYTES + 2).map(lambda size: b'"' + b"x" * (size - 2) + b'"')
)

_times = st.sampled_from(["1", "0", "-1", "nan", "inf", "1e-300", "1e300", "5000", "0x10", " 7 ", "1_0", "٣", "1e5"])
_event_ids = st.sampled_from(
    ["0", "1.", "1...", "1.AAAAAAAAAAAAAAAAAAAAAAAAAAA.id.0_0", "1.AAAAAAAAAAAAAAAAAAAAAAAAAAA.id.ffffffff_ffffffff!"]
)
_content_types = st.sampled_from(
    ["application/json", "application/json; charset=latin-1", "text/plain", "", ";", "APPLICATION/JSON"]
)
_keys = st.sampled_from(["Bearer x", "bearer", "Basic Og==", "Bearer \t", "é", "Bearer " + "k" * 300])
_header_text = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20)
_known_headers = st.one_of(
    st.tuples(st.sampled_from(["x-request-timeout-ms", "x-slo-ttft-ms", "x-slo-itl-ms"]), _times | _header_text),
    st.tuples(st.just("last-event-id"), _event_ids | _header_text),
    st.tuples(st.just("x-baton-resumable"), st.sampled_from(["0", "1"]) | _header_text),
    st.tuples(st.just("x-request-id"), st.sampled_from(["same", "x" * 128, "a/b"]) | _header_text),
    st.tuples(st.just("content-type"), _content_types | _header_text),
    st.tuples(st.sampled_from(["authorization", "x-api-key"]), _keys | _header_text),
    st.tuples(st.sampled_from(["x-session-id", "accept", "cookie", "origin", "x-odd"]), _header_text),
    st.tuples(st.just("expect"), st.just("100-continue")),
    st.tuples(st.just("connection"), st.sampled_from(["close", "upgrade", "keep-alive, x"])),
    st.tuples(st.just("upgrade"), st.sampled_from(["websocket", "h2c"])),
)
_credentials = st.sampled_from([[], [("authorization", f"Bearer {API_KEY}")]])
headers = st.builds(list.__add__, _credentials, st.lists(_known_headers, max_size=4))


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    chunk_sizes: tuple[int, ...] = ()  # how the body is cut into chunks; none: it has a length
    trailers: tuple[tuple[str, str], ...] = ()  # behind the last chunk

    def encode(self) -> bytes:
        """On the wire."""
        lines = [f"{self.method} {self.target} HTTP/1.1", "host: test"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines.append("transfer-encoding: chunked" if self.chunk_sizes else f"content-length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("utf-8") + self._payload()

    def _payload(self) -> bytes:
        if not self.chunk_sizes:
            return self.body
        chunks, rest = [], self.body
        for size in self.chunk_sizes:
            chunk, rest = rest[:size], rest[size:]
            chunks += [chunk] if chunk else []
        chunks += [rest] if rest else []
        trailers = "".join(f"{name}: {value}\r\n" for name, value in self.trailers).encode("utf-8")
        return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailers + b"\r\n"


_posts = st.builds(
    Call,
    method=st.just("POST"),
    target=st.sampled_from(PATHS),
    headers=headers.map(tuple),
    body=bodies,
    chunk_sizes=st.just(()) | st.lists(st.integers(1, 50), min_size=1, max_size=4).map(tuple),
    trailers=headers.map(tuple),
)
_OTHERS = [
    "/health",
    "/readyz",
    "/livez",
    "/ping",
    "/metrics",
    "/version",
    "/openapi.json",
    "/docs",
    "//",
    "*",
    "http://other/health",
    "/health?%zz=%",
]
_odd_calls = st.builds(
    Call,
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]),
    target=st.sampled_from(
        [*PATHS, "/v1/models", "/v1/models/", "/v1/models/a%2fb%00", "/v1/models/%ff%fe", "/v1//completions", *_OTHERS]
    ),
    headers=headers.map(tuple),
    body=st.just(b"") | bodies,
)
calls = _posts | _odd_calls


@st.composite
def streams(draw: st.DrawFn) -> Call:
    """A request that will be answered by a stream."""
    body = {**draw(good_completions), "stream": True, "dry_run": False}
    return Call("POST", "/v1/completions", (), json.dumps(body).encode())


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A request whose bytes were changed on the way, with enough behind it to end whatever it leaves open."""
    data = draw(calls).encode()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 20)))
        data = data[:start] + draw(_inserted) + data[end:]
    return data + FILLER


_inserted = (
    st.binary(max_size=6)
    | st.sampled_from([b"\r\n", b"\r\n\r\n", b"\x00", b": ", b"HTTP/1.1", b"HTTP/9.9", b"GET ", b"chunked"])
    | st.sampled_from([b"content-length: 5\r\n", b"content-length: -1\r\n", b"Transfer-Encoding: chunked\r\n"])
    | st.sampled_from([b"content-length: 99999999999999999999999\r\n", b"content-length: 1,1\r\n", b"ffffffffffff\r\n"])
)
FILLER = b"\r\n\r\n" + b"x" * (MAX_BODY_BYTES + 16)


@st.composite
def cut_into_pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes as they might come in."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    edges = [0, *cuts, len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]
