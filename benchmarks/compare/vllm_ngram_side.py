"""vLLM with its own n-gram speculation, set as Baton's is by default."""

from __future__ import annotations

from functools import partial

from benchmarks.compare.side import serve
from benchmarks.compare.vllm_side import Vllm

_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}

if __name__ == "__main__":
    serve(partial(Vllm, speculative_config=_NGRAM))
