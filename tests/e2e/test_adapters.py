"""LoRA adapters beside the demo model, the ways docs/adapters.md shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.main import main
from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from tests.e2e.cluster import ROOT, Cluster, running_cluster
from tests.e2e.reference import greedy_completion
from tests.lora import merged_dir

PROMPT = "Once upon a time"
MAX_TOKENS = 12
CHAT_TOKENS = 40  # by then adapters have changed the answer


def page_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/adapters.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the page's adapters."""
    directory = tmp_path_factory.mktemp("adapters")
    for line in page_blocks("sh")[0].splitlines()[:2]:
        command = line.replace("/tmp/adapters", str(directory)).split()
        assert command[0] == "python"
        subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True, timeout=60)
    return directory


@pytest.fixture(scope="module")
def cluster(adapters: Path) -> Iterator[Cluster]:
    started = page_blocks("sh")[0].splitlines()[2].replace("/tmp/adapters", str(adapters)).split()
    assert started[:2] == ["baton", "up"]
    with running_cluster(*started[2:], "--dtype", "float32") as running:
        yield running
        running.check_integrity()


def expected(adapters: Path, name: str) -> str:
    """The answer of the model that the adapter is merged into."""
    return greedy_completion(PROMPT, MAX_TOKENS, directory=merged_dir(demo_model_path(), adapters / name))


def test_each_adapter_answers_as_the_model_that_it_is_merged_into(
    cluster: Cluster, adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = page_blocks("python")[0].replace("http://127.0.0.1:8000", cluster.url)
    exec(compile(lines, "adapters.md", "exec"), {})
    answers = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert answers == {
        DEMO_MODEL_NAME: repr(greedy_completion(PROMPT, MAX_TOKENS)),
        "first": repr(expected(adapters, "first")),
        "second": repr(expected(adapters, "second")),
    }
    assert len(set(answers.values())) == 3


def test_every_api_and_a_batch_answer_with_the_adapter(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, source, output = "Tell me a story.", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": question}]

    def post(path: str, name: str, **body: object) -> dict[str, Any]:
        asked = {"model": name, "temperature": 0, **body}
        response = httpx.post(f"{cluster.url}{path}", json=asked, timeout=60)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        assert answer["model"] == name
        return answer

    def answers(name: str) -> set[str]:
        chat = post("/v1/chat/completions", name, messages=messages, max_tokens=CHAT_TOKENS)
        message = post("/v1/messages", name, messages=messages, max_tokens=CHAT_TOKENS)
        response = post("/v1/responses", name, input=question, max_output_tokens=CHAT_TOKENS)
        body = {"model": name, "messages": messages, "max_tokens": CHAT_TOKENS, "temperature": 0}
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        source.write_text(json.dumps(line) + "\n")
        output.unlink(missing_ok=True)
        assert main(["run-batch", "-i", str(source), "-o", str(output)]) == 0
        batched = json.loads(output.read_text())["response"]["body"]
        return {
            chat["choices"][0]["message"]["content"],
            message["content"][0]["text"],
            response["output"][0]["content"][0]["text"],
            batched["choices"][0]["message"]["content"],
        }

    monkeypatch.setenv("BATON_URL", cluster.url)
    (plain,), (first,), (second,) = (answers(name) for name in (DEMO_MODEL_NAME, "first", "second"))
    assert len({plain, first, second}) == 3


def test_the_pages_lines_for_loading(cluster: Cluster, adapters: Path) -> None:
    lines = page_blocks("sh")[1].replace("http://127.0.0.1:8000", cluster.url)
    lines = lines.replace("/tmp/adapters", str(adapters))
    printed = subprocess.run(["bash", "-ec", lines], capture_output=True, timeout=60, check=True, text=True).stdout
    assert printed.startswith("Success: LoRA adapter 'third' added successfully.")
    assert '"model":"third"' in printed
    assert printed.endswith("Success: LoRA adapter 'third' removed successfully.")


@pytest.mark.slow
def test_the_pages_lines_for_generation_offline(adapters: Path) -> None:
    lines = page_blocks("python")[1].replace("/tmp/adapters", str(adapters))
    subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=True, timeout=120)
