"""llama.cpp as one of the sides, through the C functions that llama-cpp-python wraps, in the environment of
`make peers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np

_MAX_SEQUENCES = 32
_CONTEXT_TOKENS = 1 << 14  # of all sequences together
_MAX_BATCH_TOKENS = 2048
_FLOAT32, _FLOAT16 = 0, 1  # numbers of GGML's types

Token = tuple[int, int, int, bool]
"""Id, place in its sequence, sequence, and whether logits are wanted."""


class LlamaCpp:
    """See Generator. Sequences share one buffer of KV: in float32, or in float16 if weights are smaller."""

    def __init__(self, path: str, dtype: str) -> None:
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        limits = llama_cpp.llama_context_default_params()
        limits.n_ctx, limits.n_batch, limits.n_seq_max = _CONTEXT_TOKENS, _MAX_BATCH_TOKENS, _MAX_SEQUENCES
        limits.n_threads = limits.n_threads_batch = len(os.sched_getaffinity(0))
        limits.type_k = limits.type_v = _FLOAT32 if dtype == "float32" else _FLOAT16
        limits.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, limits)
        if not self._context:
            raise RuntimeError("llama.cpp has no memory for its context")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_MAX_BATCH_TOKENS, 0, 1)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        found: list[list[int]] = [[] for _ in prompts]
        given = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        while True:
            for sequence, token in self._decode(given):
                found[sequence].append(token)
            on_step(len(found[0]))
            if len(found[0]) == num_tokens:
                return found
            given = [
                (own[-1], len(prompt) + len(own) - 1, sequence, True)
                for sequence, (prompt, own) in enumerate(zip(prompts, found, strict=True))
            ]

    def _decode(self, tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
        """The most likely token of each sequence whose logits are wanted."""
        batch: Any = self._batch
        for first in range(0, len(tokens), _MAX_BATCH_TOKENS):
            part = tokens[first : first + _MAX_BATCH_TOKENS]
            batch.n_tokens = len(part)
            for i, (token, place, sequence, has_logits) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, place, has_logits
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if status := llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode: {status}")
            for i, (_, _, sequence, has_logits) in enumerate(part):
                if has_logits:
                    logits = llama_cpp.llama_get_logits_ith(self._context, i)
                    yield sequence, int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))

    def close(self) -> None:
        """See Generator."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def load(_: str, path: str, dtype: str, quantization: str | None = None) -> LlamaCpp:
    """Returns the side with a GGUF file."""
    return LlamaCpp(path, dtype)
