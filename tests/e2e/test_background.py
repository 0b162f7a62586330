"""A cluster in the background, from `baton up -d` to `baton down`, with a model from a hub."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from common.demo_model import demo_model_path
from tests.e2e.cluster import ROOT, wait_gone
from tests.e2e.fake_hub import MODEL, FakeHub, running_hub
from tests.e2e.reference import greedy_completion

TIMEOUT_S = 150


class Background(NamedTuple):
    """A cluster that `baton up -d` left running."""

    env: dict[str, str]
    hub: FakeHub
    said: str  # by the command

    def baton(self, *arguments: str, code: int = 0) -> str:
        """What a command prints; fails unless it exits with `code`."""
        result = run(self.env, *arguments)
        assert result.returncode == code, result
        return result.stdout

    def status(self) -> dict[str, object]:
        """The one cluster that runs."""
        (cluster,) = json.loads(self.baton("status", "--json"))
        return cluster


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@contextlib.contextmanager
def started(env: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that goes on beside the test; killed if the test fails."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("home")
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "HF_"))}
    return ours | {"XDG_STATE_HOME": str(home), "HF_HOME": str(home / "hf"), "NO_PROXY": "*"}


@pytest.fixture(scope="module")
def background(env: dict[str, str]) -> Iterator[Background]:
    with running_hub(demo_model_path()) as hub:
        env["HF_ENDPOINT"] = hub.url
        options = ["--port", "0", "--grpc-port", "0", "--metrics-port", "0", "--remote-prefill", "prefer"]
        result = run(env, "up", MODEL, *options, "-d")
        assert result.returncode == 0, result
        try:
            yield Background(env, hub, result.stdout)
        finally:
            run(env, "down", "--all")


def test_up_returns_when_all_are_ready_and_asks_the_hub_once(background: Background) -> None:
    assert "Stop with `baton down`." in background.said
    fetched = {path: count for path, count in background.hub.requests.items() if path.startswith("GET /acme")}
    assert len(fetched) == len([name for name in background.hub.files if name != "README.md"])
    assert set(fetched.values()) == {1}
    assert background.hub.requests[f"GET /api/models/{MODEL}/revision/main"] == 1  # by the launcher, by no pod
    cluster = background.status()
    assert (cluster["phase"], cluster["model"]) == ("ready", MODEL)
    pods = cluster["pods"]
    assert [(pod["name"], pod["phase"]) for pod in pods] == [  # type: ignore[attr-defined]
        ("prefill-0", "ready"),
        ("decode-0", "ready"),
        ("router", "ready"),
    ]
    assert re.search(r"^  decode-0 +decode +127.0.0.1:\d+ +ready ", background.baton("status"), re.MULTILINE)


def test_commands_find_it(background: Background) -> None:
    said = background.baton("complete", "The capital of Italy is", "--temperature", "0", "--max-tokens", "24")
    assert said == greedy_completion("The capital of Italy is", 24).rstrip("\n") + "\n"
    assert re.search(r"^v3-\S+ +\d+ ", background.baton("kv", "inspect"), re.MULTILINE)
    log = background.baton("logs", "launcher")
    assert "Ready in" in log
    assert "no such process; there are launcher, prefill-0" in run(background.env, "logs", "prefill-7").stderr


def test_its_name_is_taken_and_a_failed_start_takes_none(background: Background) -> None:
    second = run(background.env, "up", "-d", "--port", "0")
    assert second.returncode == 2
    assert second.stderr.startswith("baton: error: --name: a cluster named default is running; ")
    failed = run(background.env, "up", "-d", "--name", "other", "--connector", "pigeon")
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1), failed
    assert "--connector: 'pigeon' cannot join processes" in failed.stderr
    background.status()  # of one cluster


def test_ctrl_c_before_it_is_ready_leaves_nothing(background: Background) -> None:
    options = ["--name", "hasty", "--prefill", "0", "--port", "0", "--grpc-port", "0"]
    with started(background.env, "up", "-d", *options) as starting:
        assert starting.stdout is not None
        assert starting.stdout.readline().startswith("Baton ")
        tree = psutil.Process(starting.pid).children(recursive=True)
        assert tree
        starting.send_signal(signal.SIGINT)
        assert starting.wait(TIMEOUT_S) == 130
    wait_gone(tree)
    assert "no cluster named hasty" in run(background.env, "status", "--name", "hasty").stderr


def test_down_ends_it_and_the_log_stays(background: Background) -> None:
    launcher = psutil.Process(int(background.status()["pid"]))  # type: ignore[call-overload]
    tree = [launcher, *launcher.children(recursive=True)]
    with started(background.env, "logs", "-f") as following:
        assert following.stdout is not None
        assert "[launcher]" in following.stdout.readline()
        assert background.baton("down") == "Stopped default.\n"
        assert following.stdout.read().endswith(" Stopped.\n")
        assert following.wait(TIMEOUT_S) == 0
    wait_gone(tree)
    assert (
        background.baton("status", code=3) == background.baton("down") == "No cluster is running in the background.\n"
    )
    assert background.baton("logs", "-n", "1").endswith(" Stopped.\n")
    assert (Path(background.env["XDG_STATE_HOME"]) / "baton").stat().st_mode & 0o777 == 0o700
