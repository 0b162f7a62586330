"""Messages as the model's template gets them."""

from __future__ import annotations

import json
import shutil

import pytest

from common.demo_model import demo_model_path
from common.tokenization import Tokenizer
from common.tokenization.chat import ChatTemplate

SHOWS_ALL = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    {"role": "developer", "content": [{"type": "text", "text": "Be"}, "brief.", {"type": "input_text", "text": "!"}]},
    {"role": "user", "content": "Weather?", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I ask.", "audio": None},
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}, "tool_calls": []},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": "Hm."},
]
RENDERED = [
    {"role": "developer", "content": "Be\nbrief.\n!"},
    {"role": "user", "content": "Weather?", "name": "ann"},
    {
        "role": "assistant", "content": "", "reasoning_content": "I ask.", "reasoning": "I ask.",
        "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "assistant", "content": "No.", "reasoning": "Hm.", "reasoning_content": "Hm."},
]  # fmt: skip


@pytest.fixture
def start(start_cluster, tmp_path):
    """Starts a cluster whose model has this chat template."""

    async def with_template(template):
        directory = tmp_path / "model"
        shutil.copytree(demo_model_path(), directory)
        (directory / "chat_template.jinja").write_text(template)
        return await start_cluster(model=str(directory), served_model_name=["baton-demo"])

    return with_template


async def rendered(cluster, messages, **fields):
    response = await cluster.post("/v1/chat/completions", messages=messages, max_tokens=2, **fields)
    assert response.status_code == 200, response.text
    tokenizer = Tokenizer.from_directory(demo_model_path())
    return tokenizer.decode(cluster.decode[0].submits[-1].request.prompt_token_ids, skip_special_tokens=False)


async def test_the_whole_history_reaches_the_template(start):
    cluster = await start(SHOWS_ALL)
    assert [json.loads(line) for line in (await rendered(cluster, HISTORY)).splitlines()] == RENDERED


async def test_a_template_that_loops_over_content_gets_parts(start):
    cluster = await start(
        "{% for message in messages %}{% for part in message['content'] %}<{{ part.type }} {{ part.text }}>"
        "{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "one"}, HISTORY[0], {"role": "assistant", "content": None}]
    assert await rendered(cluster, messages) == "<text one><text Be><text brief.><text !>"


async def test_variables_of_the_template(start):
    template = "{{ documents | tojson }} {{ reasoning_effort }} {{ enable_thinking }} {{ x }}"
    cluster = await start(template)
    fields = {"documents": [{"text": "d"}], "reasoning_effort": "none", "chat_template_kwargs": {"x": 1}}
    assert await rendered(cluster, HISTORY, **fields) == '[{"text": "d"}] none False 1'
    fields["chat_template_kwargs"]["enable_thinking"] = "asked for"
    assert await rendered(cluster, HISTORY, **fields) == '[{"text": "d"}] none asked for 1'


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"tool_calls": "x"}, "messages[0].tool_calls"),
        ({"tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "messages[0].tool_calls"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}, "messages[0].tool_calls"),
        ({"content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"content": [{"type": "refusal", "text": "a"}]}, "messages[0].content"),
    ],
)
async def test_what_cannot_be_rendered_is_refused_by_name(pair, message, param):
    response = await pair.post("/v1/chat/completions", messages=[{"role": "assistant", **message}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


MESSAGES = [{"role": "user", "content": "Hi"}]
LONG_CALLS = [{"function": {"name": "f", "arguments": json.dumps({"x": "city " * 1000})}}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "tool_calls": LONG_CALLS}]},
        {"messages": MESSAGES, "documents": [{"text": "city " * 1000}]},
        {"messages": MESSAGES, "chat_template_kwargs": {"x": "city " * 1000}},
    ],
    ids=["calls", "documents", "variables"],
)
async def test_a_long_conversation_is_rendered_beside_the_event_loop(pair, monkeypatch, body):
    """Whatever makes it long."""
    threads = pair.router.service.model(None).preprocessor._threads
    submitted = []
    run = threads.run
    monkeypatch.setattr(threads, "run", lambda *work: submitted.append(work) or run(*work))
    assert (await pair.post("/v1/chat/completions", **body, max_tokens=2)).status_code == 200
    assert submitted


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    ("reading", "content", "thinking"),
    [(".thinking", None, "Hm."), ("['thinking']", "", "Hm."), (".thinking", "I look.", ""), (".reasoning", None, "")],
)
def test_thinking_before_calls_is_given_to_templates_that_read_it(name, reading, content, thinking):
    template = f"{{{{ messages[0]{reading} }}}}|{{% set key = 'think' ~ 'ing' %}}{{{{ messages[0][key] }}}}"
    message = {"role": "assistant", "content": content, "tool_calls": [CALL], name: "Hm."}
    assert ChatTemplate(template, {}).render([message]).partition("|")[2] == thinking
