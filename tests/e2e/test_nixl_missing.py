"""`baton up --connector nixl` on a machine without NIXL: one line says what to install, and nothing is left running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import ROOT

UP = ["up", "--port", "0", "--grpc-port", "0", "--connector", "nixl"]
NOT_INSTALLED = "import runpy, sys; sys.modules['nixl'] = None; runpy.run_module('cli.main', run_name='__main__')"
BROKEN = "raise ImportError('libucp.so.0: cannot open shared object file')\n"
DEADLINE_S = 150.0


def up(*python_options: str, path: str = "") -> str:
    """The only line on stderr."""
    command = [sys.executable, *python_options, *UP]
    env = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_not_installed() -> None:
    line = up("-c", NOT_INSTALLED)
    assert line.startswith("baton: error: --connector: nixl needs")  # and no pod's name: none was started
    assert "baton-llm[nixl]" in line


def test_installed_but_broken(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(BROKEN)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    line = up("-m", "cli.main", path=str(tmp_path))
    assert "--connector: nixl needs" in line
    assert "baton-llm[nixl]" in line
    assert "libucp.so.0" in line
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_a_pod_of_its_own_says_so_too(role: str, tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(BROKEN)
    command = [sys.executable, "-m", "cli.main", "serve", role, "--connector", "nixl", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 2, result.stderr
    assert "baton-llm[nixl]" in result.stderr.splitlines()[-1]
