"""Names of clusters in the background: who has one, and what becomes of one whose launcher was killed."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import down, status
from common.errors import ConfigError
from deploy.cluster_state import (
    ClusterState,
    PodState,
    StateError,
    StoreState,
    claim,
    find_running,
    running_clusters,
    signal_launcher,
    start_time_of,
    the_cluster,
)

# Claims the name and waits; as its launcher, it ends at SIGTERM unless it is told to ignore that.
LAUNCHER = """
import signal, socket, sys, time
from deploy.cluster_state import ClusterState, PodState, StoreState, claim, start_time_of
import os
if sys.argv[2:] == ["deaf"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
claimed = claim(sys.argv[1])
state = ClusterState(sys.argv[1], os.getpid(), start_time_of(os.getpid()), socket.gethostname(), phase="ready")
state.url, state.stop_s = "http://127.0.0.1:9", 0.0
state.pods = [PodState("decode-0", "decode", "127.0.0.1:1", phase="ready")]
state.store = StoreState("redis", "", {"url": "redis://:secret@127.0.0.1"})
claimed.save(state)
print("claimed", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


class Launchers:
    """Processes that have clusters."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        return process


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    started = Launchers()
    yield started
    for process in started.processes:
        process.kill()
        process.communicate()


def test_directories_are_private_even_if_they_were_not(home: Path) -> None:
    (home / "baton").mkdir(mode=0o755)
    claimed = claim("a")
    claimed.save(ClusterState("a", 1, 2))
    for path in (home / "baton", home / "baton" / "clusters", claimed.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in claimed.directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.close(claimed.lock)


def test_a_name_is_taken_while_its_launcher_lives(launchers: Launchers) -> None:
    launcher = launchers.start("a")
    with pytest.raises(ConfigError, match="--name: a cluster named a is running"):
        claim("a")
    found = find_running("a")
    assert found is not None
    assert found.pid == launcher.pid
    launcher.kill()
    launcher.wait()
    assert find_running("a") is None
    assert running_clusters() == []
    claimed = claim("a")
    assert not (claimed.directory / "state.json").exists()
    os.close(claimed.lock)


def test_a_process_that_has_the_pid_by_now_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        claimed = claim("a")
        state = ClusterState("a", other.pid, start_time_of(other.pid) - 1, socket.gethostname())
        assert not signal_launcher(state, signal.SIGKILL)
        state.start_time += 1
        os.close(claimed.lock)  # and now none holds the name
        assert not signal_launcher(state, signal.SIGKILL)
        assert other.communicate(b"\n")
        assert other.returncode == 0


def test_one_of_several_has_to_be_named_unless_it_is_the_default(launchers: Launchers) -> None:
    assert the_cluster() is None
    launchers.start("a")
    assert the_cluster() == find_running("a")
    launchers.start("b")
    with pytest.raises(ConfigError, match="several clusters are running, name one: a, b"):
        the_cluster()
    launchers.start("default")
    assert the_cluster() == find_running("default")
    for name in ("c", "../clusters/a", "/"):
        with pytest.raises(ConfigError, match="--name: no cluster named "):
            the_cluster(name)


def test_a_state_that_cannot_be_read_names_its_file(home: Path) -> None:
    claimed = claim("a")
    for content in (b"{", b"[]", b'{"name": "a"}'):
        (claimed.directory / "state.json").write_bytes(content)
        with pytest.raises(StateError, match=rf"{home}/baton/clusters/a/state.json cannot be read: "):
            running_clusters()
    os.close(claimed.lock)


def test_a_home_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    with pytest.raises(StateError, match="XDG_STATE_HOME: cannot keep state there: "):
        claim("a")


@pytest.mark.parametrize("given", ["", "/nonexistent/state"])
def test_who_only_looks_needs_no_home(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_STATE_HOME", given)
    monkeypatch.setattr(Path, "home", no_home)
    assert the_cluster() is None
    assert not Path("/nonexistent").exists()


def test_down_ends_a_cluster_and_status_tells(launchers: Launchers, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = launchers.start("a")
    assert status.main([]) == 1
    out = capsys.readouterr().out
    assert "a: ready, up " in out
    assert "It serves nothing: the router does not answer within 2 s." in out
    assert status.main(["--json"]) == 1
    assert "secret" not in capsys.readouterr().out
    assert down.main([]) == 0
    assert launcher.wait(60) == -signal.SIGTERM
    assert capsys.readouterr().out == "Stopped a.\n"
    assert (status.main([]), down.main([])) == (3, 0)


def test_down_kills_what_does_not_end(
    launchers: Launchers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "_MARGIN_S", 0.0)
    launcher = launchers.start("a", "deaf")
    assert down.main(["--all"]) == 0
    assert launcher.wait(60) == -signal.SIGKILL
    assert capsys.readouterr().out == "Killed a.\n"


def test_a_cluster_of_another_machine_is_left_alone() -> None:
    claimed = claim("a")
    claimed.save(ClusterState("a", os.getpid(), start_time_of(os.getpid()), "elsewhere"))
    with pytest.raises(ConfigError, match="the cluster a runs on elsewhere; end it there"):
        down.main([])
    os.close(claimed.lock)


def test_a_pod_that_is_restarted_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    claimed = claim("a")
    pod = PodState("decode-0", "decode", "127.0.0.1:1", phase="restarting", restarts=3)
    state = ClusterState("a", os.getpid(), start_time_of(os.getpid()), phase="ready", pods=[pod])
    state.store = StoreState("redis", "", {})
    claimed.save(state)
    assert status.main(["--name", "a"]) == 1
    assert " restarting " in capsys.readouterr().out
    os.close(claimed.lock)
