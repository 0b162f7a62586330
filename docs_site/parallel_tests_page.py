"""Writes docs/parallel_tests.md from the marks `cell` of tests: `make reference`, or this as a program.

A mark names feature, connector, degrees and fault, each as a format string over the parameters of the test, so that
each case is a cell.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parallel_tests.md"

_INTRODUCTION = """\
# What is tested on several ranks

Written by `make reference` from the tests, as pytest collects them; a test holds it to that. What is not here is not
tested.

Degrees are numbers of ranks, those of the prefill and of the decode engine as in `2 to 4`. In `2x3`, 2 ranks share the
heads in each of 3 stages. Features of a *fake* model are tested with a stand-in whose tokens depend on all of the KV;
others are compared with `transformers`, or with one rank.
"""
_COMMANDS = {"slow": "make test-slow", "matrix": "make test-matrix"}


class Row(NamedTuple):
    """Cells of one test. A column that has several values has each of them with all others in the row."""

    feature: str
    fault: str
    degrees: str
    connector: str
    test: str
    command: str


class Cells:
    """A plugin of pytest: the rows of what it collects."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest."""
        for item in items:
            if marks := [mark.kwargs for mark in item.iter_markers("cell")]:
                params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
                columns = {name: text.format(**params) for mark in marks for name, text in mark.items()}
                commands = [command for mark, command in _COMMANDS.items() if item.get_closest_marker(mark)]
                test, command = item.nodeid.partition("[")[0], [*commands, "make test"][0]
                self.rows.append(Row(**{"fault": "none", "connector": "", **columns}, test=test, command=command))


def page() -> str:
    """The whole page."""
    head = ["| feature | fault | degrees | connector | test | run by |", "|---|---|---|---|---|---|"]
    rows = _collected()
    for column in ("connector", "degrees", "feature"):
        rows = _joined(rows, column)
    lines = [f"| {' | '.join([*row[:4], f'`{row.test}`', f'`{row.command}`'])} |" for row in sorted(rows)]
    return "\n".join([_INTRODUCTION, *head, *lines, ""])


def _collected() -> list[Row]:
    cells = Cells()
    modules = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cell(" in path.read_text()]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["-qq", "--collect-only", "-m", "", "-p", "no:cacheprovider", *modules], plugins=[cells])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(output.getvalue()[-4000:])
    return cells.rows


def _joined(rows: list[Row], column: str) -> list[Row]:
    """Joins rows that differ in this column only."""
    values: dict[Row, list[str]] = {}
    for row in rows:
        values.setdefault(row._replace(**{column: ""}), []).append(getattr(row, column))
    return [row._replace(**{column: ", ".join(dict.fromkeys(each))}) for row, each in values.items()]


if __name__ == "__main__":
    PAGE.write_text(page())
