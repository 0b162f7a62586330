"""Processes import what is large without garbage collections."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from common.engine.client.mp import AsyncMPClient
from common.engine.config import EngineConfig, ParallelConfig
from common.errors import ConfigError
from common.imports import kept_imports

ROOT = Path(__file__).resolve().parents[3]
NOTES = """\
import gc

COLLECTS = gc.isenabled()


def main(_):
    print(COLLECTS, gc.isenabled(), gc.get_freeze_count() > 0)
"""

EXECUTOR = """\
import gc

from common.errors import ConfigError

COLLECTS = gc.isenabled()


def create(_):
    raise ConfigError(f"collects: {COLLECTS}, later: {gc.isenabled()}")
"""


def test_a_role_is_imported_without_collections_and_exempt_from_later_ones(tmp_path: Path) -> None:
    (tmp_path / "notes_the_collector.py").write_text(NOTES)
    program = (
        "from cli import serve; serve.ROLES['router'] = 'notes_the_collector'; serve.die_with_parent = lambda: None; "
        "serve.main(['router'])"
    )
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    printed = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert printed.stdout == "False True True\n", printed.stderr


async def test_an_engine_is_imported_without_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_executor.py").write_text(EXECUTOR)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    client = AsyncMPClient(EngineConfig(parallel=ParallelConfig(executor="an_executor:create")))
    with pytest.raises(ConfigError, match="collects: False, later: True"):
        await client.start()
    await client.close()


def test_collections_go_on_after_a_failed_import() -> None:
    def fail() -> None:
        with kept_imports():
            assert not gc.isenabled()
            raise ImportError

    try:
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled()
    finally:
        gc.unfreeze()
