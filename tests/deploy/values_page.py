"""Writes the table of values in docs/helm.md from the comments in values.yaml: python -m tests.deploy.values_page"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.deploy.chart import CHART, ROOT

PAGE = ROOT / "docs" / "helm.md"
_BEGIN, _END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):(?: +(?P<value>.*))?$")
_WORKLOADS = ("router", "prefill", "decode")


class Value(NamedTuple):
    """One value: its path, its default as written, and the comment above it."""

    path: str
    default: str
    comment: str


def values() -> list[Value]:
    """All values of values.yaml that are no mappings of others."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    found: list[Value] = []
    parents: list[str] = []
    comment: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.lstrip().startswith("#"):
            comment.append(line.strip(" #"))
            continue
        if match := _KEY.match(line):
            depth = len(match["indent"]) // 2
            parents[depth:] = [match["key"]]
            default = match["value"]
            if default is None and following.lstrip().startswith("- "):
                default = "see values.yaml"
            if default is not None:
                found.append(Value(".".join(parents), default, " ".join(comment)))
        comment = []
    return found


def table() -> str:
    """One row for each value; workloads that have one in common share a row."""
    rows: dict[tuple[str, str], list[Value]] = {}
    for value in values():
        component, _, rest = value.path.partition(".")
        key = (rest, value.default) if component in _WORKLOADS else (value.path, "")
        if key in rows and value.comment not in ("", rows[key][0].comment):
            key = (value.path, "")
        rows.setdefault(key, []).append(value)
    text = "| value | default | |\n|---|---|---|\n"
    for row in rows.values():
        names = ", ".join(f"`{value.path}`" for value in row)
        text += f"| {names} | `{row[0].default}` | {row[0].comment} |\n"
    return text


def page(text: str) -> str:
    """The page with the current table."""
    before, _, rest = text.partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
