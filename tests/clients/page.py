"""docs/clients.md, which a run of all clients writes: what was run, with which versions, and what it printed."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from tests.e2e.cluster import ROOT

PAGE = ROOT / "docs" / "clients.md"
TITLES = (
    "openai",
    "openai, asynchronous",
    "anthropic",
    "LangChain",
    "vllm bench serve",
    "vllm bench serve, chats",
    "guidellm",
    "aiperf",
    "lm-eval",
    "schemathesis",
)
_INTRODUCTION = """\
# Clients

Written by `make clients`, which installs each client in an environment of its own (`tests/clients/requirements`), runs
it against `baton up` with the demo model, and fails if there is a single error. Client and cluster shared two cores
of a CPU: the times say that there are times, not how fast Baton is.
"""


@dataclass(frozen=True)
class Section:
    """What the page tells of one client."""

    versions: tuple[str, ...]  # "package version"
    language: str  # of `source`
    source: str  # the command, or the program
    output: str

    def render(self, title: str) -> str:
        """As Markdown."""
        return (
            f"## {title}\n\nVersions: {', '.join(self.versions)}\n\n```{self.language}\n{self.source.strip()}\n```\n\n"
            f"```text\n{self.output}\n```\n"
        )


class Page:
    """Collects the sections of a run."""

    def __init__(self) -> None:
        self._sections: dict[str, Section] = {}
        self._skipped: dict[str, str] = {}

    def add(self, title: str, section: Section) -> None:
        """Takes what a client did."""
        assert title in TITLES
        self._sections[title] = section

    def skip(self, title: str, reason: str) -> None:
        """Notes why a client did not run."""
        self._skipped[title] = reason

    def write(self) -> None:
        """Writes the page, if all clients ran or were skipped."""
        if {*self._sections, *self._skipped} != set(TITLES):
            return
        parts = [_INTRODUCTION]
        for title in TITLES:
            if section := self._sections.get(title):
                parts.append(section.render(title))
            else:
                parts.append(f"## {title}\n\nDid not run here: {self._skipped[title]}\n")
        PAGE.write_text("\n".join(parts))


def tidied(output: str, names: dict[str, str]) -> str:
    """Output for the page: with `names` for what differs from run to run, and without trailing blanks."""
    for found, name in names.items():
        output = output.replace(found, name)
    lines = [line.rstrip() for line in textwrap.dedent(output).splitlines()]
    return "\n".join(lines).strip("\n")


def between(output: str, first: str, last: str) -> str:
    """The lines from the first in which the expression `first` is found up to the next one with `last`, inclusive."""
    lines = [line.rstrip() for line in output.splitlines()]
    start = next(number for number, line in enumerate(lines) if re.search(first, line))
    end = next(number for number, line in enumerate(lines) if number > start and re.search(last, line))
    return "\n".join(lines[start : end + 1])


def shell_lines(command: list[str]) -> str:
    """A command as one would write it in a shell, an option per line."""
    lines = [""]
    for word in command:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return " \\\n  ".join(lines)
