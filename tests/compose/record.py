"""The log of a run: benchmarks/results/containers.md."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks/results/containers.md"
_HEAD = """\
# Containers

Written by `make test-compose`: the images as the Dockerfile builds them, and the cluster of deploy/compose with each
profile, run by Docker for real. Streams are compared token for token with what `transformers` generates.
"""


class Record:
    """Facts and times, in the order in which they were noted."""

    def __init__(self) -> None:
        self._images: list[str] = []
        self._steps: list[str] = []
        self._programs: list[str] = []

    def program(self, line: str) -> None:
        """A program and its version."""
        if line not in self._programs:
            self._programs.append(line)

    def image(self, name: str, megabytes: float, note: str) -> None:
        """An image and its size."""
        self._images.append(f"| `{name}` | {megabytes:.0f} MB | {note} |")

    def step(self, where: str, what: str, result: str) -> None:
        """One step of a scenario."""
        self._steps.append(f"| {where} | {what} | {result} |")

    @contextlib.contextmanager
    def timed(self, what: str, where: str = "build") -> Iterator[None]:
        """Notes how long the body took."""
        started = time.monotonic()
        yield
        self.step(where, what, f"{time.monotonic() - started:.1f} s")

    def write(self) -> None:
        """Writes the file, if a scenario has run to its end."""
        if not self._images or len(self._steps) < 10:
            return
        machine = f"{platform.machine()}, {platform.system()} {platform.release().split('-')[0]}"
        parts = [_HEAD, f"On {machine}: {'; '.join(self._programs)}.\n"]
        parts += ["## Images\n", "| image | size | |\n|---|---|---|", *self._images, ""]
        parts += ["## Runs\n", "| profile | step | result |\n|---|---|---|", *self._steps]
        FILE.write_text("\n".join(parts) + "\n", encoding="utf-8")
