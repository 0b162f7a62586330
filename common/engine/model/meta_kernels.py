"""Imports torch without its kernels in Python for the device "meta" until one is needed.

torch imports them in any case, and sympy with the first operator that has one: a second of processor time and 70 MB.
Those in C++ are enough to make nearly every model; torch.compile needs the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_KERNELS = "torch._meta_registrations"
_NEED_THEM = frozenset({"torch._decomp", "torch._dynamo", "torch._prims", "torch._refs", "torch.utils._content_store"})
_LATEST = (2, 13)  # of torch's versions, whose imports are known: newer ones are left as they are


def import_torch() -> None:
    """Imports torch, unless it is imported, without those kernels. Raises ImportError."""
    if "torch" not in sys.modules and _is_known():
        sys.modules[_KERNELS] = ModuleType(_KERNELS)
        sys.meta_path.insert(0, _Finder())
    import torch

    bind = getattr(torch._C, "_set_generator_metaclass", None)  # noqa: SLF001  which those kernels call
    if bind is not None and _are_missing():
        from torch._opaque_base import OpaqueBaseMeta

        bind(OpaqueBaseMeta)


def import_meta_kernels() -> bool:
    """Imports the kernels. False if they are there."""
    if not _are_missing():
        return False
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]
    del sys.modules[_KERNELS]
    importlib.import_module(_KERNELS)
    return True


def _are_missing() -> bool:
    return any(isinstance(each, _Finder) for each in sys.meta_path)


def _is_known() -> bool:
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        return (int(major), int(minor)) <= _LATEST
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


class _Finder(MetaPathFinder):
    """Imports the kernels before what takes for granted that they are there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname in _NEED_THEM:
            import_meta_kernels()
        return None
