"""`generate` of transformers as one of the sides, with its default cache and `sdpa` attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList


class Transformers:
    """See Generator."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        prompt_ids = torch.tensor(prompts, device=self._model.device)
        output = self._model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([_StepWatch(prompt_ids.shape[1], on_step)]),
        )
        tokens: list[list[int]] = output[:, prompt_ids.shape[1] :].tolist()
        return tokens

    def close(self) -> None:
        """See Generator."""


class _StepWatch(StoppingCriteria):  # type: ignore[misc]  # no types
    """Never stops; reports each step."""

    def __init__(self, num_prompt_tokens: int, on_step: Callable[[int], None]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self._on_step(input_ids.shape[1] - self._num_prompt_tokens)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def load(_: str, directory: str, dtype: str, __: str | None) -> Transformers:
    """Returns the side with a model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return Transformers(model.to("cuda" if torch.cuda.is_available() else "cpu").eval())
