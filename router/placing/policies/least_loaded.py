"""The pod with the least work takes the request."""

from __future__ import annotations

from router.placing.policies.base import Candidates
from router.placing.policies.table import Column, PodColumns


def load_of(pods: PodColumns) -> Column:
    """The sum of what each leg waits for, in comparable units:

    - steps needed for the prompt tokens that are queued,
    - share of the slots taken, which the time of a decode step grows with,
    - share of the KV cache in use, since a full one makes requests wait or preempts them.
    """
    queued_steps = pods.queued_tokens / pods.max_num_batched_tokens
    seats_taken = pods.num_requests / pods.max_num_seqs
    cache_usage = 1 - pods.free_blocks / pods.num_blocks
    return queued_steps + seats_taken + cache_usage


def load_with(candidates: Candidates) -> Column:
    """The load that each pod would have with the request: what it holds of the prompt adds none."""
    pods, request = candidates.pods, candidates.request
    uncached = request.num_prompt_tokens - candidates.cached_tokens
    load = load_of(pods) + uncached / (pods.num_blocks * request.block_size)
    return load + uncached / pods.max_num_batched_tokens if candidates.computes else load


class LeastLoaded:
    """1 / (1 + load), so an idle pod scores 1."""

    name = "least_loaded"

    def score(self, candidates: Candidates) -> Column:
        """See Scorer."""
        return 1 / (1 + load_of(candidates.pods))
