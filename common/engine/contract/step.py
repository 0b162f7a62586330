"""The scheduler's decisions for a step, and the model runner's answer. Pure data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from common.types import ExtraKey, Logprobs, PoolingParams, PromptPositions, RequestId, SampledToken, SamplingParams

Fence = int
"""The number of a step that its workers' devices may not have finished: they count those that compute something from 1
on. A connector must not touch a transfer's blocks before it is over; see Fences. 0: no step."""


class NoToken(enum.Enum):
    """Why a request whose last token was computed has no next one."""

    NOT_YET = enum.auto()  # its grammar's mask is late: its last token is to be computed again
    NON_FINITE = enum.auto()  # no logit is finite
    MASKED = enum.auto()  # its parameters exclude every token
    COMPLETE = enum.auto()  # its grammar allows none: the answer is whole
    MISMATCH = enum.auto()  # its output so far does not follow its grammar
    CONTRADICTION = enum.auto()  # its grammar allows only what other parameters exclude
    TOO_SLOW = enum.auto()  # following its grammar takes too long

    @property
    def token_id(self) -> int:
        """A number in the place of a SampledToken's."""
        return 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner does not know: fresh, resumed after preemption, or arrived by handoff."""

    request_id: RequestId
    token_ids: list[int]  # prompt and output so far
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[list[int]]  # of each KV group; 0 stands for blocks that are not needed any more
    num_computed_tokens: int
    wants_prompt_logprobs: bool = False  # of the prompt's tokens but the first, as they are computed
    is_producer: bool = False  # what is known after its prompt is handed over
    positions: PromptPositions | None = None  # None: the tokens' places
    root: bytes = b""  # of its block hashes, see Request: tenants have different ones
    extra_keys: list[ExtraKey] = field(default_factory=list)  # of its block hashes
    adapter: bytes = b""  # digest of the adapter that it is computed with; empty: none
    pooling: PoolingParams | None = None  # it samples nothing, and ends with its prompt


class PromptLogprobs(NamedTuple):
    """Log probabilities of a run of prompt tokens."""

    start: int  # index in the prompt of the first, from 1 on: there are none of the first token
    entries: list[Logprobs]


class Asked(NamedTuple):
    """The work that a draft model may do once a step has sampled."""

    num_drafts: int = 0  # of each request, at most
    catch_up_s: float = 0.0  # seconds for tokens that it has not computed yet


NOTHING_ASKED = Asked()


class Drafting(NamedTuple):
    """The work that a draft model has done after a step."""

    num_passes: int = 0  # each of which gives a draft
    num_rows: int = 0  # in the largest of them
    proposing_s: float = 0.0  # of all passes
    num_caught_up: int = 0  # tokens that it had not computed when it should have, such as prompts from elsewhere
    catch_up_s: float = 0.0
    num_unseen: int = 0  # tokens of requests that came, which a head does without as it has no features of them
    has_failed: bool = False  # too often: it does nothing any more

    @property
    def seconds(self) -> float:
        """The seconds of the step, in which the model itself computed nothing."""
        return self.proposing_s + self.catch_up_s


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. A request samples a token, or is pooled, if and only if its scheduled tokens reach its last one. One
    with drafts computes that and the drafts, as if they were its next tokens, and samples after each: what it samples
    holds up to, and with, the first token that is not the draft.

    Of a request that the runner knows only the new blocks are said: it has sampled the tokens itself, and what a step
    schedules counts as computed in the next.
    """

    new_requests: list[NewRequest] = field(default_factory=list)
    # Of each KV group, appended to tables that the runner knows.
    new_block_ids: dict[RequestId, list[list[int]]] = field(default_factory=dict)
    num_scheduled_tokens: dict[RequestId, int] = field(default_factory=dict)  # in batch order
    total_num_scheduled_tokens: int = 0
    work: float = 0.0  # the same, prompts weighed by what their attention takes; see `common.step_budget`
    num_context_tokens: int = 0  # whose KV is read by the requests that compute one token
    dropped_request_ids: list[RequestId] = field(default_factory=list)  # finished or preempted: forget them first
    drafts: dict[RequestId, list[int]] = field(default_factory=dict)  # token ids; among the scheduled tokens
    forgets_outputs: bool = False  # of requests dropped so far: a proposer keeps nothing of them
    asked: Asked = NOTHING_ASKED  # of the draft model, if there is one
    # Of each engine in this step, if engines step together; an engine without any computes for the others only.
    tokens_by_engine: list[int] = field(default_factory=list)


Outcome = list[SampledToken] | NoToken  # at least one token, in order; one more than drafts were right


def accepted(drafts: Sequence[int], samples: Sequence[SampledToken | NoToken]) -> Outcome:
    """Returns the valid samples of a request: the first after its last token, and one after each of the drafts."""
    tokens: list[SampledToken] = []
    for number, sample in enumerate(samples):
        if isinstance(sample, NoToken):
            return tokens or sample
        tokens.append(sample)
        if number < len(drafts) and sample.token_id != drafts[number]:
            break
    return tokens


def outcomes_of(
    request_ids: Sequence[RequestId], samples: Sequence[SampledToken | NoToken]
) -> dict[RequestId, Outcome]:
    """Outcomes of requests that have sampled one token at most."""
    return {
        request_id: sample if sample.__class__ is NoToken else [sample]  # type: ignore[list-item]
        for request_id, sample in zip(request_ids, samples, strict=True)
    }


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The results of a step."""

    outcomes: dict[RequestId, Outcome] = field(default_factory=dict)  # of requests whose last token was computed
    prompt_logprobs: dict[RequestId, PromptLogprobs] = field(default_factory=dict)
    pooled: dict[RequestId, bytes] = field(default_factory=dict)  # see RequestOutput; of requests whose prompt is over
    fence: Fence = 0  # after which the KV of the step's tokens is written
    drafts: dict[RequestId, list[int]] = field(default_factory=dict)  # what may come after the outcomes; see Proposer
    proposer_failure: str = ""  # what went wrong with the proposer, see its guard
    drafting: Drafting | None = None  # by a draft model

    def without_drafts(self) -> ModelRunnerOutput:
        """Returns the part that ranks which sample the same have in common."""
        return replace(self, drafts={}, proposer_failure="", drafting=None)


class RunningStep(Protocol):
    """A step that was submitted."""

    def result(self) -> ModelRunnerOutput:
        """Its outcome; waits for it. Called once, in the order of the steps."""


class FinishedStep(NamedTuple):
    """A RunningStep that was over at once."""

    outcome: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """See RunningStep."""
        return self.outcome
