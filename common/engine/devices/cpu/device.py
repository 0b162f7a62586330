"""CPUs, with kernels that are compiled at start for the processor at hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from common.engine.config import Kernels, ModelConfig
from common.engine.devices.adapters import AdapterBatch, LayerAdapters
from common.engine.devices.attention import AttentionArgs, AttentionBackend, KVSpec
from common.engine.devices.cpu.adapters import CpuLayerAdapters
from common.engine.devices.cpu.attention import BatchInvariantAttention, CpuAttention, supports
from common.engine.devices.cpu.decode_programs import DecodePrograms
from common.engine.devices.cpu.fused_norm import fuse_norms
from common.engine.devices.cpu.kernel_cache import bound_kernel_caches
from common.engine.devices.cpu.kernels.compiling import instructions
from common.engine.devices.cpu.kernels.lora import can_add
from common.engine.devices.cpu.kernels.pairs import MULTIPLIES_PAIRS
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.devices.cpu.latent_attention import CpuLatentAttention, supports_latents
from common.engine.devices.cpu.operators import CpuOperators
from common.engine.devices.cpu.packed_linear import pack_linears
from common.engine.devices.cpu.quantized_linear import compile_linears
from common.engine.devices.cpu.recurrences import CpuRecurrences
from common.engine.devices.cpu.sampler import CompiledSampler, can_sample, checked_sampler
from common.engine.devices.cpu.shared_ranks import share_memory
from common.engine.devices.cpu.streamed_experts import stream_experts
from common.engine.devices.cpu.streamed_linear import CompiledLinear
from common.engine.devices.decode_inputs import DecodeLimits, Forward
from common.engine.devices.ranks import Ranks
from common.engine.devices.torch.attention_check import check_attention
from common.engine.devices.torch.device import TorchDevice
from common.engine.quantization.base import QuantizedLinear
from common.engine.quantization.int8 import Int8Linear


class CpuDevice(TorchDevice):
    """See Device."""

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        super().__init__(config)
        bound_kernel_caches()
        self._has_kernels = config.cpu_kernels == "auto"

    @property
    def rounding(self) -> str:
        """See Device."""
        return instructions()

    def default_dtype(self, own: torch.dtype) -> torch.dtype:
        """See Device."""
        # What keeps batches apart takes more than that in bfloat16, of processor and model.
        is_multiplied = MULTIPLIES_PAIRS and not self.batch_invariant
        return torch.bfloat16 if own == torch.bfloat16 and is_multiplied else torch.float32

    def can_multiply(self, layer: type[QuantizedLinear]) -> bool:
        """See Device."""
        return issubclass(layer, Int8Linear) or super().can_multiply(layer)

    def collectives(self, ranks: Ranks) -> Ranks:
        """See Device."""
        return share_memory(ranks) if self._has_kernels and ranks.size > 1 else ranks

    def operators(self) -> CpuOperators | None:
        """See Device."""
        return CpuOperators(batch_invariant=self.batch_invariant) if self._has_kernels else None

    def compile_linears(self, model: Any) -> None:
        """See Device."""
        if self._has_kernels:
            compile_linears(model)

    def pack(self, model: Any) -> int:
        """See Device."""
        if not (self._has_kernels and can_run_kernels()):
            return fuse_norms(model, has_kernels=False) + pack_linears(model)
        return stream_experts(model) + fuse_norms(model, has_kernels=True) + pack_linears(model, CompiledLinear)

    def can_attend(self, spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]) -> bool:
        """See Device."""
        if not self._has_kernels or not (supports(spec) or supports_latents(spec)):
            return False
        backend = partial(CpuAttention, dtype=spec.dtype) if spec.value_head_dim else CpuLatentAttention
        check_attention(backend, self.torch_device, spec, num_heads, args)
        return True

    def attention(self, kv_cache: torch.Tensor, kernels: Kernels, dtype: torch.dtype) -> AttentionBackend:
        """See Device."""
        if kernels == "torch":
            return super().attention(kv_cache, kernels, dtype)
        if kv_cache.shape[2] == 1:
            return CpuLatentAttention(kv_cache)
        return BatchInvariantAttention(kv_cache, dtype) if self.batch_invariant else CpuAttention(kv_cache, dtype)

    def layer_adapters(
        self, batch: AdapterBatch, in_features: int, sizes: Sequence[int], dtype: torch.dtype, max_rank: int
    ) -> LayerAdapters | None:
        """See Device."""
        has_kernels = self._has_kernels and can_run_kernels() and dtype in (torch.float32, torch.bfloat16)
        if has_kernels and (can_add(in_features, sizes) or not self.batch_invariant):
            return CpuLayerAdapters(batch, in_features, sizes, dtype, max_rank, batch_invariant=self.batch_invariant)
        return super().layer_adapters(batch, in_features, sizes, dtype, max_rank)

    def recurrences(self) -> CpuRecurrences | None:
        """See Device."""
        return CpuRecurrences() if self._has_kernels and can_run_kernels() else None

    def row_sampler(self, vocab_size: int, dtype: torch.dtype) -> CompiledSampler | None:
        """See Device."""
        return checked_sampler(vocab_size, dtype) if self._has_kernels and can_sample(dtype) else None

    def record_decodes(self, forward: Forward, kernels: Kernels, limits: DecodeLimits) -> DecodePrograms | None:
        """See Device. Steps are recorded as their sizes are met."""
        if kernels != "fused":
            return None
        return DecodePrograms(forward, limits)
