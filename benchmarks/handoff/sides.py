"""The two sides, each a checkout of Baton: its clusters, and scripts that run with its code."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from deploy.parent_death import PARENT_PID_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 60.0
_SCRIPT_TIMEOUT_S = 300
_KEPT_LINES = 30  # of a cluster's output, for the message of a failure


class ScriptError(Exception):
    """A script did not run with the code of a side; its last line says why."""


@dataclass(frozen=True, slots=True)
class Side:
    """One checkout."""

    name: str
    root: Path

    @property
    def commit(self) -> str:
        """Short hash, "+" after it if files were changed."""
        command = ["git", "-C", str(self.root), "describe", "--always", "--dirty=+", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    @property
    def env(self) -> dict[str, str]:
        """Makes this side's code the one that is imported, and ends processes with this one."""
        return {
            **os.environ,
            "NO_COLOR": "1",
            "PYTHONPATH": str(self.root),
            "PYTHONSAFEPATH": "1",
            PARENT_PID_VARIABLE: str(os.getpid()),
        }

    def has_option(self, option: str) -> bool:
        """Whether `baton up` knows it."""
        return option in _help_of_up(self).split()

    def run(self, script: str, *arguments: object) -> Any:
        """The JSON that a script of this package prints. Raises ScriptError."""
        command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
        env = {**self.env, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SCRIPT_TIMEOUT_S, check=False)
        if done.returncode:
            raise ScriptError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return json.loads(done.stdout.splitlines()[-1])

    @contextmanager
    def cluster(
        self, scratch: Path, *options: str, config: Mapping[str, Mapping[str, object]] | None = None
    ) -> Iterator[str]:
        """A running `baton up`; yields the URL of its router. `config`: sections of its configuration file."""
        file = scratch / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump({section: dict(settings) for section, settings in (config or {}).items()}))
        ports = ["--port", "0", "--grpc-port", "0", "--start-timeout-s", str(_START_TIMEOUT_S)]
        command = _orphan_proof("-m", "cli.main", "up", *ports, "--config", str(file), *options)
        launcher = subprocess.Popen(
            command, env=self.env, cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert launcher.stdout is not None
        with launcher.stdout as output, ThreadPoolExecutor(1) as reader:
            try:
                url = _wait_ready(launcher, output)
                reader.submit(deque, output, 0)  # reads on, so that the pipe never fills
                yield url
            finally:
                _stop(launcher)


def _orphan_proof(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "deploy.parent_death", sys.executable, *arguments]


@functools.cache
def _help_of_up(side: Side) -> str:
    command = _orphan_proof("-m", "cli.main", "up", "--help")
    return subprocess.run(command, env=side.env, cwd=side.root, capture_output=True, text=True, check=True).stdout


def _wait_ready(launcher: subprocess.Popen[str], output: IO[str]) -> str:
    """Reads until the line with the example request; the URL in it."""
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    for line in output:
        lines.append(line)
        if line.strip().startswith("curl "):
            return line.split()[2].removesuffix("/v1/completions")
    raise SystemExit(f"a cluster did not start: exit code {launcher.wait()}\n{''.join(lines)}")


def _stop(launcher: subprocess.Popen[str]) -> None:
    launcher.terminate()
    try:
        launcher.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        launcher.kill()  # its children die with it
        launcher.wait()


def in_turn(sides: Sequence[Side], turn: int) -> Sequence[Side]:
    """The sides, in another order every second time."""
    return sides if turn % 2 == 0 else sides[::-1]
