"""The router's estimates for requests, learned: how long answers are, and how long a handoff takes."""

from __future__ import annotations

from common.step_times import Line, StepTimes

_NEWEST = 0.05  # share of the newest value in a mean
_FIRST_OUTPUT_TOKENS = 128.0
_TRUSTED_ANSWERS = 5
_LARGE_HANDOFF = 8192  # tokens


class Estimates:
    """Moving figures; before anything is known, guesses."""

    def __init__(self) -> None:
        self.output_tokens = _FIRST_OUTPUT_TOKENS  # mean number of tokens in an answer
        self._num_answers = 0
        # From the end of a prefill until decode can go on. The guess: 2 ms, and 128 KiB per token at 6 GB/s.
        self._handoffs = StepTimes(_LARGE_HANDOFF, Line(2e-3, 2e-5, 0.0))

    @property
    def handoff_token_s(self) -> float:
        """Seconds by which a token whose KV is to be moved delays a handoff."""
        return self._handoffs.line.token_s

    @property
    def knows_answers(self) -> bool:
        """Whether the guess about the length of answers counts for little by now."""
        return self._num_answers >= _TRUSTED_ANSWERS

    @property
    def handoff(self) -> Line:
        """The seconds of a handoff, by the tokens whose KV is moved."""
        return self._handoffs.line

    def expected_output_tokens(self, max_tokens: int) -> float:
        """How long an answer will be that may have `max_tokens` tokens."""
        return min(float(max_tokens), self.output_tokens)

    def answered(self, num_tokens: int) -> None:
        """An answer has ended. One that was ended before its first token teaches nothing."""
        if not num_tokens:
            return
        self._num_answers += 1
        self.output_tokens += max(_NEWEST, 1 / self._num_answers) * (num_tokens - self.output_tokens)

    def handed_over(self, seconds: float, num_tokens: int) -> None:
        """A handoff took so long after the prompt's last chunk was computed; `num_tokens` came that way."""
        self._handoffs.observe(seconds, num_tokens)
