"""The pod with the least work takes the request."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import BestInTurn, PodSnapshot, Policy, RequestFacts, ScoredPolicy, WeightedScorer


class Idleness:
    """1 / (1 + load), so an idle pod scores 1. The load is the sum of what each leg waits for, in comparable units:

    - steps needed for the prompt tokens that are queued,
    - share of the seats taken, which the time of a decode step grows with,
    - share of the KV cache in use, since a full one makes requests wait or preempts them.
    """

    def score(self, request: RequestFacts, pods: Sequence[PodSnapshot]) -> Sequence[float]:
        """See Scorer."""
        return [1 / (1 + self._load(pod)) for pod in pods]

    def _load(self, pod: PodSnapshot) -> float:
        queued_steps = pod.num_queued_tokens / pod.max_num_batched_tokens
        seats_taken = pod.num_requests / pod.max_num_seqs
        cache_usage = 1 - pod.num_free_blocks / pod.num_blocks
        return queued_steps + seats_taken + cache_usage


def create() -> Policy:
    """A new least-loaded policy."""
    return ScoredPolicy([WeightedScorer(Idleness())], BestInTurn())
