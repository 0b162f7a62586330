"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass


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
