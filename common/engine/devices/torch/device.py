"""Torch's operators over the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from common.cores import num_usable_cores
from common.engine.config import Kernels, ModelConfig
from common.engine.devices.adapters import AdapterBatch, LayerAdapters
from common.engine.devices.attention import AttentionArgs, AttentionBackend, KVSpec
from common.engine.devices.base import Device, Memory, RowSampler, StepSampler
from common.engine.devices.decode_inputs import DecodeLimits, Forward, RecordedDecodes
from common.engine.devices.host_memory import HostMemory
from common.engine.devices.operators import Operators
from common.engine.devices.ranks import Ranks
from common.engine.devices.recurrences import Recurrences
from common.engine.devices.torch.adapters import TorchLayerAdapters
from common.engine.devices.torch.attention import TorchAttention
from common.engine.devices.torch.attention_check import check_attention
from common.engine.devices.torch.latent_attention import TorchLatentAttention
from common.engine.quantization.base import QuantizedLinear
from common.errors import ConfigError


class TorchDevice(Device):
    """See Device. No kernels, and nothing that replaces torch's: the base of all devices."""

    name = "cpu"
    torch_device = torch.device("cpu")
    memory: Memory = HostMemory()

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        """Raises ConfigError if there are fewer cores than threads."""
        self.batch_invariant = config.batch_invariant
        if config.num_threads is not None:
            _set_num_threads(config.num_threads)

    @property
    def num_threads(self) -> int:
        """See Device."""
        return torch.get_num_threads()

    @property
    def rounding(self) -> str:
        """See Device."""
        return f"torch {torch.__version__}"

    def default_dtype(self, own: torch.dtype) -> torch.dtype:
        """See Device."""
        return torch.float32

    def can_multiply(self, layer: type[QuantizedLinear]) -> bool:
        """See Device."""
        return not layer.needs_kernels

    def collectives(self, ranks: Ranks) -> Ranks:
        """See Device."""
        return ranks

    def operators(self) -> Operators | None:
        """See Device."""
        return None

    def compile_linears(self, model: Any) -> None:
        """See Device."""

    def pack(self, model: Any) -> int:
        """See Device."""
        return 0

    def can_attend(self, spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]) -> bool:
        """See Device."""
        return False

    def check_quantized(self, spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]) -> None:
        """See Device."""
        create = partial(self.attention, kernels="torch", dtype=spec.dtype)
        check_attention(create, self.torch_device, spec, num_heads, args)

    def attention(self, kv_cache: torch.Tensor, kernels: Kernels, dtype: torch.dtype) -> AttentionBackend:
        """See Device."""
        return TorchLatentAttention(kv_cache) if kv_cache.shape[2] == 1 else TorchAttention(kv_cache, dtype)

    def layer_adapters(
        self, batch: AdapterBatch, in_features: int, sizes: Sequence[int], dtype: torch.dtype, max_rank: int
    ) -> LayerAdapters | None:
        """See Device."""
        return None if self.batch_invariant else TorchLayerAdapters(batch, in_features, sizes)

    def recurrences(self) -> Recurrences | None:
        """See Device."""
        return None

    def row_sampler(self, vocab_size: int, dtype: torch.dtype) -> RowSampler | None:
        """See Device."""
        return None

    def step_sampler(self, kernels: Kernels) -> StepSampler | None:
        """See Device."""
        return None

    def record_decodes(self, forward: Forward, kernels: Kernels, limits: DecodeLimits) -> RecordedDecodes | None:
        """See Device."""
        return None


def _set_num_threads(num_threads: int) -> None:
    num_cores = num_usable_cores()
    if num_threads > num_cores:
        raise ConfigError.of("num_threads", f"{num_threads}, but this process has {num_cores} cores")
    torch.set_num_threads(num_threads)
