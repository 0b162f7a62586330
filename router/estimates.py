"""What the router learns of requests: how long answers are, and how long a handoff takes."""

from __future__ import annotations

_NEWEST = 0.05  # share of the newest value in a mean
_FIRST_OUTPUT_TOKENS = 128.0
_FIRST_HANDOFF_TOKEN_S = 2e-5  # 128 KiB per token at 6 GB/s


class Estimates:
    """Moving means; before anything is known, guesses."""

    def __init__(self) -> None:
        self.output_tokens = _FIRST_OUTPUT_TOKENS  # of an answer
        self.handoff_token_s = _FIRST_HANDOFF_TOKEN_S  # seconds that moving one token's KV takes

    def expected_output_tokens(self, max_tokens: int) -> float:
        """How long an answer will be that may have `max_tokens` tokens."""
        return min(float(max_tokens), self.output_tokens)

    def answered(self, num_tokens: int) -> None:
        """An answer has ended."""
        self.output_tokens += _NEWEST * (num_tokens - self.output_tokens)

    def handed_over(self, seconds: float, num_tokens: int) -> None:
        """A handoff took so long after the prompt's last chunk was computed; `num_tokens` came that way."""
        if num_tokens > 0 and seconds >= 0:
            self.handoff_token_s += _NEWEST * (seconds / num_tokens - self.handoff_token_s)
