"""The parameters and the results of a generation."""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)


class FinishReason(enum.IntEnum):
    """Why a generation ended. Values equal baton.v1.FinishReason, which has no HANDOFF: that one stays in the pods."""

    STOP = 1  # end-of-sequence, stop token or stop string
    LENGTH = 2  # max_tokens or the context length
    ABORT = 3  # the client or a deadline ended it
    ERROR = 4  # it failed
    HANDOFF = 5  # producer: continued on the decode pod

    @property
    def label(self) -> str:
        """Lower-case name: metric label and OpenAI's `finish_reason`."""
        return self.name.lower()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when generation ends. Ranges are checked at the edge (router, LLM)."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 keeps every token
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None  # None: the edge (router, LLM) draws one; in an engine None counts as 0
    max_tokens: int = 16
    min_tokens: int = 0  # until then, end-of-sequence and stop tokens are masked
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # alternatives per token; None: no logprobs at all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def settled_seed(self) -> int:
        """Key of the counter-based generator."""
        return 0 if self.seed is None else self.seed


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one output position, natural logarithm, after penalties, before truncation."""

    sampled: float
    top: list[tuple[int, float]]  # (token id, logprob), best first


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One output token."""

    token_id: int
    logprobs: Logprobs | None = None
