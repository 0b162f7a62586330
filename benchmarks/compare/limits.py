"""Measures the machine's limits: how fast it reads memory, and multiplies matrices."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.compare.checkpoints import MULTIPLIED, Precision
from common.engine.devices.cpu.packed_linear import PackedLinear

ON_GPU = torch.cuda.is_available()
_READ_BYTES = (4 << 30) if ON_GPU else (512 << 20)
_GEMM_SIZE = 8192 if ON_GPU else 2048
_GEMM_ROWS = 8192 if ON_GPU else 256
_REPEATS = 9


class Limits(NamedTuple):
    """The limits of the machine, for one type of numbers."""

    dtype: str  # that is multiplied
    read_bytes_per_s: float
    flops_per_s: float  # of packed linear layers


class Work(NamedTuple):
    """The numbers that a model must read and multiply."""

    vocab_size: int
    weight_bytes: int  # of a decode step, whatever its batch
    kv_bytes: int  # of a token in the cache
    layer_weights: int  # numbers of the layers' linear layers
    head_weights: int
    attention_flops: int  # of one query token, for each token that it attends to

    def decode_s(self, limits: Limits, batch: int, context: int) -> float:
        """The shortest time of a step: reading weights and KV, or multiplying."""
        read_s = (self.weight_bytes + batch * context * self.kv_bytes) / limits.read_bytes_per_s
        flops = batch * (2 * (self.layer_weights + self.head_weights) + context * self.attention_flops)
        return max(read_s, flops / limits.flops_per_s)

    def prefill_s(self, limits: Limits, num_tokens: int) -> float:
        """The shortest time of a prompt."""
        attended = num_tokens * (num_tokens + 1) // 2
        flops = 2 * (num_tokens * self.layer_weights + self.head_weights) + attended * self.attention_flops
        return max(flops / limits.flops_per_s, self.weight_bytes / limits.read_bytes_per_s)


def measure_limits(dtype: str) -> Limits:
    """Medians on this machine. Without instructions for bfloat16, its products are at best those of float32."""
    multiplied = dtype if ON_GPU or dtype == MULTIPLIED else "float32"
    device = "cuda" if ON_GPU else "cpu"
    numbers = torch.ones(_READ_BYTES // 4, device=device)
    linear = nn.Linear(_GEMM_SIZE, _GEMM_SIZE, bias=False, dtype=getattr(torch, multiplied), device=device)
    multiply = linear if ON_GPU else PackedLinear(linear)
    inputs = torch.randn(_GEMM_ROWS, _GEMM_SIZE, device=device).to(linear.weight.dtype)
    with torch.inference_mode():
        read_s = _seconds(lambda: numbers.sum())
        multiply_s = _seconds(lambda: multiply(inputs))
    return Limits(multiplied, _READ_BYTES / read_s, 2 * _GEMM_ROWS * _GEMM_SIZE**2 / multiply_s)


def work_of(directory: Path, precision: Precision) -> Work:
    """Returns the work of a model of the Llama kind, from its config.json."""
    config = json.loads((directory / "config.json").read_text())
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    layer_weights = layers * hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    head_weights = config["vocab_size"] * hidden
    return Work(
        vocab_size=config["vocab_size"],
        weight_bytes=round((layer_weights + head_weights) * precision.weight_size),
        kv_bytes=2 * layers * keys * precision.dtype_size,
        layer_weights=layer_weights,
        head_weights=head_weights,
        attention_flops=4 * layers * queries,
    )


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    seconds = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        run()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first sets things up
