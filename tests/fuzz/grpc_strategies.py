"""Calls of the public gRPC API that somebody might make."""

from __future__ import annotations

from hypothesis import strategies as st

from common.pb import inference_pb2
from tests.fuzz.http_strategies import API_KEY
from tests.fuzz.proto_strategies import messages, nearly

Metadata = tuple[tuple[str, str | bytes], ...]

_good_options = st.builds(
    inference_pb2.GenerateOptions,
    max_tokens=st.integers(1, 12),
    temperature=st.none() | st.floats(0, 2),
    top_k=st.none() | st.integers(0, 2**32 - 1),
    seed=st.none() | st.integers(0, 2**64 - 1),
    num_logprobs=st.none() | st.integers(0, 20),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    stop_token_ids=st.lists(st.integers(0, 2047), max_size=3),
    ignore_eos=st.none() | st.booleans(),
)
_good_prompts = st.one_of(
    st.builds(lambda text: {"text": text}, st.sampled_from(["Hi", "a b c", "\x00", "😀" * 3, "x" * 5000])),
    st.builds(
        lambda ids: {"tokens": inference_pb2.TokenPrompt(token_ids=ids)}, st.lists(st.integers(0, 2047), min_size=1)
    ),
    st.builds(
        lambda text: {"chat": inference_pb2.ChatPrompt(messages=[{"role": "user", "content": text}])},
        st.text(max_size=8),
    ),
)
good_requests = st.builds(
    lambda prompt, **fields: inference_pb2.GenerateRequest(**prompt, **fields),
    _good_prompts,
    options=_good_options,
    request_id=st.sampled_from(["", "", "", "same", "x" * 128]),
    cache_salt=st.sampled_from(["", "salt"]),
)
requests = (
    good_requests | nearly(good_requests, inference_pb2.GenerateRequest) | messages(inference_pb2.GenerateRequest)
)

_ascii = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
_times = st.sampled_from(
    ["1", "0", "-1", "nan", "inf", "1e-300", "1e300", "5000", "0x10", " 7 ", "1_0", "1e5", "9" * 400]
)
_entries = st.one_of(
    st.tuples(st.sampled_from(["x-request-timeout-ms", "x-slo-ttft-ms", "x-slo-itl-ms"]), _times | _ascii),
    st.tuples(st.sampled_from(["authorization", "x-api-key"]), st.sampled_from(["Bearer x", "bearer", ""]) | _ascii),
    st.tuples(st.sampled_from(["x-session-id", "x-odd", "last-event-id"]), _ascii),
    st.tuples(st.sampled_from(["x-slo-ttft-ms-bin", "authorization-bin"]), st.binary(max_size=10)),
)
CREDENTIALS: Metadata = (("authorization", f"Bearer {API_KEY}"),)
metadata: st.SearchStrategy[Metadata] = st.builds(
    tuple.__add__, st.sampled_from([(), CREDENTIALS]), st.lists(_entries, max_size=3).map(tuple)
)
