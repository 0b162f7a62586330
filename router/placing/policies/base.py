"""The input and output of a policy, and the shape that all of ours have: Filter -> Scorer -> Picker."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from router.placing.policies.prediction import Prediction, predict
from router.placing.policies.table import Column, PodColumns


class Leg(enum.Enum):
    """The part of a request that the chosen pod serves."""

    PREFILL = "prefill"  # compute the prompt and hand it over
    DECODE = "decode"  # take the prompt over and answer
    WHOLE = "whole"  # both, on a decode pod


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The facts of a request that may matter for its route."""

    num_prompt_tokens: int
    block_size: int  # tokens
    expected_output_tokens: float
    handoff_token_s: float = 0.0  # seconds that moving one token's KV between pods takes
    session: str = ""  # whose requests should stay together; empty: no session
    target_itl_s: float = math.inf  # seconds between its tokens that prompts beside it must not exceed


class Candidates:
    """One request, what is to be done for it, and the pods that may do it."""

    def __init__(
        self, request: RequestFacts, leg: Leg, pods: PodColumns, num_cached_blocks: NDArray[np.int64] | None = None
    ) -> None:
        """`num_cached_blocks`: leading blocks of the prompt that each pod holds, by slot; None: no pod holds any."""
        self.request = request
        self.leg = leg
        self.pods = pods
        if num_cached_blocks is None:
            self.cached_tokens: Column = np.zeros(len(pods))
        else:
            self.cached_tokens = num_cached_blocks[pods.slots].astype(np.float64) * request.block_size

    @property
    def context_tokens(self) -> float:
        """Tokens whose KV the answer's steps read, on average."""
        return self.request.num_prompt_tokens + self.request.expected_output_tokens / 2

    @property
    def computes(self) -> bool:
        """Whether the chosen pod is to compute the prompt."""
        return self.leg is not Leg.DECODE

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction for the request on each pod; computed once for all who ask."""
        request, pods = self.request, self.pods
        return predict(
            num_prompt_tokens=request.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            expected_output_tokens=request.expected_output_tokens,
            context_tokens=self.context_tokens,
            handoff_token_s=request.handoff_token_s,
            block_size=request.block_size,
            target_itl_s=request.target_itl_s,
            computes=self.computes,
            decodes=self.leg is not Leg.PREFILL,
            pods=pods,
        )


class Scorer(Protocol):
    """Judges pods by one aspect. Called once per leg of a request, on the event loop; must not block."""

    name: str

    def score(self, candidates: Candidates) -> Column:
        """One number in [0, 1] per pod; more is better."""


class Picker(Protocol):
    """Takes one pod by total score."""

    def pick(self, candidates: Candidates, totals: Column) -> int:
        """Index of one of the candidates, of which there is at least one. Changes nothing."""

    def note(self, slot: int) -> None:
        """The pod with this slot was taken."""


class WeightedScorer(NamedTuple):
    """A scorer and how much it counts."""

    scorer: Scorer
    weight: float = 1.0


class Judgement(NamedTuple):
    """A policy's view of its candidates."""

    scores: tuple[Column, ...]  # of each scorer, unweighted
    totals: Column  # weighted sums


class Policy:
    """Sums weighted scores, then picks. Candidates were filtered before: who is unfit is not among them."""

    def __init__(self, name: str, scorers: Sequence[WeightedScorer], picker: Picker) -> None:
        self.name = name  # as it was configured
        self._scorers = tuple(scorers)
        self._picker = picker

    @property
    def scorer_names(self) -> list[str]:
        """In the order of a judgement's scores."""
        return [scorer.name for scorer, _ in self._scorers]

    def judge(self, candidates: Candidates) -> Judgement:
        """Score them all."""
        scores = tuple(scorer.score(candidates) for scorer, _ in self._scorers)
        weighted = (weight * column for column, (_, weight) in zip(scores, self._scorers, strict=True))
        totals: Column = reduce(np.add, weighted)
        return Judgement(scores, totals)

    def pick(self, candidates: Candidates, judgement: Judgement) -> int:
        """Index of the candidate to use, of at least one. The same one is picked again until something is noted."""
        return self._picker.pick(candidates, judgement.totals)

    def note(self, slot: int) -> None:
        """A request was sent to the pod with this slot."""
        self._picker.note(slot)
