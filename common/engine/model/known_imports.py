"""Spares transformers its look through the files of all its models.

Each import of transformers reads the 1,600 files of its models, twice, for the names that they define, which takes most
of a second. The names depend on its version alone, and are kept for the next process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from common.engine.cache_directory import cached

_MODULE = "transformers.utils.import_utils"
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # where files are those of a version
_KIND = "imports"

Structure = dict[frozenset[str], dict[str, set[str]]]
"""Names that modules define, by the packages that they need and by module."""


def know_imports() -> None:
    """Has transformers use what an earlier process has found, unless it is imported already."""
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module that looks through the files, once, and changes it when it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            if (define := getattr(module, "define_import_structure", None)) is not None:
                vars(module)["define_import_structure"] = _keeping(define)

        vars(spec.loader)["exec_module"] = run_and_change
        return spec


def _keeping(define: Callable[..., Structure]) -> Callable[..., Structure]:
    def known(module_path: str | Path, prefix: str | None = None) -> Structure:
        path = Path(module_path)
        directory = path.parent if path.suffix else path
        if directory.name != "models" or not _INSTALLED.intersection(directory.parts):
            return define(module_path, prefix)
        parts = [importlib.metadata.version("transformers"), str(directory), str(directory.stat().st_mtime_ns)]
        try:
            found = _decoded(cached(_KIND, parts, lambda: _encoded(define(str(directory)))))
        except (TypeError, msgspec.ValidationError):  # a version that describes it in another way
            return define(module_path, prefix)
        if prefix is None:
            return found
        return {
            needs: {f"{prefix}.{module}": names for module, names in modules.items()}
            for needs, modules in found.items()
        }

    return known


def _encoded(structure: Structure) -> bytes:
    return msgspec.json.encode([(sorted(needs), modules) for needs, modules in structure.items()])


def _decoded(content: bytes) -> Structure:
    pairs: Any = msgspec.json.decode(content, type=list[tuple[frozenset[str], dict[str, set[str]]]])
    return dict(pairs)
