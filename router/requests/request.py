"""The request of a front (HTTP, gRPC), and the valid, tokenised request that comes of it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, NamedTuple

import msgspec

from common.observability.tracing.context import TraceContext
from common.types import AdapterName, ExtraKey, FinishReason, PoolingParams, SamplingParams
from router.requests.terms import Terms

KVFailurePolicy = Literal["recompute", "fail"]
STRUCTURED = "structured_outputs"  # field of SamplingParams; pods name it in errors of constraints

_CHARS_PER_MESSAGE = 20  # that take as long to tokenise as a message takes to render


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str
    add_special_tokens: bool = True

    @property
    def size(self) -> int:
        """Characters, roughly: how long it takes to tokenise."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Already tokenised by the client."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    num_chars: int  # of all messages, roughly
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # beside those that the template writes
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form

    @property
    def size(self) -> int:
        """Characters, roughly: how long it takes to render and tokenise."""
        return self.num_chars + _CHARS_PER_MESSAGE * len(self.messages)


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts that a classifier sees together."""

    first: str
    second: str

    @property
    def size(self) -> int:
        """Characters: how long it takes to tokenise."""
        return len(self.first) + len(self.second)


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PairPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A request as a client made it, in one form for all fronts. Nothing in it is checked yet."""

    request_id: str
    model: str | None  # None: the served model, if there is only one
    prompt: Prompt
    prompt_param: str  # what the front calls the prompt, for errors
    sampling: Mapping[str, Any]  # fields of SamplingParams that the client gave, but for the two below
    max_tokens: int | None  # None: the model's default, else default_max_tokens
    default_max_tokens: int | None  # None: what is left of the context
    seed: int | None  # None: random
    pooling: PoolingParams | None = None  # what is wanted of the prompt instead of an answer
    stops: tuple[str, ...] = ()
    cache_salt: str = ""
    extra_keys: tuple[ExtraKey, ...] = ()  # of the tokenised prompt
    priority: int = 0
    kv_failure_policy: str | None = None  # None: the router's setting
    spelled_ids: frozenset[int] = frozenset()  # special tokens that are text all the same
    has_echo: bool = False  # the answer begins with the prompt, so that it may be all of it
    terms: Terms = field(default_factory=Terms)
    names: Mapping[str, str] = field(default_factory=dict)  # field of SamplingParams -> what the front calls it
    arrived_at: float  # time.monotonic()


class SpeculationCounts(NamedTuple):
    """Tokens of an answer that pods guessed and then computed; see docs/speculation.md."""

    num_verified: int = 0
    num_accepted: int = 0  # verified drafts that were right

    def plus(self, num_verified: int, num_accepted: int) -> SpeculationCounts:
        """Returns the counts with further ones."""
        return SpeculationCounts(self.num_verified + num_verified, self.num_accepted + num_accepted)

    @staticmethod
    def sum(counts: Iterable[SpeculationCounts]) -> SpeculationCounts:
        """Returns the counts of several answers together."""
        return reduce(lambda total, each: total.plus(*each), counts, NO_DRAFTS)


NO_DRAFTS = SpeculationCounts()


@dataclass(frozen=True, slots=True)
class Resumption:
    """The place at which an answer goes on of which a client has had a part."""

    num_delivered: int  # leading output tokens that the client has; their text is not sent again
    checksum: int  # CRC-32 of these tokens, as array("I") holds them
    known_token_ids: Sequence[int] = ()  # leading output tokens that need not be computed again
    finish_reason: FinishReason | None = None  # set if these tokens are all
    ended: bool = False  # the client has all of it
    speculation: SpeculationCounts = NO_DRAFTS  # drafts verified so far


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation, or one prompt that is pooled, valid and ready to be dispatched."""

    request_id: str  # as the client knows it
    model_id: int  # see ServedModel
    prompt_token_ids: list[int]
    block_hashes: bytes  # 16 bytes per full block of the prompt, in order
    sampling: SamplingParams
    pooling: PoolingParams | None = None  # None: it is a generation
    stops: tuple[str, ...]
    cache_salt: str
    adapter: AdapterName | None = None  # as it was when the request came; None: the model alone
    extra_keys: tuple[ExtraKey, ...] = ()
    priority: int
    kv_failure_policy: KVFailurePolicy
    terms: Terms
    continues_prompt: bool  # the answer goes on where the prompt's text ends, as opposed to a chat's
    has_no_output: bool = False  # max_tokens was 0: the one token that pods compute is dropped
    arrived_at: float  # time.monotonic()
    tokenize_at: float = 0.0  # when that began; time.monotonic()
    tokenize_s: float = 0.0  # how long it took
    deadline: float  # time.monotonic()
    resumption: Resumption | None = None  # None: it begins at the beginning
    spelled_ids: frozenset[int] = frozenset()  # special tokens that are text all the same
    is_part: bool = False  # of what a client asked for: one token of a beam search

    @property
    def tenant_name(self) -> str:
        """The tenant's name; empty: it needs no API key."""
        return self.terms.tenant.name

    @property
    def adapter_digest(self) -> bytes:
        """The digest of its adapter; empty: it has none."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def trace(self) -> TraceContext | None:
        """The span of the client's request; None: it is not traced, as parts are not."""
        return None if self.is_part else self.terms.trace

    def identity(self) -> bytes:
        """The same for repeats of a request, whatever their ids and seeds."""
        digest = hashlib.blake2b(array("Q", self.prompt_token_ids).tobytes(), digest_size=16)
        digest.update(self.adapter_digest)
        digest.update(msgspec.msgpack.encode(self.extra_keys))
        digest.update(msgspec.msgpack.encode(msgspec.structs.replace(self.sampling, seed=None)))
        if self.pooling is not None:
            digest.update(msgspec.msgpack.encode(self.pooling))
        return digest.digest()
