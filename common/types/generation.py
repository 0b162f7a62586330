"""The parameters and the results of a generation."""

from __future__ import annotations

import enum
from typing import Annotated, NewType

import msgspec

from common.types.constraint import Constraint
from common.types.parameters import Parameter, Range

MAX_LOGPROBS = 20

RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)


class FinishReason(enum.IntEnum):
    """Why a generation ended. Values equal baton.v1.FinishReason, which has no HANDOFF: that one stays in the pods."""

    STOP = 1  # end-of-sequence or stop token, which is the last one; to clients also a stop string, and COMPLETE
    LENGTH = 2  # max_tokens or the context length
    ABORT = 3  # the client or a deadline ended it
    ERROR = 4  # it failed
    HANDOFF = 5  # producer: continued on the decode pod
    COMPLETE = 6  # its grammar allows no further token; the last one is part of the answer
    TOOL_CALLS = 7  # to clients, from routers: STOP of an answer that calls tools

    @property
    def label(self) -> str:
        """Lower-case name: metric label and OpenAI's `finish_reason`."""
        return self.for_clients.name.lower()

    @property
    def for_clients(self) -> FinishReason:
        """The reason that clients are given."""
        return FinishReason.STOP if self is FinishReason.COMPLETE else self


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when generation ends. Ranges are checked at the edge (router, LLM).

    The table of sampling parameters: see `common.types.parameters`.
    """

    temperature: Annotated[
        float, Parameter("0 is greedy; otherwise logits are divided by it.", Range(0, 2), 1, 1, "double")
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter("Nucleus mass; 1 keeps every token.", Range(0, 1, low_included=False), 2, 2, "double"),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            "Tokens kept, by rank; 0 keeps every token.", Range(0, 2**32 - 1, integer=True), 3, 3, "uint32"
        ),  # travels as uint32
    ] = 0
    min_p: Annotated[
        float, Parameter("Tokens below min_p * max probability are dropped.", Range(0, 1), 4, 4, "double")
    ] = 0.0
    seed: Annotated[  # None: the edge (router, LLM) draws one; in an engine None counts as 0
        int | None,
        Parameter(
            "The same seed gives the same answer; a negative one counts modulo 2^64; default: random.",
            Range(-(2**63), 2**64 - 1, integer=True), 5, 5, "uint64",
        ),
    ] = None  # fmt: skip
    max_tokens: Annotated[int, Parameter("Most output tokens.", Range(1, integer=True), 6, 6, "uint32")] = 16
    min_tokens: Annotated[
        int,
        Parameter(
            "Output tokens before which end-of-sequence and stop tokens are masked.",
            Range(0, integer=True), 7, 7, "uint32",
        ),
    ] = 0  # fmt: skip
    stop_token_ids: Annotated[
        tuple[int, ...],
        Parameter("Token ids that end the generation, besides the model's own.", None, 8, 8, "uint32", max_entries=256),
    ] = ()
    ignore_eos: Annotated[
        bool,
        Parameter("True: the model's end-of-sequence tokens do not end the generation.", None, 9, 10, "bool"),
    ] = False
    num_logprobs: Annotated[
        int | None,
        Parameter(
            "Most likely alternatives reported per token; absent: no logprobs at all.",
            Range(0, MAX_LOGPROBS, integer=True), 10, 11, "uint32",
        ),
    ] = None  # fmt: skip
    presence_penalty: Annotated[
        float,
        Parameter("Subtracted once from the logit of each token already generated.", Range(-2, 2), 11, 12, "double"),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "Subtracted per occurrence from the logit of each token already generated.",
            Range(-2, 2), 12, 13, "double",
        ),
    ] = 0.0  # fmt: skip
    repetition_penalty: Annotated[
        float,
        Parameter(  # any of these leaves logits finite
            "Divides (multiplies) positive (negative) logits of tokens seen; 1 is off.",
            Range(0.01, 100), 13, 14, "double",
        ),
    ] = 1.0  # fmt: skip
    logit_bias: Annotated[
        dict[int, float] | None,
        Parameter(
            "Added to the logits of these token ids, before penalties.",
            Range(-100, 100), 20, 20, "double", max_entries=8192,
        ),
    ] = None  # fmt: skip
    allowed_token_ids: Annotated[
        tuple[int, ...],
        Parameter(
            "Tokens are chosen among these ids only; empty: among all.", None, 21, 21, "uint32", max_entries=8192
        ),
    ] = ()
    bad_words: Annotated[
        tuple[str, ...],
        Parameter(
            "Texts whose last token is masked where the answer's tokens end with those before it, with and without a "
            "space in front.",
            None, None, 22, "string", max_entries=128, max_chars=256,
        ),
    ] = ()  # fmt: skip
    bad_word_token_ids: Annotated[
        tuple[tuple[int, ...], ...],
        Parameter(
            "`bad_words` as the tokenizer spells them.", None, 22, None, "TokenIds", max_entries=256, max_token_ids=8192
        ),
    ] = ()
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            "Log probabilities of the prompt's tokens, and so many most likely ones at each position; for them the "
            "prompt is computed even if it is cached.",
            Range(0, MAX_LOGPROBS, integer=True), 23, 23, "uint32",
        ),
    ] = None  # fmt: skip
    vllm_xargs: Annotated[
        dict[str, str | int | float | bool] | None,
        Parameter(
            "Arguments of logits processors, which the operator installs; over gRPC, values are JSON.",
            None, 24, 28, "string", max_entries=16, max_chars=256,
        ),
    ] = None  # fmt: skip
    skip_special_tokens: Annotated[
        bool, Parameter("Special tokens are left out of the text.", None, None, 24, "bool")
    ] = True
    spaces_between_special_tokens: Annotated[
        bool,
        Parameter(
            "False: of special tokens in a row, those after the first are spelled without the spaces that some "
            "tokenizers put between tokens.",
            None, None, 25, "bool",
        ),
    ] = True  # fmt: skip
    include_stop_str_in_output: Annotated[
        bool,
        Parameter("The stop text or stop token that ended the answer is part of its text.", None, None, 26, "bool"),
    ] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        Parameter(
            "Only the last so many tokens of the prompt are taken; -1: as many as the context has room for.",
            Range(-1, integer=True), None, 27, "int32",
        ),
    ] = None  # fmt: skip

    thinking_token_budget: Annotated[
        int | None,
        Parameter(
            "Most tokens of reasoning, which is closed after them, see docs/tools.md; -1: no bound.",
            Range(-1, 2**31 - 1, integer=True), 25, 29, "int32",
        ),
    ] = None  # fmt: skip
    thinking_start_token_ids: Annotated[
        tuple[int, ...],
        Parameter(
            "Tokens that open reasoning; empty: the answer begins within it.", None, 26, None, "uint32", max_entries=16
        ),
    ] = ()
    thinking_end_token_ids: Annotated[
        tuple[int, ...],
        Parameter("Tokens that close reasoning; empty: it has no bound.", None, 27, None, "uint32", max_entries=16),
    ] = ()

    speculative: Annotated[
        bool,
        Parameter(
            "False: nothing is proposed for the answer, where pods have the setting `speculative`; its tokens are the "
            "same, see docs/speculation.md.",
            None, 31, 31, "bool",
        ),
    ] = True  # fmt: skip

    structured_outputs: Annotated[
        Constraint | None,
        Parameter("Text that the answer must be: a JSON schema, a grammar and so on.", None, 30, 30, "Constraint"),
    ] = None

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def kernels_can_sample(self) -> bool:
        """True if, without a grammar, the next token follows from logits, tokens so far, seed and position by
        penalties, temperature, top-k, top-p and min-p alone, and no log probability is asked for."""
        return (
            self.num_logprobs is None
            and not (self.min_tokens or self.logit_bias or self.allowed_token_ids or self.bad_word_token_ids)
            and not self.thinking_end_token_ids
        )

    @property
    def is_simple(self) -> bool:
        """True if the same holds without penalties, so that the next token does not depend on those so far."""
        return self.kernels_can_sample and not self.is_penalised

    @property
    def is_penalised(self) -> bool:
        """True if tokens so far change logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def settled_seed(self) -> int:
        """Key of the counter-based generator: an unsigned 64-bit integer."""
        return 0 if self.seed is None else self.seed % 2**64


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities at one position, natural logarithm, as the model computed them: before biases, penalties, masks
    and temperature."""

    sampled: float  # of the output token, or of the prompt's
    top: list[tuple[int, float]]  # (token id, logprob), best first
    rank: int = 0  # of the prompt's token, from 1 on; 0: of an output token, where it is not computed


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One output token."""

    token_id: int
    logprobs: Logprobs | None = None
