"""Checkouts of Baton that are measured: this one and, to be compared with, perhaps an older one."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.harness.processes import Child

ROOT = Path(__file__).resolve().parents[2]
NOW, BEFORE = "now", "before"
_START_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Checkout:
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
    def variables(self) -> dict[str, str]:
        """Environment in which this checkout's code is the one that is imported."""
        return {"NO_COLOR": "1", "PYTHONPATH": str(self.root), "PYTHONSAFEPATH": "1"}

    def start(self, *arguments: str, **variables: str) -> Child:
        """Returns a process that runs this checkout's code, with more environment variables, until its input ends."""
        return Child(*arguments, variables=self.variables | variables, directory=self.root, ends_with_input=True)

    @contextmanager
    def cluster(
        self, scratch: Path, *options: str, config: Mapping[str, Mapping[str, object]] | None = None
    ) -> Iterator[str]:
        """A running `baton up`; yields the URL of its router. `config`: sections of its configuration file. Raises
        ChildEndedError if it does not start."""
        file = scratch / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump({section: dict(settings) for section, settings in (config or {}).items()}))
        ports = ["--port", "0", "--grpc-port", "0", "--start-timeout-s", str(_START_TIMEOUT_S)]
        command = ("-m", "cli.main", "up", *ports, "--config", str(file), *options)
        with Child(*command, variables=self.variables, directory=self.root, stderr=subprocess.STDOUT) as launcher:
            url = launcher.read_until("curl ").split()[2].removesuffix("/v1/completions")
            launcher.drain()
            yield url


HERE = Checkout(NOW, ROOT)


def sides_of(before: Checkout | None) -> list[Checkout]:
    """Returns the sides of a comparison: this checkout, and the older one if there is one."""
    return [HERE] if before is None else [HERE, before]


def checkout_of(text: str | Path) -> Checkout:
    """Returns the older checkout that an option names. Raises ArgumentTypeError."""
    root = Path(text).resolve()
    if not (root / "router" / "__main__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a checkout of Baton")
    return Checkout(BEFORE, root)
