"""What becomes of each field that clients of OpenAI, vLLM and SGLang know."""

from __future__ import annotations

import msgspec
import pytest
import pytest_asyncio

from common.types import SamplingParams
from docs_site import api_page
from router.gateway.bodies.fields import (
    IGNORED_BY_BOTH,
    IGNORED_BY_CHATS,
    REFUSED_BY_BOTH,
    REFUSED_BY_CHATS,
    REFUSED_BY_COMPLETIONS,
)
from router.gateway.openai.chat_bodies import ChatBody
from router.gateway.openai.completion_bodies import CompletionBody
from router.testing import FakeDecodePod
from tests.unit.router.router_cluster import run_cluster

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    TEXT: {"prompt": "Hi", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}
REFUSED = [(TEXT, row) for row in REFUSED_BY_BOTH + REFUSED_BY_COMPLETIONS]
REFUSED += [(CHAT, row) for row in REFUSED_BY_BOTH + REFUSED_BY_CHATS]

# As vLLM's ChatCompletionRequest and CompletionRequest and OpenAI's package have them.
KNOWN_TO_BOTH = [
    "model", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "user", "suffix", "response_format",
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "allowed_token_ids",
    "prompt_logprobs", "logprob_token_ids", "bad_words", "add_special_tokens", "structured_outputs", "priority",
    "request_id", "session_id", "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start",
    "return_token_offsets", "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params",
    "vllm_xargs", "repetition_detection", "thinking_token_budget", "stream_interval", "echo", "best_of",
]  # fmt: skip
KNOWN_TO_CHATS = [
    "messages", "audio", "function_call", "functions", "max_completion_tokens", "metadata", "modalities",
    "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "tool_choice", "tools", "top_logprobs", "verbosity",
    "web_search_options", "include_reasoning", "add_generation_prompt", "continue_final_message", "documents",
    "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text",
]  # fmt: skip

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with run_cluster(decode=[FakeDecodePod()]) as cluster:
        await cluster.until_ready()
        yield cluster


async def test_every_field_of_other_servers_is_known():
    assert set(KNOWN_TO_BOTH) | {"prompt", "prompt_embeds"} <= set(CompletionBody.__struct_fields__)
    assert set(KNOWN_TO_BOTH) | set(KNOWN_TO_CHATS) <= set(ChatBody.__struct_fields__)


async def test_every_sampling_parameter_is_a_field():
    inner = {"num_logprobs", "bad_word_token_ids", "thinking_start_token_ids", "thinking_end_token_ids"}
    for body in (CompletionBody, ChatBody):
        assert set(SamplingParams.__struct_fields__) - inner <= set(body.__struct_fields__)


async def test_the_page_is_what_the_code_says():
    assert api_page.PAGE.read_text() == api_page.page(), "run `make api-docs`"


async def test_the_page_names_every_field_once_per_api():
    page = api_page.page()
    for body in (CompletionBody, ChatBody):
        for field in msgspec.structs.fields(body):
            assert f"| `{field.name}` |" in page, field.name


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_idle_values_are_accepted_together(cluster, path):
    rows = [row for at, row in REFUSED if at == path]
    for values in ({row.name: None for row in rows}, {row.name: row.idle[-1] for row in rows if row.idle}):
        response = await cluster.post(path, **BODIES[path], **values)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_null_is_the_same_as_to_leave_a_field_out(cluster, path):
    struct = {TEXT: CompletionBody, CHAT: ChatBody}[path]
    nulls = {field.name: None for field in msgspec.structs.fields(struct) if field.name not in BODIES[path]}
    response = await cluster.post(path, **BODIES[path], **nulls)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_every_other_value_is_refused_by_name_and_reason(cluster, path):
    for row in (row for at, row in REFUSED if at == path):
        candidates = ["some", 7, 0, False, ["x"], {}]
        for value in candidates:
            if any(value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in row.idle):
                continue  # 0 is no false
            response = await cluster.post(path, **BODIES[path], **{row.name: value})
            assert response.status_code == 400, (row.name, value)
            error = response.json()["error"]
            assert error["param"] == row.name
            assert error["message"] == f"{row.name} is not supported: {row.why}"


async def test_ignored_fields_change_nothing(cluster):
    values = {str: "x", bool: True, dict: {"a": "b"}}
    await cluster.post(CHAT, **BODIES[CHAT], seed=1)
    await cluster.post(
        CHAT, **BODIES[CHAT], seed=1, **{row.name: values[row.kind] for row in IGNORED_BY_BOTH + IGNORED_BY_CHATS}
    )
    plain, with_ignored = (submit.request for submit in cluster.decode[0].submits[-2:])
    assert plain.sampling == with_ignored.sampling
    assert plain.prompt_token_ids == with_ignored.prompt_token_ids


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_speculation_is_turned_off_on_pods(cluster, path):
    for value, sent in ((None, True), (True, True), (False, False)):
        assert (await cluster.post(path, **BODIES[path], speculative=value)).status_code == 200
        assert cluster.decode[0].submits[-1].request.sampling.speculative is sent
    response = await cluster.post(path, **BODIES[path], speculative="no")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "speculative")


@pytest.mark.parametrize(
    ("path", "name", "hint"),
    [
        (TEXT, "temprature", "did you mean temperature?"),
        (TEXT, "max_token", "did you mean max_tokens?"),
        (CHAT, "badwords", "did you mean bad_words?"),
        (TEXT, "messages", "it is a field of /v1/chat/completions"),
        (CHAT, "prompt", "it is a field of /v1/completions"),
        (CHAT, "zzz", ""),
        (CHAT, "temperature" * 100, ""),
    ],
)
async def test_an_unknown_field_is_refused_with_what_was_meant(cluster, path, name, hint):
    response = await cluster.post(path, **BODIES[path], **{name: 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].startswith(name[:50])
    assert error["message"].endswith(f"'; {hint}") if hint else "did you mean" not in error["message"]


async def test_an_unknown_stream_option(cluster):
    response = await cluster.post(TEXT, **BODIES[TEXT], stream=True, stream_options={"includeusage": True})
    assert response.json()["error"]["message"] == (
        "unknown field 'stream_options.includeusage'; did you mean include_usage?"
    )


async def test_minus_one_is_no_seed_and_all_tokens(cluster):
    """As with vLLM."""
    for _ in range(2):
        assert (await cluster.post(TEXT, **BODIES[TEXT], seed=-1, top_k=-1)).status_code == 200
    first, second = (submit.request.sampling for submit in cluster.decode[0].submits[-2:])
    assert first.seed != second.seed
    assert first.top_k == 0
