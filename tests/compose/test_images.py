"""The images: size, user, a read-only root, versions, signals."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from common import __version__
from tests.compose.engine import Engine
from tests.compose.images import CPU, ROOT, ROUTER
from tests.compose.record import Record
from tests.compose.traffic import wait

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

MAX_ROUTER_BYTES = 400e6
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
_UNPINNED = {"baton-llm", "pip"}


@pytest.mark.parametrize("image", [ROUTER, CPU])
def test_an_image_runs_as_a_user_with_a_read_only_root(engine: Engine, record: Record, image: str) -> None:
    described = json.loads(engine.client("inspect", image))[0]
    record.image(image, described["Size"] / 1e6, f"user {described['Config']['User']}, base included")
    assert described["Config"]["User"] == "10001:10001"
    assert described["Config"]["Healthcheck"]["Test"] == ["CMD", "baton", "health", "--service", "liveness"]
    assert described["Config"]["Labels"]["org.opencontainers.image.version"] == __version__
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", described["Config"]["Labels"]["org.opencontainers.image.revision"])
    assert engine.client("run", "--rm", *HARDENED, image, "--version").strip() == f"baton {__version__}"
    doctor = engine.client("run", "--rm", *HARDENED, "--shm-size", "1g", image, "doctor", "--json")
    findings = {check["name"]: check for check in json.loads(doctor)["checks"]}
    assert findings["packages"]["detail"].startswith("for routers" if image == ROUTER else "for pods")
    if image == CPU:
        assert "UCX moves blocks over" in findings["nixl"]["detail"]


def test_the_router_is_small_and_has_no_torch(engine: Engine) -> None:
    assert int(engine.client("inspect", "--format", "{{.Size}}", ROUTER)) < MAX_ROUTER_BYTES
    assert "torch is not installed" in engine.client("run", "--rm", ROUTER, "doctor")


@pytest.mark.parametrize("image", [ROUTER, CPU])
def test_versions_are_those_of_the_constraints(engine: Engine, image: str) -> None:
    script = "import importlib.metadata as m; print('\\n'.join(f'{d.name}=={d.version}' for d in m.distributions()))"
    listed = engine.client("run", "--rm", "--entrypoint", "/opt/baton/bin/python", image, "-c", script)
    installed = dict(line.split("==") for line in listed.split())
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    pinned = {_normal(name): version for name, version in pinned.items()}
    for name, version in installed.items():
        if name not in _UNPINNED:
            assert version.partition("+")[0] == pinned.get(_normal(name)), f"{name} {version} is not pinned"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(("image", "role"), [(ROUTER, "router"), (CPU, "decode")])
def test_sigterm_ends_the_first_process_even_before_it_serves(engine: Engine, image: str, role: str) -> None:
    ports = ["--port", "8000"] if role == "router" else ["--port", "8100", "--connector", "none"]
    command = ["serve", role, "--host", "0.0.0.0", *ports, *(["--decode", "127.0.0.1:1"] if role == "router" else [])]
    container = engine.client("run", "--detach", *HARDENED, image, *command).strip()
    try:
        pid = int(engine.client("inspect", "--format", "{{.State.Pid}}", container))
        wait(lambda: handles_sigterm(pid), "the process handles SIGTERM")
        started = time.monotonic()
        engine.client("stop", "--time", "30", container)
        assert time.monotonic() - started < 25
        assert engine.client("inspect", "--format", "{{.State.ExitCode}}", container).strip() in ("0", "143")
    finally:
        engine.client("rm", "--force", container)


def handles_sigterm(pid: int) -> bool:
    """Whether the process has a handler: to the first one of a container, the kernel delivers no signal without."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
