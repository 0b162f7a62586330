"""GPUs, with kernels in Triton, which is imported where its kernels are used only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from common.engine.config import Kernels, ModelConfig
from common.engine.devices.attention import AttentionArgs, AttentionBackend, KVSpec
from common.engine.devices.base import StepSampler
from common.engine.devices.decode_inputs import DecodeLimits, Forward, RecordedStepError
from common.engine.devices.gpu.decode_graphs import CudaRecorder, DecodeGraphs, graph_sizes
from common.engine.devices.gpu.memory import CudaMemory
from common.engine.devices.gpu.nccl_ranks import meet_over_nccl
from common.engine.devices.operators import Operators
from common.engine.devices.ranks import Ranks
from common.engine.devices.torch.attention_check import check_attention
from common.engine.devices.torch.device import TorchDevice
from common.errors import ConfigError

logger = logging.getLogger(__name__)


class TritonDevice(TorchDevice):
    """See Device. Triton's kernels in its interpreter, on the host: slow, for tests."""

    name = "interpreter"

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        super().__init__(config)
        self._has_kernels = config.gpu_kernels == "auto"

    @property
    def rounding(self) -> str:
        """See Device."""
        from common.engine.devices.gpu.attention import compiled_for

        return compiled_for(self.torch_device)

    def operators(self) -> Operators | None:
        """See Device."""
        if not self._has_kernels:
            return None
        from common.engine.devices.gpu.operators import TritonOperators

        return TritonOperators(batch_invariant=self.batch_invariant)

    def compile_linears(self, model: Any) -> None:
        """See Device."""
        if self._has_kernels:
            from common.engine.devices.gpu.operators import compile_linears

            compile_linears(model)

    def can_attend(self, spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]) -> bool:
        """See Device."""
        if not self._has_kernels:
            return False
        from common.engine.devices.gpu.attention import TritonAttention, supports
        from common.engine.devices.gpu.latent_attention import TritonLatentAttention, supports_latents

        backend: type[AttentionBackend]
        if supports(self.torch_device, spec):
            backend = TritonAttention
        elif supports_latents(self.torch_device, spec, args):
            backend = TritonLatentAttention
        else:
            return False
        check_attention(backend, self.torch_device, spec, num_heads, args)
        return True

    def attention(self, kv_cache: torch.Tensor, kernels: Kernels, dtype: torch.dtype) -> AttentionBackend:
        """See Device."""
        if kernels == "torch":
            return super().attention(kv_cache, kernels, dtype)
        from common.engine.devices.gpu.attention import BatchInvariantTritonAttention, TritonAttention
        from common.engine.devices.gpu.latent_attention import TritonLatentAttention

        if kv_cache.shape[2] == 1:
            return TritonLatentAttention(kv_cache)
        return BatchInvariantTritonAttention(kv_cache) if self.batch_invariant else TritonAttention(kv_cache)

    def step_sampler(self, kernels: Kernels) -> StepSampler | None:
        """See Device."""
        if kernels == "torch" or self.batch_invariant:
            return None
        from common.engine.devices.gpu.sampler import sample_on_device

        return sample_on_device


class CudaDevice(TritonDevice):
    """See Device."""

    name = "cuda"
    torch_device = torch.device("cuda")
    num_threads = 0

    def __init__(self, config: ModelConfig, number: int = 0) -> None:
        """Makes this GPU the one that is meant by "cuda" on this thread. Raises ConfigError if there is none."""
        if not torch.cuda.is_available():
            raise ConfigError.of("device", "cuda, but there is no usable CUDA device; auto and cpu need none")
        if number:
            _choose_gpu(number)
        super().__init__(config)
        self.memory = CudaMemory(self.torch_device)

    def default_dtype(self, own: torch.dtype) -> torch.dtype:
        """See Device."""
        return own

    def collectives(self, ranks: Ranks) -> Ranks:
        """See Device."""
        return meet_over_nccl(ranks, self.torch_device) if ranks.size > 1 else ranks

    def record_decodes(self, forward: Forward, kernels: Kernels, limits: DecodeLimits) -> DecodeGraphs | None:
        """See Device. All sizes are recorded now."""
        if kernels == "torch" or not self._has_kernels:
            return None
        try:
            return DecodeGraphs(
                forward, CudaRecorder(), limits, sizes=graph_sizes(limits.max_num_decodes), device=self.torch_device
            )
        except RecordedStepError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a compiler or the modelling code raises
            logger.warning("decode steps run without CUDA graphs: %s", str(error).partition("\n")[0])
            return None


def _choose_gpu(number: int) -> None:
    if number >= torch.cuda.device_count():
        raise ConfigError.of(
            "rank_devices", f"{number}, but there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
    torch.cuda.set_device(number)
