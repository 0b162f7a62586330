"""N-gram speculation of Baton and of vLLM, each next to its own engine without, while answers repeat their prompts.

A model with random weights says nothing that repeats, and vLLM takes no logits processor beside speculation that could
make it. So the model is one that counts (see `write_counting`): all sides give the same answers, whatever they round. A
prompt is the answer to it with some tokens changed, and the token before. Drafts found in it are right up to the next
change; two tokens later there are drafts again.
"""

from __future__ import annotations

import random

from benchmarks.compare.offline import FIRST_WORD, Measure
from benchmarks.compare.side import Generation

SIDES = {"baton": ("baton", "baton_ngram"), "vllm": ("vllm", "vllm_ngram")}  # without and with
_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 64


def _measure(batch: int, changed: int) -> Measure:
    def prompt(source: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
        first = source.randrange(FIRST_WORD, vocab_size - num_tokens)
        answer = range(first + 1, first + num_tokens)
        return [*(token if source.randrange(changed) else source.randrange(vocab_size) for token in answer), first]

    def tokens_per_s(generation: Generation) -> float:
        """From the first token of all to the last."""
        return 1e3 * batch * len(generation.gaps_ms) / sum(generation.gaps_ms)

    return Measure(
        f"batch {batch}, one of {changed} tokens changed",
        "tokens/s",
        True,
        batch,
        _PROMPT_TOKENS,
        _OUTPUT_TOKENS,
        tokens_per_s,
        lambda work, limits: batch / work.decode_s(limits, batch, _PROMPT_TOKENS + _OUTPUT_TOKENS // 2),
        warm_up_tokens=_OUTPUT_TOKENS,  # engines learn what pays
        prompt=prompt,
    )


MEASURES = (_measure(1, 64), _measure(1, 8), _measure(8, 64))
