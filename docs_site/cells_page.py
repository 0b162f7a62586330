"""Writes docs/parallel_tests.md and a table in docs/speculation.md from the marks `cell` of tests: `make reference`, or
this as a program.

A mark names feature, connector, degrees and fault, or proposer, connector and fault, each as a format string over the
parameters of the test, so that each case is a cell.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PARALLEL_TESTS = ROOT / "docs" / "parallel_tests.md"
_SPECULATION = ROOT / "docs" / "speculation.md"
_BEGIN, _END = "<!-- cells: begin -->\n", "<!-- cells: end -->\n"

_INTRODUCTION = """\
# What is tested on several ranks

Written by `make reference` from the tests, as pytest collects them; a test holds it to that. What is not here is not
tested.

Degrees are numbers of ranks, those of the prefill and of the decode engine as in `2 to 4`. In `2x3`, 2 ranks share the
heads in each of 3 stages. Features of a *fake* model are tested with a stand-in whose tokens depend on all of the KV;
others are compared with `transformers`, or with one rank.
"""
_COMMANDS = {"slow": "make test-slow", "matrix": "make test-matrix"}


class Cell(NamedTuple):
    """A case of a test, and what its marks say."""

    columns: dict[str, str]
    test: str  # node id, without parameters
    name: str  # of the case
    command: str


class Row(NamedTuple):
    """Cells of one test. A column that has several values has each of them with all others in the row."""

    feature: str
    fault: str
    degrees: str
    connector: str
    test: str
    command: str


class Cells:
    """A plugin of pytest: the cells of what it collects."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest."""
        for item in items:
            if marks := [mark.kwargs for mark in item.iter_markers("cell")]:
                params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
                columns = {name: text.format(**params) for mark in marks for name, text in mark.items()}
                commands = [command for mark, command in _COMMANDS.items() if item.get_closest_marker(mark)]
                test, command = item.nodeid.partition("[")[0], [*commands, "make test"][0]
                self.cells.append(Cell(columns, test, item.name, command))


def pages() -> dict[Path, str]:
    """The pages as the tests say."""
    cells = _collected()
    before, _, rest = _SPECULATION.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    proposers = _proposers([cell for cell in cells if "proposer" in cell.columns])
    return {
        _PARALLEL_TESTS: _parallel_tests([cell for cell in cells if "feature" in cell.columns]),
        _SPECULATION: f"{before}{_BEGIN}\n{proposers}\n{_END}{after}",
    }


def _parallel_tests(cells: list[Cell]) -> str:
    head = ["| feature | fault | degrees | connector | test | run by |", "|---|---|---|---|---|---|"]
    columns = {"fault": "none", "connector": ""}
    rows = [Row(**columns | cell.columns, test=cell.test, command=cell.command) for cell in cells]
    for column in ("connector", "degrees", "feature"):
        rows = _joined(rows, column)
    lines = [f"| {' | '.join([*row[:4], f'`{row.test}`', f'`{row.command}`'])} |" for row in sorted(rows)]
    return "\n".join([_INTRODUCTION, *head, *lines, ""])


def _proposers(cells: list[Cell]) -> str:
    """A column for each proposer; the names of tests in bold that `make test` runs."""
    tests: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        name = f"`{cell.name}`"
        row = tests.setdefault((cell.columns["fault"], cell.columns["connector"]), {})
        row[cell.columns["proposer"]] = f"**{name}**" if cell.command == "make test" else name
    proposers = list(dict.fromkeys(cell.columns["proposer"] for cell in cells))
    rows = [["fault", "connector", *proposers], ["---"] * (2 + len(proposers))]
    rows += [[*row, *(names.get(proposer, "") for proposer in proposers)] for row, names in tests.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _collected() -> list[Cell]:
    cells = Cells()
    modules = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cell(" in path.read_text()]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["-qq", "--collect-only", "-m", "", "-p", "no:cacheprovider", *modules], plugins=[cells])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(output.getvalue()[-4000:])
    return cells.cells


def _joined(rows: list[Row], column: str) -> list[Row]:
    """Joins rows that differ in this column only."""
    values: dict[Row, list[str]] = {}
    for row in rows:
        values.setdefault(row._replace(**{column: ""}), []).append(getattr(row, column))
    return [row._replace(**{column: ", ".join(dict.fromkeys(each))}) for row, each in values.items()]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
