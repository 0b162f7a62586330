"""docs/embeddings.md: its blocks, against a cluster of prefill pods alone."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, running_cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "embeddings.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    (command,) = blocks("console")
    assert command.startswith("$ baton up ")
    options = command.removeprefix("$ baton up ").split()
    with running_cluster(*options) as running:
        yield running
        running.check_integrity()


def asked(cluster: Cluster, lines: str) -> dict:
    lines = lines.replace("http://127.0.0.1:8000", cluster.url)
    printed = subprocess.run(["bash", "-ec", lines], capture_output=True, timeout=60, check=True).stdout
    return json.loads(printed)


@pytest.mark.slow
def test_the_lines_of_the_page(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    embeddings, ranking = (asked(cluster, lines) for lines in blocks("sh"))
    assert [len(each["embedding"]) for each in embeddings["data"]] == [len(embeddings["data"][0]["embedding"])] * 2
    assert [each["index"] for each in ranking["results"]] in ([0], [1])
    (python,) = blocks("python")
    exec(compile(python.replace("http://127.0.0.1:8000", cluster.url), PAGE.name, "exec"), {})
    assert capsys.readouterr().out.startswith("[64, 64] ")


@pytest.mark.slow
def test_the_printed_curl_line_answers(cluster: Cluster) -> None:
    assert asked(cluster, cluster.curl_line)["object"] == "list"
