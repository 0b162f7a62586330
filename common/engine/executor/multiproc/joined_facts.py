"""Joins the facts of the models that ranks have loaded, which must be one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from common.engine.contract.model import ModelFacts
from common.errors import ModelLoadError

_OWN_FACTS = frozenset(
    {
        "available_kv_bytes",
        "bytes_per_block",
        "device",
        "draft_bytes_per_block",
        "kernels_failed",
        "num_threads",
        "tokenizer_directory",
    }
)


def check_models(digests: Sequence[bytes], ranks_per_node: int) -> None:
    """Raises ModelLoadError if the ranks' model files are not the same."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ModelLoadError.of(
                "model",
                f"rank {rank}, on node {rank // ranks_per_node}, has other model files than rank 0: their "
                f"digest is {digest.hex()[:16]}, not {digests[0].hex()[:16]}",
            )


def join_facts(by_rank: Sequence[ModelFacts]) -> ModelFacts:
    """Returns the facts of the model on all ranks. Raises ModelLoadError if they have not loaded the same."""
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        for field in fields(ModelFacts):
            own, others = getattr(first, field.name), getattr(other, field.name)
            if own != others and field.name not in _OWN_FACTS:
                raise ModelLoadError(
                    f"the ranks have loaded different models: {field.name} is {_shown(own)} on rank 0, "
                    f"{_shown(others)} on rank {rank}",
                    param="model",
                )
    bytes_per_block = max(facts.bytes_per_block for facts in by_rank)  # stages may have more layers or fewer
    draft_bytes_per_block = max(facts.draft_bytes_per_block for facts in by_rank)
    in_all = bytes_per_block + draft_bytes_per_block
    return replace(
        first,
        bytes_per_block=bytes_per_block,
        draft_bytes_per_block=draft_bytes_per_block,
        available_kv_bytes=min(facts.available_kv_bytes * in_all // facts.bytes_of_block for facts in by_rank),
        kernels_failed=any(facts.kernels_failed for facts in by_rank),
    )


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
