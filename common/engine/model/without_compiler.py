"""Loads transformers without torch's compiler, in processes that compile no model with it.

transformers' modelling code marks functions for `torch.compile` with decorators of `torch._dynamo`, and imports
`torch.distributed.tensor` where torch has it. These import a thousand modules, Triton among them: a second of processor
time and 110 MB of memory, and an engine uses none of it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from common.engine.meta_kernels import import_torch
from common.engine.model.known_imports import know_imports
from common.imports import kept_imports

_COMPILER = "torch._dynamo"
_MARKS = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
_INDEXING = f"{_COMPILER}._trace_wrapped_higher_order_op"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Within, `torch._dynamo` is a stand-in whose decorators do nothing. It makes room for the real one as soon as
    anything else of it is asked for, and at the end."""
    if _COMPILER in sys.modules:
        yield
        return
    know_imports()
    stand_in, indexing = _StandIn(_COMPILER), _StandIn(_INDEXING)
    vars(stand_in).update(dict.fromkeys(_MARKS, _unmarked))
    vars(indexing)["TransformGetItemToIndex"] = _TransformGetItemToIndex
    sys.modules.update({_COMPILER: stand_in, _INDEXING: indexing})
    try:
        with contextlib.suppress(ImportError):  # a missing package is reported where it is used
            _assume_one_process()
        yield
    finally:
        _remove_stand_ins()


class _StandIn(ModuleType):
    """Gives way to the real module when another attribute or a submodule is asked for."""

    def __getattr__(self, name: str) -> Any:
        is_of_package = name == "__path__" and self.__name__ == _COMPILER  # a submodule is being imported
        if name.startswith("__") and not is_of_package:
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


class _TransformGetItemToIndex:
    """The context manager of this name, which transformers' masks import and few of them enter."""

    def __new__(cls) -> Any:
        _remove_stand_ins()
        return importlib.import_module(_INDEXING).TransformGetItemToIndex()


def _unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    return function if function is not None else lambda marked: marked


def _remove_stand_ins() -> None:
    for name in (_COMPILER, _INDEXING):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(vars(torch).get("_dynamo"), _StandIn):
        del vars(torch)["_dynamo"]


def _assume_one_process() -> None:
    """Has transformers note, as it does at its first look, that torch comes without `torch.distributed`."""
    with kept_imports():
        import_torch()
        import torch
        from transformers.utils import is_torch_distributed_available

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = is_available
