"""The log of a run: a section of benchmarks/results/containers.md."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks/results/containers.md"
_HEAD = """\
# Containers

The images as the Dockerfile builds them, and clusters of them, run for real. Streams are compared token for token with
what `transformers` generates.
"""
_SECTION = "\n## "


class Record:
    """Facts and times, in the order in which they were noted."""

    def __init__(self, title: str, what: str) -> None:
        """`what` was run, and by which command; the section's first paragraph."""
        self._title = title
        self._what = what
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
        """Writes the section, if a scenario has run to its end; other sections stay."""
        if not self._images or len(self._steps) < 10:
            return
        machine = f"{platform.machine()}, {platform.system()} {platform.release().split('-')[0]}"
        parts = [f"{self._title}\n", f"{self._what} On {machine}: {'; '.join(self._programs)}.\n"]
        parts += ["| image | size | |\n|---|---|---|", *self._images, ""]
        parts += ["| connector | step | result |\n|---|---|---|", *self._steps, ""]
        _, *sections = FILE.read_text(encoding="utf-8").split(_SECTION) if FILE.exists() else [""]
        by_title = {section.partition("\n")[0]: section for section in sections}
        by_title[self._title] = "\n".join(parts)
        FILE.write_text(_SECTION.join([_HEAD, *by_title.values()]).rstrip("\n") + "\n", encoding="utf-8")
