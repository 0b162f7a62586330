"""Shared fields of the bodies of completions and of chats: OpenAI's, and those of vLLM and SGLang.

A field that Baton cannot honour is refused by name rather than ignored, unless its value asks for nothing, see
`router.gateway.bodies.fields`.

Every field is bounded, see `router.requests.bounds`. Parsing holds the event loop, so how many JSON values a body may
have is checked before; fields of any type are kept as they were sent.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError
from common.types import Constraint, SamplingParams
from common.types.parameters import TEXTS, TOKEN_IDS, ParameterField, parameters_of
from router.gateway.bodies.beam_options import (
    NOT_WITH_BEAMS,
    BeamOptions,
    beam_options,
    check_no_rivals,
    not_with_beams,
)
from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.fields import REFUSED_BY_BOTH, RefusedFields, with_fields
from router.gateway.bodies.messages import Name
from router.gateway.bodies.stream_options import StreamOptions, UsageReports
from router.gateway.bodies.structured import (
    FORMAT,
    ResponseFormat,
    StructuredOutputs,
    constraint_of_format,
    constraint_of_structured,
)
from router.requests.bounds import (
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_MODEL_CHARS,
    MAX_SALT_CHARS,
    MAX_SESSION_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
)
from router.requests.request import STRUCTURED
from router.requests.terms import Terms

_ALL_TOKENS = -1  # top_k, as vLLM has it; 0 is the same
_ANY_SEED = -1  # as vLLM has it: no seed; other negative ones are seeds

ModelName = Annotated[str, Meta(max_length=MAX_MODEL_CHARS)]
_Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
_Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
_Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
_Tag = Annotated[str, Meta(max_length=MAX_METADATA_CHARS)]
Metadata = Annotated[dict[_Tag, _Tag], Meta(max_length=MAX_METADATA)]


def is_sent(value: Raw) -> bool:
    """Whether a field kept as it was sent has a value."""
    return bytes(value) not in (b"", b"null")


def _http_type(field: ParameterField) -> Any:
    """null is the same as to leave it out."""
    kind = field.kind
    if kind in (TOKEN_IDS, TEXTS):
        kind = list[int] if kind == TOKEN_IDS else list[str]
    if field.parameter.max_entries is not None:
        kind = Annotated[kind, Meta(max_length=field.parameter.max_entries)]
    return Annotated[kind | None, Meta(description=field.parameter.doc)]


# num_logprobs not under its own name: bodies of completions and of chats ask for log probabilities in different ways.
# Those with fields of their own are declared below.
_PARAMETERS = {
    name: field
    for name, field in parameters_of(SamplingParams).items()
    if field.parameter.option_tag is not None and name != "num_logprobs" and not field.is_struct
}
_LISTS = [name for name, field in _PARAMETERS.items() if field.kind in (TOKEN_IDS, TEXTS)]

_values_of_parameters = operator.attrgetter(*_PARAMETERS)

if TYPE_CHECKING:

    class _BothFields(msgspec.Struct, kw_only=True):
        prompt_logprobs: int | None = None  # those that are used by name
else:
    _BothFields = with_fields(
        msgspec.defstruct(
            "_Parameters",
            [(name, _http_type(field), None) for name, field in _PARAMETERS.items()],
            kw_only=True,
            forbid_unknown_fields=True,
        ),
        REFUSED_BY_BOTH,
    )


class GenerationBody(_BothFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of both kinds of completion."""

    model: Annotated[ModelName | None, Meta(description="A served model's name; default: the only one's.")] = None
    n: Annotated[int | None, Meta(description="Answers to each prompt; default 1.")] = None
    stream: Annotated[bool | None, Meta(description="Answer in server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="How to stream; see below.")] = None
    stop: Annotated[
        _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None,
        Meta(description="Texts that end the answer and are not part of it."),
    ] = None

    response_format: Annotated[
        Raw,
        Meta(
            description="OpenAI's form of a constraint: `type` is `text`, `json_object`, `json_schema` or "
            "`structural_tag`; see [structured output](structured_output.md)."
        ),
    ] = field(default_factory=Raw)
    best_of: Annotated[
        int | None,
        Meta(
            description="Answers that are generated, of which the n with the highest log probability are returned; see "
            "below. With `use_beam_search`: beams that are followed."
        ),
    ] = None

    # Beyond OpenAI's API, with the names that vLLM gave them.
    structured_outputs: Annotated[
        Raw,
        Meta(
            description="vLLM's form: one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`; "
            "see [structured output](structured_output.md)."
        ),
    ] = field(default_factory=Raw)
    use_beam_search: Annotated[bool | None, Meta(description="Search for the n most likely answers; see below.")] = None
    length_penalty: Annotated[
        float | None, Meta(description="Of beam search: scores are divided by length to this power; default 1.")
    ] = None
    early_stopping: Annotated[
        bool | Name | None, Meta(description="Of beam search: true, false or `never`, as of `transformers`.")
    ] = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Answer with the token ids of the prompt and of each choice, too.")
    ] = None
    request_id: Annotated[Name | None, Meta(description="Id of the answer; default: a random one.")] = None
    priority: Annotated[int | None, Meta(description="Lower goes first while requests wait; default 0.")] = None
    cache_salt: Annotated[_Salt | None, Meta(description="Requests with different salts never share cached KV.")] = None
    session_id: Annotated[
        _Session | None,
        Meta(description="Requests of one session go to the same pods where the policy says so; else `x-session-id`."),
    ] = None
    prompt_cache_key: Annotated[_Session | None, Meta(description="Names the session if nothing else does.")] = None

    # Baton's own.
    kv_failure_policy: Annotated[
        Name | None, Meta(description="If the prompt's KV does not come: `recompute` or `fail`; default: the router's.")
    ] = None
    dry_run: Annotated[
        bool | None, Meta(description="Answer with the route that the request would take; for operators.")
    ] = None

    # Without effect, see IGNORED_BY_BOTH.
    user: _Session | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_retention: Name | None = None
    return_mm_kwargs: bool | None = None

    @property
    def echoed(self) -> Mapping[str, Any]:
        """Fields for an answer that repeats them."""
        return {}

    @property
    def usage_reports(self) -> UsageReports:
        """The places in a stream that have token counts."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return UsageReports.NONE
        return UsageReports.EVERY_CHUNK if options.continuous_usage_stats else UsageReports.LAST_CHUNK

    @property
    def wants_event_ids(self) -> bool:
        """True if the body asks for a stream that can be resumed."""
        return self.stream_options is not None and bool(self.stream_options.include_event_ids)

    @property
    def num_candidates(self) -> int:
        """Answers to each prompt that are generated, or beams that are followed, of which n are returned."""
        n = 1 if self.n is None else self.n
        return n if self.best_of is None or n < 1 else self.best_of

    def _check_no_beams(self) -> None:
        n = 1 if self.n is None else self.n
        if self.num_candidates < n:
            raise InvalidRequestError(f"best_of must be at least n ({n}), got {self.best_of}", param="best_of")
        if self.stream and self.num_candidates > n:
            raise InvalidRequestError("best_of greater than n needs stream to be false", param="best_of")
        if self.length_penalty not in (None, 1.0, 0) or self.early_stopping not in (None, False):
            name = "early_stopping" if self.length_penalty in (None, 1.0, 0) else "length_penalty"
            raise InvalidRequestError(f"{name} needs use_beam_search to be true", param=name)

    def beams(self) -> BeamOptions | None:
        """How to search; None: answers are sampled. Raises InvalidRequestError for what cannot be searched for."""
        if not self.use_beam_search:
            return None
        check_no_rivals({name: getattr(self, name, None) for name in NOT_WITH_BEAMS})
        if self._constraint() is not None:
            raise not_with_beams(self.constraint_name)
        if self.early_stopping not in (None, True, False, "never"):
            raise InvalidRequestError("early_stopping must be true, false or never", param="early_stopping")
        return beam_options(
            1 if self.n is None else self.n,
            self.num_candidates,
            1.0 if self.length_penalty is None else self.length_penalty,
            "never" if self.early_stopping == "never" else bool(self.early_stopping),
        )

    def with_session(self, terms: Terms) -> Terms:
        """The terms of the headers, with the session that the body names, if any does."""
        return replace(terms, session=self.session_id or terms.session or self.prompt_cache_key or "")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def give(self, **parameters: Any) -> None:
        """Sets sampling parameters; None: they are not given."""
        for name, value in parameters.items():
            setattr(self, name, value)

    def parameters(self, num_logprobs: int | None) -> dict[str, Any]:
        """The fields of SamplingParams that are given. Ranges are not checked here."""
        values = _values_of_parameters(self)
        given = {name: value for name, value in zip(_PARAMETERS, values, strict=True) if value is not None}
        if given.get("top_k") == _ALL_TOKENS:
            given["top_k"] = 0
        if given.get("seed") == _ANY_SEED:
            del given["seed"]
        for name in _LISTS:
            if name in given:
                given[name] = tuple(given[name])
        if num_logprobs is not None:
            given["num_logprobs"] = num_logprobs
        constraint = self._constraint()
        if constraint is not None:
            given["structured_outputs"] = constraint
        return given

    @property
    def constraint_name(self) -> str:
        """The field that constrains the answer, if one does."""
        return STRUCTURED if is_sent(self.structured_outputs) else FORMAT

    def _constraint(self) -> Constraint | None:
        """Raises InvalidRequestError."""
        constraint = of_format = None
        if is_sent(self.structured_outputs):
            with request_errors(STRUCTURED, struct=StructuredOutputs):
                constraint = constraint_of_structured(self.structured_outputs)
        if is_sent(self.response_format):
            with request_errors(FORMAT, struct=ResponseFormat):
                of_format = constraint_of_format(self.response_format)
        if constraint is not None and of_format is not None:
            raise InvalidRequestError(f"give {FORMAT} or {STRUCTURED}, not both", param=STRUCTURED)
        return constraint or of_format

    def check(self, refused: RefusedFields) -> None:
        """Raises InvalidRequestError for what asks for something that Baton does not do, or makes no sense together."""
        refused.check(self)
        if not self.use_beam_search:
            self._check_no_beams()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs needs stream to be false", param="prompt_logprobs")
        if not (self.stream or self.stream_options is None or self.stream_options.is_idle):
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
