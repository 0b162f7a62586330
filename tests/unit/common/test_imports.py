from __future__ import annotations

import gc
from pathlib import Path

import pytest

from cli.extras import import_with_extra
from common.engine.launch import load_executor_factory
from common.imports import collection_paused


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that notes whether the collector runs as it is imported."""
    (tmp_path / "notes_the_collector.py").write_text(
        "import gc\n\ndef collects(enabled=gc.isenabled()): return enabled\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "notes_the_collector", raising=False)
    return "notes_the_collector"


def test_the_engine_is_imported_without_collections(package: str) -> None:
    factory = load_executor_factory(f"{package}:collects")
    assert factory() is False  # type: ignore[call-arg, comparison-overlap]
    assert gc.isenabled()


def test_the_module_of_a_command_is_imported_without_collections(package: str) -> None:
    assert import_with_extra(package, "x", "all").collects() is False
    assert gc.isenabled()


def test_collections_go_on_after_a_failed_import() -> None:
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
