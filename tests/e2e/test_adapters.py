"""LoRA adapters beside the demo model, the ways docs/adapters.md shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from tests.e2e.cluster import ROOT, Cluster, running_cluster
from tests.e2e.reference import greedy_completion
from tests.lora import merged_dir

PROMPT = "Once upon a time"
MAX_TOKENS = 12


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


def test_the_pages_lines_for_loading(cluster: Cluster, adapters: Path) -> None:
    lines = page_blocks("sh")[1].replace("http://127.0.0.1:8000", cluster.url)
    lines = lines.replace("/tmp/adapters", str(adapters))
    printed = subprocess.run(["bash", "-ec", lines], capture_output=True, timeout=60, check=True, text=True).stdout
    assert printed.startswith("Success: LoRA adapter 'third' added successfully.")
    assert '"model":"third"' in printed
    assert printed.endswith("Success: LoRA adapter 'third' removed successfully.")


def test_the_pages_lines_for_generation_offline(adapters: Path) -> None:
    lines = page_blocks("python")[1].replace("/tmp/adapters", str(adapters))
    subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=True, timeout=120)
