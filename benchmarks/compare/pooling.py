"""Embeddings of prompts, as many as there are at once, by Baton, by vLLM and by a forward pass of transformers.

The models are those that generate; an embedding is the last token's hidden state, normalised. In place of tokens sides
answer with the place of each embedding's largest number, so that it is seen if they compute something else.
"""

from __future__ import annotations

from benchmarks.compare.offline import Measure, Row

SIDES = {name: f"{name}_pooling" for name in ("baton", "vllm", "transformers")}


def _measure(num_prompts: int, num_tokens: int) -> Measure:
    return Measure(
        f"embeddings, {num_prompts} x {num_tokens} tokens",
        "prompts/s",
        True,
        num_prompts,
        num_tokens,
        0,
        lambda generation: num_prompts / generation.seconds,
        lambda work, limits: 1 / work._replace(head_weights=0).prefill_s(limits, num_tokens),
    )


MEASURES = (_measure(64, 32), _measure(64, 128), _measure(16, 512))


def by_engine(row: Row) -> Row:
    """The row with the names of the sides that generate."""
    engines = {side: engine for engine, side in SIDES.items()}
    return row._replace(
        figures={engines[side]: figures for side, figures in row.figures.items()},
        same_tokens={engines[side]: same for side, same in row.same_tokens.items()},
    )
