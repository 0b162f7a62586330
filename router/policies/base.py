"""What a policy sees, what it answers, and the shape that all of ours have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """One ready pod as it looks now. Counts are requests, the larger of what the pod reported last and what this
    router knows it has running there: reports lag behind, and other routers send requests too."""

    address: str
    connector: str  # name of its connector; empty: none
    num_requests: int  # running, waiting, or waiting for remote KV
    num_queued_tokens: int  # prompt tokens not yet computed
    num_free_blocks: int  # of num_blocks
    num_blocks: int  # KV blocks in the pool, at least 1
    max_num_seqs: int  # most requests running at once, at least 1
    max_num_batched_tokens: int  # token budget of a step, at least 1


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What of a request may matter for its route."""

    num_prompt_tokens: int
    max_tokens: int
    block_hashes: bytes  # 16 bytes per full block of the prompt
    priority: int


class Policy(Protocol):
    """Chooses among ready pods. Called once per leg of a request, on the event loop; must not block."""

    def choose(self, request: RequestFacts, pods: Sequence[PodSnapshot]) -> PodSnapshot | None:
        """The pod to use; None if none of them fits. `pods` may be empty."""


class Filter(Protocol):
    """Drops pods that must not get the request."""

    def keep(self, request: RequestFacts, pods: Sequence[PodSnapshot]) -> Sequence[PodSnapshot]:
        """The pods that may, in the same order."""


class Scorer(Protocol):
    """Judges pods by one aspect."""

    def score(self, request: RequestFacts, pods: Sequence[PodSnapshot]) -> Sequence[float]:
        """One number in [0, 1] per pod; more is better."""


class Picker(Protocol):
    """Takes one pod by total score."""

    def pick(self, pods: Sequence[PodSnapshot], scores: Sequence[float]) -> PodSnapshot:
        """One of `pods`, of which there is at least one."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer and how much it counts."""

    scorer: Scorer
    weight: float = 1.0


class ScoredPolicy:
    """Filters, then sums weighted scores, then picks."""

    def __init__(self, scorers: Sequence[WeightedScorer], picker: Picker, filters: Sequence[Filter] = ()) -> None:
        self._filters = tuple(filters)
        self._scorers = tuple(scorers)
        self._picker = picker

    def choose(self, request: RequestFacts, pods: Sequence[PodSnapshot]) -> PodSnapshot | None:
        """See Policy."""
        for each in self._filters:
            pods = each.keep(request, pods)
        if not pods:
            return None
        totals = [0.0] * len(pods)
        for weighted in self._scorers:
            for index, score in enumerate(weighted.scorer.score(request, pods)):
                totals[index] += weighted.weight * score
        return self._picker.pick(pods, totals)


class BestInTurn:
    """Picks a best-scored pod; equals take turns, so that an idle cluster is used evenly."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, pods: Sequence[PodSnapshot], scores: Sequence[float]) -> PodSnapshot:
        """See Picker."""
        top = max(scores)
        best = [pod for pod, score in zip(pods, scores, strict=True) if score == top]
        chosen = best[self._turn % len(best)]
        self._turn += 1
        return chosen
