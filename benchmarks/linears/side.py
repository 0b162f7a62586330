"""One checkout's linear layers: times layers as told, one line of JSON each.

Run as a script with that checkout's code, of which it needs `common` only, and the number of threads.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from common.engine.config import ModelConfig
from common.engine.devices.operators import Operators, PerToken
from common.engine.devices.registry import DEVICES
from common.engine.quantization.dynamic_int8 import DynamicInt8Linear
from common.engine.quantization.grouped import PER_WORD, GroupedLinear
from common.engine.quantization.int8 import Int8Linear

TORCH = "torch"  # in place of a kind of weights: weights of the activations' type, by torch's operator
_COLD_BYTES = 64 << 20  # of copies of a layer, in turn, as a step finds weights in memory and not in a cache
_MAX_COPIES = 32
_LEAST_S = 0.02  # of calls that are timed together


@dataclass(frozen=True, slots=True)
class Load:
    """A layer and how often it is called."""

    weights: str
    dtype: str  # of activations
    in_features: int
    out_features: int
    num_rows: int


def _dense(load: Load, make: Callable[[nn.Linear], Any]) -> Any:
    linear = nn.Linear(load.in_features, load.out_features, bias=False, dtype=getattr(torch, load.dtype))
    nn.init.normal_(linear.weight, std=0.02)
    return make(linear)


def _grouped(load: Load, codes: torch.Tensor, group: int, *, has_shift: bool) -> GroupedLinear:
    size = load.in_features // group, load.out_features
    shift = torch.randn(size) if has_shift else None
    return GroupedLinear(codes, torch.rand(size), shift, None, getattr(torch, load.dtype))


def _four_bits(load: Load) -> GroupedLinear:
    words = torch.randint(-(1 << 31), 1 << 31, (load.in_features // PER_WORD, load.out_features))
    return _grouped(load, words.to(torch.int32), 128, has_shift=True)


def _eight_bits(load: Load) -> GroupedLinear:
    codes = torch.randint(-127, 128, (load.in_features, load.out_features), dtype=torch.int8)
    return _grouped(load, codes, 32, has_shift=False)


def _float8(load: Load) -> GroupedLinear:
    codes = torch.randn(load.in_features, load.out_features).to(torch.float8_e4m3fn)
    return _grouped(load, codes, 128, has_shift=False)


WEIGHTS: dict[str, Callable[[Load], Any]] = {
    "none": lambda load: _dense(load, lambda linear: linear),
    "int8": lambda load: _dense(load, Int8Linear.of),
    "int8-dynamic": lambda load: _dense(load, DynamicInt8Linear.of),
    "4 bits, groups of 128, shifts": _four_bits,
    "8 bits, groups of 32": _eight_bits,
    "float8, groups of 128": _float8,
}


class _Layers:
    """The layers that were asked for so far."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._copies: dict[Load, Iterator[PerToken]] = {}

    def seconds(self, load: Load) -> float:
        """The time of a call, the mean of some."""
        one_row = replace(load, num_rows=1)
        if one_row not in self._copies:
            self._copies[one_row] = itertools.cycle(self._make(load))
        layers = self._copies[one_row]
        rows = torch.randn(load.num_rows, load.in_features).to(getattr(torch, load.dtype))
        next(layers)(rows)
        began = time.perf_counter()
        for count in itertools.count(1):
            next(layers)(rows)
            if (seconds := time.perf_counter() - began) > _LEAST_S:
                return seconds / count
        raise AssertionError

    def _make(self, load: Load) -> list[PerToken]:
        make = WEIGHTS["none" if load.weights == TORCH else load.weights]
        first = make(load)
        num_bytes = sum(each.nbytes for each in itertools.chain(first.parameters(), first.buffers()))
        copies = [first, *(make(load) for _ in range(min(_COLD_BYTES // num_bytes, _MAX_COPIES) - 1))]
        return copies if load.weights == TORCH else [self._operators.linear(copy) for copy in copies]


def main() -> None:
    """Answers each load with its seconds until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    operators = DEVICES.find("cpu")(ModelConfig(num_threads=int(sys.argv[1])), 0).operators()
    assert operators is not None
    layers = _Layers(operators)
    with torch.inference_mode():
        for line in sys.stdin:
            (order,) = json.loads(line)
            print(json.dumps(layers.seconds(Load(**order))), file=answers)


if __name__ == "__main__":
    main()
