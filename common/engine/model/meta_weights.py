"""Models without weights, on the device "meta", which has shapes and no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_"})  # of Tensor, and of torch.nn.init


class WithoutMetaOperators(TorchFunctionMode):
    """Within, hardly anything is computed on "meta": torch imports sympy for the first such operator, which takes half
    a second and 45 MB. Weights are not drawn at random there, and ranges, of which rotary frequencies are made, are on
    the host. Code that joins these with other tensors on "meta" raises RuntimeError."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See TorchFunctionMode."""
        kwargs = kwargs or {}
        if func.__name__ in _DRAWS:
            tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if func is torch.arange:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)
