"""Models without weights, on the device "meta", which has shapes and no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from common.engine.meta_kernels import on_demand


class MetaKernelsOnDemand(TorchFunctionMode):
    """Within, operators that have no kernel for "meta" in C++ find the one in Python."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See TorchFunctionMode."""
        return on_demand(func, args, kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within, tensors are made on "meta", unless that is said."""
    with MetaKernelsOnDemand(), torch.device("meta"):
        yield
