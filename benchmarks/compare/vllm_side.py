"""vLLM's engine as one of the sides, compiled as it is by default, in the environment of `make peers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, as Baton's is

import torch
from vllm import LLM, SamplingParams

from benchmarks.compare.side import largest

_SHARE_OF_GPU = 0.4  # model included: the sides share one device
_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}  # as Baton's


class Vllm:
    """See Generator. `options`: further ones of vLLM's `LLM`."""

    def __init__(self, directory: str, dtype: str, **options: Any) -> None:
        llm = LLM(
            model=directory,
            dtype=dtype,
            max_model_len=4096,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **({"gpu_memory_utilization": _SHARE_OF_GPU} if torch.cuda.is_available() else {}),
            **options,
        )
        self._engine = llm.llm_engine
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        tokens: dict[str, list[int]] = {}
        for prompt in prompts:
            request_id = f"r{self._num_requests}"
            self._num_requests += 1
            tokens[request_id] = []
            self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            on_step(min(map(len, tokens.values())))
        return list(tokens.values())

    def close(self) -> None:
        """See Generator."""


class VllmPooling:
    """See Generator. Embeds, see benchmarks.compare.pooling."""

    def __init__(self, directory: str, dtype: str) -> None:
        self._llm = LLM(
            model=directory,
            dtype=dtype,
            runner="pooling",
            convert="embed",
            max_model_len=4096,
            enable_prefix_caching=False,
            **({"gpu_memory_utilization": _SHARE_OF_GPU} if torch.cuda.is_available() else {}),
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        answers = self._llm.embed([{"prompt_token_ids": list(prompt)} for prompt in prompts], use_tqdm=False)
        on_step(1)
        return [largest(answer.outputs.embedding) for answer in answers]

    def close(self) -> None:
        """See Generator."""


def load(name: str, directory: str, dtype: str, _: str | None) -> Vllm | VllmPooling:
    """Returns the side of this name with a model."""
    if name == "vllm_pooling":
        return VllmPooling(directory, dtype)
    return Vllm(directory, dtype, **({"speculative_config": _NGRAM} if name == "vllm_ngram" else {}))
