"""`baton up` with the demo model, used the ways its README promises."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from typing import Any

import grpc
import httpx
import msgspec
import openai
import psutil
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cli.top.answers import Timeline
from cli.top.timeline_chart import draw
from common.demo_model import DEMO_MODEL_NAME
from common.pb import inference_pb2_grpc
from docs_site import metrics_page
from tests.compose.dashboards import expressions, metric_names
from tests.e2e.cluster import ROOT, SETTLE_DEADLINE_S, Cluster, running_cluster, wait_gone
from tests.e2e.metrics import pod_metrics
from tests.e2e.reference import PROMPTS, greedy_chat, greedy_completion

_TYPE = re.compile(r"^# TYPE (baton_\w+) ", re.MULTILINE)  # of a scrape
GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_printed_curl_line_answers(cluster: Cluster) -> None:
    printed = subprocess.run(["bash", "-c", cluster.curl_line], capture_output=True, timeout=60, check=True).stdout
    assert json.loads(printed)["choices"][0]["text"] == greedy_completion("The capital of France is", 16)


def readme_block(start: str) -> str:
    """The code block of README.md that begins with these words."""
    blocks = re.findall(r"```\w+\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(start)]
    return str(block)


def test_the_readmes_lines_for_http(cluster: Cluster) -> None:
    lines = readme_block("curl").replace("http://127.0.0.1:8000", cluster.url)
    printed = subprocess.run(["bash", "-ec", lines], capture_output=True, timeout=60, check=True).stdout
    assert json.loads(printed)["choices"][0]["text"] == greedy_completion("The capital of France is", 16)


def test_the_readmes_lines_for_grpc(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    lines = readme_block("from baton import Client").replace("127.0.0.1:9000", cluster.grpc_address)
    exec(compile(lines, "README.md", "exec"), {})
    completion, chat = capsys.readouterr().out.split("\n", 1)
    assert completion == greedy_completion("The capital of France is", 16).rstrip("\n")
    assert chat


def test_the_readmes_lines_for_generation_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(readme_block("from baton import LLM"), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_openai_completion(client: openai.OpenAI) -> None:
    for prompt in PROMPTS:
        answer = client.completions.create(model=DEMO_MODEL_NAME, prompt=prompt, max_tokens=24, temperature=0)
        assert answer.choices[0].text == greedy_completion(prompt, 24)
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_completion_stream(client: openai.OpenAI) -> None:
    for prompt in PROMPTS[:4]:
        stream = client.completions.create(
            model=DEMO_MODEL_NAME, prompt=prompt, max_tokens=24, temperature=0, stream=True
        )
        assert "".join(c.choices[0].text for c in stream if c.choices) == greedy_completion(prompt, 24)


def test_openai_chat_and_its_stream(client: openai.OpenAI) -> None:
    question = "What is the capital of France?"
    expected = greedy_chat(question, 24)
    assert "Paris" in expected
    for stream in (False, True):
        answer = client.chat.completions.create(
            model=DEMO_MODEL_NAME,
            messages=[{"role": "user", "content": question}],
            max_tokens=24,
            temperature=0,
            stream=stream,
        )
        if isinstance(answer, openai.Stream):
            assert "".join(c.choices[0].delta.content or "" for c in answer if c.choices) == expected
        else:
            assert answer.choices[0].message.content == expected


def test_the_demo_model_calls_a_tool_and_answers_with_its_result(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {"model": DEMO_MODEL_NAME, "tools": [GET_WEATHER], "max_tokens": 80, "temperature": 0}
    choice = client.chat.completions.create(messages=messages, tool_choice="auto", **options).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18, "condition": "sunny"}'}
    choice = client.chat.completions.create(messages=[*messages, choice.message, result], **options).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is sunny in Paris, with 18 degrees.")


def test_the_demo_model_answers_without_a_tool_that_does_not_help(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model=DEMO_MODEL_NAME,
        messages=[{"role": "user", "content": "What is the capital of Italy?"}],
        tools=[GET_WEATHER],
        max_tokens=80,
        temperature=0,
    ).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "The capital of Italy is Rome.")
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("question", ["What is the capital of Italy?", "Tell me about France as JSON."])
def test_the_demo_model_ends_a_json_object(client: openai.OpenAI, question: str) -> None:
    choice = client.chat.completions.create(
        model=DEMO_MODEL_NAME,
        messages=[{"role": "user", "content": question}],
        response_format={"type": "json_object"},
        max_tokens=100,
        temperature=0,
    ).choices[0]
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)


def test_openai_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEMO_MODEL_NAME]


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=DEMO_MODEL_NAME, prompt="word " * 50_000, max_tokens=1)


def test_the_kv_comes_from_the_prefill_pod(cluster: Cluster, client: openai.OpenAI) -> None:
    """Not only the right answer: none of the prompt was computed by the decode pod."""
    prompt = "Here is a text that nobody sent before. " * 8
    before = _metrics(cluster)
    usage = client.completions.create(model=DEMO_MODEL_NAME, prompt=prompt, max_tokens=4).usage
    after = _metrics(cluster)
    assert usage is not None
    model = f'model_name="{DEMO_MODEL_NAME}"'
    remote = f'baton_router_dispatch_total{{{model},prefill="remote",reason="planned"}}'
    assert after[remote] == before.get(remote, 0) + 1
    external = f"baton_router_external_tokens_total{{{model}}}"
    assert after[external] - before[external] == usage.prompt_tokens


def _metrics(cluster: Cluster) -> dict[str, float]:
    lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_health_and_metrics(cluster: Cluster) -> None:
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    router, *pods = [
        {name for name in _TYPE.findall(httpx.get(url).text) if not name.endswith("_created")}
        for url in (f"{cluster.url}/metrics", *(pod_metrics(cluster, name).url for name in cluster.addresses))
    ]
    assert router == {row.name for row in metrics_page.router_metrics()}, "what is documented and what is exported"
    assert all(pod == {row.name for row in metrics_page.pod_metrics()} for pod in pods)
    assert {name for expression in expressions() for name in metric_names(expression)} <= router.union(*pods)
    assert router.isdisjoint(pods[0]), "one name would be counted twice"


def test_the_router_shows_what_pods_have_done(cluster: Cluster, client: openai.OpenAI) -> None:
    client.completions.create(model=DEMO_MODEL_NAME, prompt="Something to prefill", max_tokens=4)
    for name, address in cluster.addresses.items():
        role = name.partition("-")[0]
        labels = f'{{address="{address}",model_name="{DEMO_MODEL_NAME}",role="{role}"}}'
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        for figure in ("prompt_tokens", "generation_tokens", "prefix_cache_queries"):
            metrics = pod_metrics(cluster, name)
            while _metrics(cluster)[f"baton_router_pod_{figure}_total{labels}"] != metrics[figure]:
                assert time.monotonic() < deadline, figure
        moved = f"baton_router_pod_kv_{'saved' if role == 'prefill' else 'loaded'}_bytes_total{labels}"
        assert _metrics(cluster)[moved] > 0


def test_grpc_reflection_lists_the_services(cluster: Cluster) -> None:
    expected = {"baton.v1.Inference", "grpc.health.v1.Health"}
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert expected <= set(database.get_services())
    for name, address in cluster.addresses.items():
        with grpc.insecure_channel(address) as channel:
            services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        role = {"prefill-0": "baton.v1.Prefill", "decode-0": "baton.v1.Decode"}[name]
        assert {role, "baton.v1.Pod", "grpc.health.v1.Health"} <= services
    assert inference_pb2_grpc.InferenceStub


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_baton_complete_and_chat(cluster: Cluster, stream: str) -> None:
    options = [stream, "--url", cluster.url, "--temperature", "0", "--max-tokens", "24"]
    completed = _baton("complete", "The capital of Italy is", *options)
    assert completed == greedy_completion("The capital of Italy is", 24).rstrip("\n") + "\n"
    assert _baton("chat", "What is the capital of France?", *options) == (
        greedy_chat("What is the capital of France?", 24).rstrip("\n") + "\n"
    )


def test_baton_top(cluster: Cluster, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=DEMO_MODEL_NAME, prompt="Something else to prefill", max_tokens=4)
    lines = _baton("top", "--once", "--url", cluster.url, "--interval", "0.1").splitlines()
    assert lines[1].startswith("Pods ready 2/2  prefill 1/1  decode 1/1 ")
    assert lines[3] == f"{DEMO_MODEL_NAME}: served, 0 queued"
    for name, address in cluster.addresses.items():
        assert any({name, name.partition("-")[0], "ready", address} <= set(line.split()) for line in lines)
    assert "prefill-0 to decode-0: " in lines[-1]
    timeline = httpx.get(f"{cluster.url}/v1/requests/{answer.id}", timeout=30).content
    drawn = draw(msgspec.json.decode(timeline, type=Timeline), 100).plain
    for part in ("Router\n", f"Prefill pod {cluster.addresses['prefill-0']}\n", "Wire\n  transfer ", "  first decode "):
        assert part in drawn


def _baton(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_roles_are_in_the_command_lines(cluster: Cluster) -> None:
    roles = [process.cmdline()[4] for process in cluster.tree[1:] if process.cmdline()[3:4] == ["serve"]]
    assert sorted(roles) == ["decode", "prefill", "router"]


def test_sigterm_lets_running_streams_finish_and_ends_every_child() -> None:
    prompt, max_tokens = "Once upon a time", 80
    body = {"model": DEMO_MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    with running_cluster("--prefill", "0", "--stop-grace-s", "120") as cluster:
        assert len(cluster.tree) >= 4  # launcher, decode pod, its engine core, router
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data"))
            pieces = [json.loads(next(lines))["choices"][0]["text"]]
            cluster.launcher.send_signal(signal.SIGTERM)
            pieces += [json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]"]
        assert "".join(pieces) == greedy_completion(prompt, max_tokens, ignore_eos=True)
        assert cluster.launcher.wait(60) == 0
        wait_gone(cluster.tree)


def test_a_second_ctrl_c_kills_what_does_not_end() -> None:
    with running_cluster("--prefill", "0", "--stop-grace-s", "3600") as cluster:
        psutil.Process(cluster.pid_of("router")).suspend()  # does not react to SIGTERM any more
        cluster.launcher.send_signal(signal.SIGINT)
        cluster.wait_line(lambda line: line.startswith("Stopping."), 60)
        assert cluster.stop(signal.SIGINT) == 0
        wait_gone(cluster.tree)


def test_a_killed_launcher_leaves_nobody() -> None:
    with running_cluster("--prefill", "0") as cluster:
        psutil.Process(cluster.launcher.pid).kill()
        cluster.launcher.wait(60)
        wait_gone(cluster.tree)
