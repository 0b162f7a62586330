"""`generate_batch` of transformers as one of the sides: its own continuous batching over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

_NUM_PAGES = 128  # of 256 tokens
_MAX_BATCH_TOKENS = 2048
_NO_TOKEN = -1
_STEP_TIMEOUT_S = 300.0


class GenerateBatch:
    """See Generator. Requests are given to what `generate_batch` starts for each call and ends after it; started once,
    it need not set up a cache each time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=_NUM_PAGES, max_batch_tokens=_MAX_BATCH_TOKENS, allow_block_sharing=False
            ),
        )
        self._manager.start()

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator. Raises RuntimeError."""
        tokens: dict[str, list[int]] = {
            self._manager.add_request(list(prompt), max_new_tokens=num_tokens, streaming=True): [] for prompt in prompts
        }
        while (complete := min(map(len, tokens.values()))) < num_tokens:
            output = self._manager.get_result(timeout=_STEP_TIMEOUT_S)
            if output is None or output.error is not None:
                raise RuntimeError("no result" if output is None else output.error)
            tokens[output.request_id] = list(output.generated_tokens)
            if min(map(len, tokens.values())) > complete:
                on_step(min(map(len, tokens.values())))
        return list(tokens.values())

    def close(self) -> None:
        """See Generator. Ends its thread, for which the process would wait."""
        self._manager.stop(block=True)


def load(_: str, directory: str, dtype: str, __: str | None) -> GenerateBatch:
    """Returns the side with a model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return GenerateBatch(model.to("cuda" if torch.cuda.is_available() else "cpu").eval())
