"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.messages import NUM_DRAFT_POSITIONS, DraftFigures, StepFigures

_MAX_REASONS = 16  # told apart


@dataclass(slots=True)
class StepTotals:
    """Counters of the steps of one kind."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def figures(self) -> StepFigures:
        """The current values."""
        return StepFigures(self.num_steps, self.num_tokens, self.seconds)


@dataclass(slots=True)
class DraftTotals:
    """Counters of speculative decoding; see DraftFigures."""

    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    num_steps: int = 0
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * NUM_DRAFT_POSITIONS)
    failures: dict[str, int] = field(default_factory=dict)
    num_caught_up: int = 0
    num_unseen: int = 0

    def count_verification(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of a request in a step."""
        self.num_verifications += 1
        self.num_verified += num_drafts
        self.num_accepted += num_accepted
        for position in range(num_accepted):
            self.accepted_by_position[min(position, NUM_DRAFT_POSITIONS - 1)] += 1

    def count_failure(self, reason: str) -> None:
        """Counts a step whose proposer has failed."""
        if reason not in self.failures and len(self.failures) >= _MAX_REASONS:
            reason = "other"
        self.failures[reason] = self.failures.get(reason, 0) + 1

    @property
    def figures(self) -> DraftFigures:
        """The current values."""
        return DraftFigures(
            self.num_proposed,
            self.num_verified,
            self.num_accepted,
            self.num_verifications,
            self.num_steps,
            tuple(self.accepted_by_position) if self.num_verified else (),
            self.failures.copy(),
            self.num_caught_up,
            self.num_unseen,
        )


@dataclass(slots=True)
class Totals:
    """Counters since the start of the scheduler.

    Apart from the scheduler, because CPython reads the attributes of an object with more than 29 of them more slowly.
    """

    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens; so is the next one
    prefix_cache_hits: int = 0
    num_prompt_tokens: int = 0  # computed here
    num_generation_tokens: int = 0
    tier_hits: int = 0  # tokens restored from tiers below
    num_late_masks: int = 0
    num_slow_grammars: int = 0
    prefill_steps: StepTotals = field(default_factory=StepTotals)
    decode_steps: StepTotals = field(default_factory=StepTotals)
    mixed_steps: StepTotals = field(default_factory=StepTotals)
    drafts: DraftTotals = field(default_factory=DraftTotals)

    def count_step(self, num_tokens: int, num_prompt_tokens: int, step_s: float) -> None:
        """Counts a step that has computed `num_tokens`, `num_prompt_tokens` of them of prompts."""
        if not num_tokens:
            return
        if not num_prompt_tokens:
            steps = self.decode_steps
        else:
            steps = self.prefill_steps if num_prompt_tokens == num_tokens else self.mixed_steps
        steps.num_steps += 1
        steps.num_tokens += num_tokens
        steps.seconds += step_s
