"""`generate` of transformers as one of the sides, with its default cache and `sdpa` attention, or a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from benchmarks.compare.side import largest

_MOST_PROMPTS = 16  # in a forward pass that pools


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


class TransformersPooling:
    """See Generator. Embeds, see benchmarks.compare.pooling; prompts have one length."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.base_model

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, on_step: Callable[[int], None]
    ) -> list[list[int]]:
        """See Generator."""
        found: list[list[float]] = []
        for first in range(0, len(prompts), _MOST_PROMPTS):
            prompt_ids = torch.tensor(prompts[first : first + _MOST_PROMPTS], device=self._model.device)
            last = self._model(prompt_ids, use_cache=False).last_hidden_state[:, -1].float()
            found += functional.normalize(last, dim=-1).tolist()
        on_step(1)
        return [largest(each) for each in found]

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


def load(name: str, directory: str, dtype: str, _: str | None) -> Transformers | TransformersPooling:
    """Returns the side with a model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    side = TransformersPooling if name == "transformers_pooling" else Transformers
    return side(model.to("cuda" if torch.cuda.is_available() else "cpu").eval())
