"""Imports torch without its kernels in Python for the device "meta" until one is needed.

`import torch` imports them at once, and sympy with the first operator that has one: a second of processor time and
70 MB. Those in C++ are enough to make nearly every model. torch's compiler, and its transformations of functions, need
the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_KERNELS = "torch._meta_registrations"
_IMPORTED_WITH_THEM = frozenset({"_decomp", "_prims", "_refs"})  # of torch, which they are made of
_NEED_THEM = {"torch._dynamo", "torch.utils._content_store"} | {f"torch.{name}" for name in _IMPORTED_WITH_THEM}
_KNOWN = "2.13."  # the version of torch whose imports are known: others are left as they are


class _State:
    are_missing = False
    lock = threading.RLock()  # while they are imported, which calls operators


def import_torch() -> None:
    """Imports torch, unless it is imported, without those kernels. Raises ImportError."""
    if "torch" in sys.modules:
        return
    if not _is_known():
        importlib.import_module("torch")
        return
    sys.modules[_KERNELS] = ModuleType(_KERNELS)
    sys.meta_path.insert(0, _Finder())
    _State.are_missing = True
    import torch
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)  # noqa: SLF001  as those kernels do
    for name in _IMPORTED_WITH_THEM - vars(torch).keys():
        setattr(torch, name, _Late(f"torch.{name}"))


def on_demand(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """Calls an operator of torch, and imports the kernels first if it has none for "meta" in C++."""
    are_missing = _State.are_missing
    try:
        return function(*args, **(kwargs or {}))
    except NotImplementedError:
        if not are_missing:
            raise
        _import_kernels()
        return function(*args, **(kwargs or {}))


def _import_kernels() -> None:
    with _State.lock:
        finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
        if finder is None:  # they are there, or this thread imports them
            return
        sys.meta_path.remove(finder)
        del sys.modules[_KERNELS]
        importlib.import_module(_KERNELS)
        _State.are_missing = False


def _is_known() -> bool:
    try:
        return importlib.metadata.version("torch").startswith(_KNOWN)
    except importlib.metadata.PackageNotFoundError:
        return False


class _Late(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _import_kernels()
        return getattr(importlib.import_module(self.__name__), name)


class _Finder(MetaPathFinder):
    """Imports the kernels before what takes for granted that they are there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname not in _NEED_THEM:
            return None
        _import_kernels()
        module = sys.modules.get(fullname)
        if module is None:
            return None
        spec = ModuleSpec(fullname, _Imported(module), is_package=hasattr(module, "__path__"))
        module.__spec__ = spec  # which importlib takes, as the module is there
        return spec


class _Imported(Loader):
    """Gives back a module that was imported while it was looked for, and does not run it again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See Loader."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""
        module.__spec__ = self._spec
