"""The simulator's view of one kind of pod: how long its steps and handoffs take, and how large its cache is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

DEFAULT_TARGET_ITL_S = 0.05  # that of pods with a connector


class Step(NamedTuple):
    """The work of one step."""

    prompt_tokens: int  # of prompts, those that complete one included
    num_decoding: int  # requests that get one further token
    num_sequences: int  # requests of the step, whatever they get
    decode_context: int  # tokens of KV that the decoding requests read
    attended: float  # pairs of a prompt token and a token before it
    num_drafts: float = 0.0  # tokens that are verified for the decoding requests


class StepModel(Protocol):
    """How long steps take."""

    def seconds(self, step: Step) -> float:
        """Returns the seconds of a step."""


class Roofline(NamedTuple):
    """A step takes its overheads, and the longer of moving its data and computing its tokens."""

    overhead_s: float  # of any step
    weights_s: float  # to read the weights once
    context_token_s: float  # to read the KV of one token of one sequence that decodes
    token_s: float  # to compute one token
    sequence_s: float  # per sequence of the step, whatever its tokens
    attention_s: float  # per token computed and token of its context

    def seconds(self, step: Step) -> float:
        """See StepModel."""
        moving_s = self.weights_s + step.decode_context * self.context_token_s
        num_tokens = step.prompt_tokens + step.num_decoding + step.num_drafts
        computing_s = num_tokens * self.token_s + step.attended * self.attention_s
        return self.overhead_s + step.num_sequences * self.sequence_s + max(moving_s, computing_s)


class Drafts(NamedTuple):
    """The gain of speculative decoding, on average over all that decodes."""

    tokens_per_step: float = 1.0  # that a decoding request gets
    acceptance: float = 1.0  # share of the drafts that are right

    @property
    def per_step(self) -> float:
        """Drafts that a step verifies for each decoding request."""
        return (self.tokens_per_step - 1) / self.acceptance


NO_DRAFTS = Drafts()


class Hardware(NamedTuple):
    """One kind of pod."""

    name: str
    steps: StepModel
    handoff_s: float  # of a handoff, whatever its size
    handoff_token_s: float  # to move one token's KV
    num_blocks: int
    block_size: int  # tokens; larger than usual, so that a simulation has fewer of them
    max_num_batched_tokens: int
    max_num_seqs: int
    target_itl_s: float = DEFAULT_TARGET_ITL_S
    message_s: float = 0.0005  # between router and pod
    request_s: float = 0.0  # of router and pods for one request, beside its steps
    drafts: Drafts = NO_DRAFTS
