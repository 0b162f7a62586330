"""Checks which requests a scheduler can serve."""

from __future__ import annotations

from typing import NamedTuple

from common.engine.messages import AddRequest
from common.errors import InvalidRequestError, PromptTooLongError
from common.types import PoolingFacts, SamplingParams


class Limits(NamedTuple):
    """Limits of the model and the KV cache."""

    max_model_len: int  # tokens of prompt and output
    vocab_size: int
    eos_token_ids: frozenset[int]
    pooling: PoolingFacts = PoolingFacts()

    def check(self, message: AddRequest) -> None:
        """Raises InvalidRequestError or PromptTooLongError that names the field."""
        num_outputs = len(message.output_token_ids)
        num_tokens = len(message.prompt_token_ids) + num_outputs
        self.pooling.check(message.pooling)
        if not message.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt_token_ids")
        if message.pooling is not None:
            if num_tokens > self.max_model_len:
                raise PromptTooLongError(
                    f"{num_tokens} tokens do not fit a context of {self.max_model_len}", param="prompt_token_ids"
                )
            self.pooling.check_length(message.pooling, num_tokens)
            return
        if num_tokens >= self.max_model_len:
            raise PromptTooLongError(
                f"{num_tokens} tokens leave no room for another one in a context of {self.max_model_len}",
                param="prompt_token_ids",
            )
        if message.sampling.max_tokens <= num_outputs:
            raise InvalidRequestError(
                f"max_tokens {message.sampling.max_tokens} leaves nothing to generate after {num_outputs} tokens",
                param="max_tokens",
            )
        self._check_stop_tokens(message.sampling)

    def _check_stop_tokens(self, sampling: SamplingParams) -> None:
        if sampling.min_tokens and len(sampling.stop_token_ids) + len(self.eos_token_ids) >= self.vocab_size:
            stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
            if len(stops) >= self.vocab_size:
                raise InvalidRequestError(
                    "stop_token_ids names every token, which leaves none for the first min_tokens", param="min_tokens"
                )
