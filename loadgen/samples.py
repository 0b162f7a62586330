"""The measurements of one request."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple


class Failure(NamedTuple):
    """Why a request has no answer. Failures are counted by kind."""

    kind: str
    message: str


@dataclass(slots=True)
class Sample:
    """One request. Times are those of the load generator's clock, in seconds."""

    due_s: float | None  # when it was to be sent; None: as soon as possible
    sent_s: float = 0.0
    token_times: list[float] = field(default_factory=list)  # arrivals of chunks with tokens
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False  # whether the endpoint said the numbers of tokens
    num_accepted_drafts: int = 0  # among the output tokens, as the endpoint says; so is the next one
    num_rejected_drafts: int = 0  # that are no output tokens
    failure: Failure | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is an answer or a failure."""
        return self.failure is not None or bool(self.token_times)

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.token_times[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.token_times[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None if there is no second."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks with tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def delay_s(self) -> float:
        """How much later than planned it was sent."""
        return 0.0 if self.due_s is None else max(0.0, self.sent_s - self.due_s)
