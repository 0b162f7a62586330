"""Connectors whose medium cannot be used: one line that names the setting, exit code 2, and nothing left running."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import ROOT
from tests.redis_server import RedisServer, running_redis

UP = ("up", "--port", "0", "--grpc-port", "0")
REDIS = ("--connector", "redis", "--connector-options")
DEADLINE_S = 150.0


@pytest.fixture(scope="module")
def locked_server() -> Iterator[RedisServer]:
    with running_redis(requirepass="s3cret") as server:
        yield server


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([*REDIS, "url=redis://:w0rd@{redis}"], "url: cannot use Redis at {redis}/0: invalid username-password pair"),
        (["--connector-path", "{tmp}/file"], "connector_path: cannot use it as shared storage: "),
    ],
)
@pytest.mark.parametrize("command", [pytest.param(UP, marks=pytest.mark.slow), ("serve", "decode")], ids=" ".join)
def test_one_line_names_the_setting(command, options, says, locked_server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fit = {"tmp": tmp_path, "redis": locked_server.address}
    own = set(psutil.Process().children(recursive=True))
    result = subprocess.run(
        [sys.executable, "-m", "cli.main", *command, *(option.format(**fit) for option in options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    line, *others = result.stderr.splitlines()
    assert not others
    assert line.startswith("baton: error: ")
    assert says.format(**fit) in line
    assert "w0rd" not in line
    assert set(psutil.Process().children(recursive=True)) <= own


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_unknown_connector(role: str) -> None:
    command = [sys.executable, "-m", "cli.main", "serve", role, "--connector", "pigeon"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("baton: error: --connector: unknown connector 'pigeon'; known are ")
    assert result.stderr.count("\n") == 1
