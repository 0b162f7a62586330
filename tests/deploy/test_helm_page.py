"""README.md and docs/helm.md show what works: their commands are rendered as written, their tables are complete."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NamedTuple

import helm_python
import pytest
import yaml

from cli.main import COMMANDS
from tests.deploy.chart import ROOT, chart, render
from tests.deploy.kubernetes_schemas import VERSIONS, validate
from tests.deploy.promql import rules
from tests.deploy.values import EVERYTHING, values_of
from tests.deploy.values_page import PAGE, page

TEXTS = {"README.md": (ROOT / "README.md").read_text(), "docs/helm.md": PAGE.read_text()}


class Install(NamedTuple):
    """One `helm install` or `helm upgrade` of a page."""

    page: str
    line: str


def lines(text: str) -> list[str]:
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    return blocks.replace("\\\n", " ").splitlines()


def files(text: str) -> dict[str, Any]:
    """The YAML files of a page, by the name in their first line."""
    blocks = re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, re.DOTALL)
    return {name: yaml.safe_load(content) for name, content in blocks}


INSTALLS = [Install(name, line) for name, text in TEXTS.items() for line in lines(text) if line.startswith("helm ")]


def merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: merged(below.get(key), value) for key, value in above.items()}
    return above


@pytest.mark.parametrize("install", INSTALLS, ids=lambda install: install.line)
def test_what_an_install_renders(install: Install) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("install", "upgrade"))
    parser.add_argument("name")
    parser.add_argument("chart")
    parser.add_argument("--namespace")
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--values", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args(shlex.split(install.line, comments=True)[1:])
    assert (ROOT / args.chart / "Chart.yaml").is_file()
    values: Any = {}
    for file in args.values:
        values = merged(values, files(TEXTS[install.page])[file])
    for text in args.set:
        values = merged(values, helm_python.parse_set_string_values(text))
    for manifest in render(values, name=args.name).manifests:
        validate(manifest, VERSIONS[-1])


def test_installs_are_found() -> None:
    assert {install.page for install in INSTALLS} == set(TEXTS)
    assert len(INSTALLS) >= 6


def test_every_file_of_the_page_is_used() -> None:
    used = set(re.findall(r"--(?:values|from-file=)[ =]?(\S+)", "\n".join(lines(TEXTS["docs/helm.md"]))))
    assert set(files(TEXTS["docs/helm.md"])) <= used


def test_other_commands() -> None:
    for text in TEXTS.values():
        for line in lines(text):
            if line.startswith("baton "):
                assert line.split()[1] in COMMANDS


def test_the_table_of_values_is_generated() -> None:
    text = TEXTS["docs/helm.md"]
    assert page(text) == text, "run make chart"
    assert len(re.findall(r"^\| `", text, re.MULTILINE)) > 100


def test_the_alerts_are_listed() -> None:
    alerts = {rule["alert"] for rule in rules(render(values_of(EVERYTHING)))}
    assert set(re.findall(r"`(Baton\w+)`", TEXTS["docs/helm.md"])) == alerts


def test_values_in_the_text_exist() -> None:
    known = chart().values
    for path in re.findall(r"`((?:[a-z]\w+\.)+[A-Za-z]\w*)(?:: [^`]*)?`", TEXTS["docs/helm.md"]):
        first, *rest = path.split(".")
        node = known.get(first, {})
        for name in rest if node else ():
            assert name in node, path
            node = node[name]
