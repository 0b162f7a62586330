"""The engine's view of a device: where the model's numbers are, and what computes on them.

A kind of device is a folder beside this file, or a module from outside the package; see `registry`. `TorchDevice`
(`torch/device.py`) has every method, on torch's operators over the host's memory: a device extends it by what it does
better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.engine.config import Kernels
from common.engine.contract.step import Fence
from common.engine.devices.adapters import AdapterBatch, LayerAdapters
from common.engine.devices.attention import AttentionArgs, AttentionBackend, KVSpec
from common.engine.devices.decode_inputs import DecodeLimits, Forward, RecordedDecodes
from common.engine.devices.operators import Operators
from common.engine.devices.ranks import Ranks
from common.engine.devices.recurrences import Recurrences
from common.engine.kv_connector import Fences
from common.engine.quantization.base import QuantizedLinear
from common.engine.sampling.draws import Draws, Penalties


class HostCopy(NamedTuple):
    """A tensor on its way to the host."""

    tensor: torch.Tensor
    wait: Callable[[], object] | None  # to be called before it is read; None: it is there


class StepFences(Fences, Protocol):
    """See Fences, of one worker's steps."""

    def record(self) -> Fence:
        """Called on the step loop's thread when it has submitted a step, whose number is returned."""


class Memory(Protocol):
    """The memory of a device, for the model and its KV cache."""

    is_own: bool  # not the host's: what a step takes of it is measured before the KV cache gets the rest
    default_fraction: float  # of the free bytes, for the KV cache

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros for the KV cache. Raises MemoryError or torch.OutOfMemoryError."""

    def free_bytes(self) -> int:
        """How many there are now."""

    def upload(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """The arrays as tensors on the device, in one transfer. They may share memory, and are not written to."""

    def unpack_bits(self, words: npt.NDArray[np.int32], num_bits: int) -> torch.Tensor:
        """The first bits of each row [rows, num_bits], as bool on the device; the lowest of a word comes first."""

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Begins to copy a tensor of the device, behind the work submitted by this thread."""

    def fences(self) -> StepFences | None:
        """Returns the fences of a worker's steps; None if a step is finished when it is answered."""


class RowSampler(Protocol):
    """Samples some rows of a step on the host, by kernels."""

    def sample(self, logits: torch.Tensor, draws: Draws) -> npt.NDArray[np.int64]:
        """Token ids [rows] for logits [rows, vocabulary]; -1 where the best logit is not finite. `draws` keep the
        whole vocabulary."""


StepSampler = Callable[[torch.Tensor, Draws, Penalties | None], torch.Tensor]
"""Samples all rows of a step on the device, while the host goes on: token ids [rows] for logits [rows, vocabulary],
on their device; -1 where the best logit is not finite. For requests that `SamplingParams.kernels_can_sample`."""


class Device(Protocol):
    """Called on the worker's thread only. Whatever computes by kernels of the device's own raises if they compute
    something else than torch's operators, or do not compile; the caller goes on without them then."""

    name: str  # for people
    torch_device: torch.device
    memory: Memory

    @property
    def num_threads(self) -> int:
        """CPU threads of a step; 0: it runs elsewhere."""

    @property
    def rounding(self) -> str:
        """Names what decides how kernels round, see `fingerprint_model`."""

    def default_dtype(self, own: torch.dtype) -> torch.dtype:
        """Returns the type to compute in, for a checkpoint in `own`."""

    def can_multiply(self, layer: type[QuantizedLinear]) -> bool:
        """True if the device computes such layers at a useful speed."""

    def collectives(self, ranks: Ranks) -> Ranks:
        """The same ranks, which meet in the fastest way that this device has. Called by all of them."""

    def operators(self) -> Operators | None:
        """The operators of decoders that can be fused; None if there are none, or kernels are off."""

    def compile_linears(self, model: Any) -> None:
        """Replaces quantised layers of a model that runs its own code by ones on kernels."""

    def pack(self, model: Any) -> int:
        """Replaces layers of a model that runs its own code by faster ones; returns how many."""

    def can_attend(self, spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]) -> bool:
        """True if kernels compute the attention of a model that runs its own code. `num_heads` and `args` are by
        layer."""

    def check_quantized(self, spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]) -> None:
        """Raises if attention without kernels does not take a KV cache that is quantised in this way. See
        `can_attend`."""

    def attention(self, kv_cache: torch.Tensor, kernels: Kernels, dtype: torch.dtype) -> AttentionBackend:
        """Attention of queries of `dtype` over the KV cache, which may be quantised, by what was found to work for the
        model; a ProjectionAttention if it is fused."""

    def layer_adapters(
        self, batch: AdapterBatch, in_features: int, sizes: Sequence[int], dtype: torch.dtype, max_rank: int
    ) -> LayerAdapters | None:
        """Returns the adapters of a linear layer, whose outputs are those of layers of `sizes` side by side; None if
        with batch_invariant a token's would depend on the others."""

    def recurrences(self) -> Recurrences | None:
        """Steps of layers with a state; None if there are none, or kernels are off."""

    def row_sampler(self, vocab_size: int, dtype: torch.dtype) -> RowSampler | None:
        """Returns the sampler of logits of this type; None if there is none, or kernels are off."""

    def step_sampler(self, kernels: Kernels) -> StepSampler | None:
        """None if steps wait for the tokens of those before them."""

    def record_decodes(self, forward: Forward, kernels: Kernels, limits: DecodeLimits) -> RecordedDecodes | None:
        """Decode steps as one call each; None if this device cannot, or not this model. Raises RecordedStepError."""
