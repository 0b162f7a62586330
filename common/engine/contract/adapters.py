"""LoRA adapters as engines see them: by the digest of their weights."""

from __future__ import annotations

from typing import Protocol

import msgspec

from common.errors import InvalidRequestError, quoted

NO_ADAPTERS = (
    "this engine computes no adapters: it does with one rank, stages, or tensor-parallel ranks and fused kernels, not "
    "with experts cut whole, and with batch_invariant on CPUs only"
)


def unusable(reason: str) -> InvalidRequestError:
    """The error of an adapter that is not what it should be."""
    return InvalidRequestError(f"the adapter cannot be used: {reason}", param="lora_path")


def no_such_layer(path: str) -> InvalidRequestError:
    """The error of an adapter for a layer that the model does not have."""
    return unusable(f"the model has no layer {quoted(path)} that an adapter may change")


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Facts of an adapter that was read."""

    digest: bytes  # ADAPTER_DIGEST_BYTES of its weights and of what else decides what it computes; no name, no path
    rank: int  # the largest of its matrices
    num_bytes: int  # of its weights in memory
    base_model: str = ""  # as its configuration has it


class ReadAdapter(Protocol):
    """An adapter that was read and fits the model, for the worker that has read it."""

    @property
    def facts(self) -> AdapterFacts:
        """Its digest, and the like."""

    @property
    def absent(self) -> frozenset[str]:
        """Paths of layers that it changes and the worker does not have: they are of other stages, or of none."""


class Adapters(Protocol):
    """The LoRA adapters of a model."""

    def read(self, directory: str) -> ReadAdapter:
        """Reads an adapter; called on any thread, beside steps. Raises InvalidRequestError if it cannot be used."""

    def install(self, adapter: ReadAdapter) -> None:
        """Makes requests of its digest computable; called between steps."""

    def remove(self, digest: bytes) -> None:
        """Forgets an adapter of which no request is left; called between steps."""
