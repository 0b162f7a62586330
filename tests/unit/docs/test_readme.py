"""The README is one screen, and each of its blocks is run by a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
TESTS = {
    "make up": "",  # needs an environment of its own; the other tests run what it runs, `baton up`
    "curl -s": "tests/e2e/test_up.py",
    "from baton import Client": "tests/e2e/test_up.py",
    "cd deploy/compose": "tests/compose/test_compose.py",
    "helm install": "tests/deploy/test_helm_page.py",
    "from baton import LLM": "tests/e2e/test_up.py",
}
"""How each block begins, and which test runs it as it stands."""


def test_every_block_is_run_by_a_test() -> None:
    blocks = re.findall(r"```\w+\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == len(TESTS)
    for block, (start, test) in zip(blocks, TESTS.items(), strict=True):
        assert block.startswith(start)
        assert "README.md" in (ROOT / test).read_text() if test else True


def test_it_is_one_screen() -> None:
    assert README.count("\n") <= 80


def test_links_name_files() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", README)
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).is_file()] == []


def test_the_quick_start_has_the_same_python() -> None:
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    for block in re.findall(r"```python\n.*?```", README, re.DOTALL):
        assert block in quickstart
