"""Extras of the distribution install what the processes import that they are for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest

IMPORT = """
import importlib, json, sys
missing = frozenset(json.load(sys.stdin))
class Without:
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, *args):
        return None if name.partition(".")[0] in missing else self._finder.find_spec(name, *args)
sys.meta_path[:] = map(Without, sys.meta_path)
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_with(extra: str) -> set[str]:
    """Names of the distributions that `pip install baton-llm[extra]` installs, as far as they are here."""
    found: set[tuple[str, frozenset[str]]] = set()
    missing = [("baton-llm", frozenset({extra}))]
    while missing:
        name, extras = missing.pop()
        if (name, extras) in found:
            continue
        found.add((name, extras))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # it is for other platforms
            continue
        for line in lines:
            required = re.match(r"([\w.-]+)\s*(?:\[([^]]*)\])?", line)
            of_extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", line)
            assert required
            if of_extra is None or of_extra[1] in extras:
                wanted = re.split(r"\s*,\s*", required[2]) if required[2] else []
                missing.append((normal(required[1]), frozenset(wanted)))
    return {name for name, _ in found}


ENGINE = ("common.engine.core_proc", "common.engine.worker.worker", "common.engine.executor.multiproc.worker_process")


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("engine", ("prefill_service.__main__", *ENGINE)),
        ("engine", ("decode_service.__main__", *ENGINE)),
        ("router", ("router.__main__",)),
    ],
    ids=["prefill", "decode", "router"],
)
def test_a_process_imports_with_its_extra_alone(extra: str, modules: tuple[str, ...]) -> None:
    installed = installed_with(extra)
    own = {"baton-llm"}
    missing = [
        module
        for module, distributions in packages_distributions().items()
        if not (installed | own) & set(map(normal, distributions))
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *modules],
        input=json.dumps(missing),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
