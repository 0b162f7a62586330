"""Bodies of the OpenAI-style requests, and what becomes of them: Drafts.

Fields beyond OpenAI's are those that clients of vLLM and SGLang use. A field that Baton cannot honour is refused by
name rather than ignored, unless its value asks for nothing, see `router.gateway.fields`.

Every field is bounded, see `router.requests.bounds`. Parsing holds the event loop, so how many JSON values a body may
have is checked before; fields of any type are kept as they were sent.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError
from common.types import Constraint, SamplingParams
from common.types.parameters import TEXTS, TOKEN_IDS, ParameterField, parameters_of
from router.gateway.beams import NOT_WITH_BEAMS, BeamOptions, beam_options, check_no_rivals, not_with_beams
from router.gateway.chat_prompts import (
    chat_prompt,
    check_continuation,
    constraint_of_calls,
    decode_variables,
    reply_options_of,
)
from router.gateway.decoding import request_errors
from router.gateway.fields import (
    REFUSED_BY_BOTH,
    REFUSED_BY_CHATS,
    REFUSED_BY_COMPLETIONS,
    RefusedFields,
    with_fields,
)
from router.gateway.messages import Message, Name
from router.gateway.reply import ReplyOptions
from router.gateway.stream_options import StreamOptions, UsageReports
from router.gateway.structured import (
    FORMAT,
    STRUCTURED,
    ResponseFormat,
    StructuredOutputs,
    constraint_of_format,
    constraint_of_structured,
)
from router.gateway.tools.request import ToolChoice, read_tool_choice, read_tools
from router.requests.bounds import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_MODEL_CHARS,
    MAX_SALT_CHARS,
    MAX_SESSION_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
)
from router.requests.request import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from router.requests.terms import Terms

_DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy API has it
_ALL_TOKENS = -1  # top_k, as vLLM has it; 0 is the same
_ANY_SEED = -1  # as vLLM has it: no seed; other negative ones are seeds

ModelName = Annotated[str, Meta(max_length=MAX_MODEL_CHARS)]
_Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
_Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
_Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
_Tag = Annotated[str, Meta(max_length=MAX_METADATA_CHARS)]
Metadata = Annotated[dict[_Tag, _Tag], Meta(max_length=MAX_METADATA)]


def _is_sent(value: Raw) -> bool:
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


class _GenerationBody(_BothFields, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completion have."""

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
        """Where a stream has token counts."""
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
        return STRUCTURED if _is_sent(self.structured_outputs) else FORMAT

    def _constraint(self) -> Constraint | None:
        """Raises InvalidRequestError."""
        constraint = of_format = None
        if _is_sent(self.structured_outputs):
            with request_errors(STRUCTURED, struct=StructuredOutputs):
                constraint = constraint_of_structured(self.structured_outputs)
        if _is_sent(self.response_format):
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


if TYPE_CHECKING:
    _CompletionFields = _GenerationBody
else:
    _CompletionFields = with_fields(_GenerationBody, REFUSED_BY_COMPLETIONS)

_REFUSED_FIELDS = RefusedFields(REFUSED_BY_BOTH + REFUSED_BY_COMPLETIONS)


class CompletionBody(_CompletionFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {"messages": "/v1/chat/completions"}  # fields of the other endpoint

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, token ids, or a list of either: one answer each, or n."),
    ]
    echo: Annotated[
        bool | None,
        Meta(description="Put the prompt before the answer, and log probabilities of its tokens before the answer's."),
    ] = None
    logprobs: Annotated[int | None, Meta(description="Log probabilities of so many most likely tokens.")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin the prompt as the tokenizer says; default true.")
    ] = None

    def reply_options(self, prompt: Prompt) -> ReplyOptions:
        """An answer is all text."""
        return ReplyOptions(separates_reasoning=False)

    @property
    def num_prompts(self) -> int:
        """How many `prompts` there will be; costs nothing."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return 1
        return len(self.prompt)

    def prompts(self) -> list[Prompt]:
        """One or many: a text, token ids, a list of texts, a list of lists of token ids."""
        special = self.add_special_tokens is not False
        if isinstance(self.prompt, str):
            return [TextPrompt(self.prompt, special)]
        if not self.prompt:
            raise InvalidRequestError("prompt is empty", param="prompt")
        if all(isinstance(each, int) for each in self.prompt):
            return [TokenPrompt([each for each in self.prompt if isinstance(each, int)])]
        prompts: list[Prompt] = []
        for each in self.prompt:
            if isinstance(each, int) or type(each) is not type(self.prompt[0]):
                raise InvalidRequestError("prompt mixes texts and token ids", param="prompt")
            prompts.append(TextPrompt(each, special) if isinstance(each, str) else TokenPrompt(each))
        return prompts

    def drafts(self, request_id: str, arrived_at: float, terms: Terms) -> list[Draft]:
        """One draft per prompt."""
        self.check(_REFUSED_FIELDS)
        prompts = self.prompts()
        given = self.parameters(self.logprobs)
        names = {"num_logprobs": "logprobs"}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self.logprobs
            names["prompt_logprobs"] = "logprobs"
        max_tokens, seed = given.pop("max_tokens", None), given.pop("seed", None)
        return [
            Draft(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-p{index}",
                model=self.model,
                prompt=prompt,
                prompt_param="prompt" if len(prompts) == 1 else f"prompt[{index}]",
                sampling=given,
                max_tokens=max_tokens,
                default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
                seed=seed,
                stops=self.stops,
                cache_salt=self.cache_salt or "",
                priority=self.priority or 0,
                kv_failure_policy=self.kv_failure_policy,
                terms=self.with_session(terms),
                has_echo=bool(self.echo),
                names=names | {STRUCTURED: self.constraint_name},
                arrived_at=arrived_at,
            )
            for index, prompt in enumerate(prompts)
        ]


if TYPE_CHECKING:
    _ChatFields = _GenerationBody
else:
    _ChatFields = with_fields(_GenerationBody, REFUSED_BY_CHATS)

_REFUSED_FIELDS_OF_CHATS = RefusedFields(REFUSED_BY_BOTH + REFUSED_BY_CHATS)


class ChatBody(_ChatFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {"prompt": "/v1/completions"}  # fields of the other endpoint

    messages: Annotated[
        Annotated[list[Message], Meta(max_length=MAX_MESSAGES)],
        Meta(description="The conversation so far, oldest first; see below."),
    ]
    max_completion_tokens: Annotated[int | None, Meta(description="Most output tokens; wins over max_tokens.")] = None
    logprobs: Annotated[bool | None, Meta(description="Log probabilities of the answer's tokens.")] = None
    top_logprobs: Annotated[
        int | None, Meta(description="And those of so many most likely tokens; needs logprobs.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Have the template open the assistant's turn; default true.")
    ] = None
    continue_final_message: Annotated[
        bool | None,
        Meta(description="The answer goes on where the last message ends; then add_generation_prompt is false."),
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin the prompt as the tokenizer says, before what the template writes.")
    ] = None
    chat_template_kwargs: Annotated[Raw, Meta(description="Variables of the template.")] = field(default_factory=Raw)
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Documents, for templates that take them.")] = (
        None
    )
    reasoning_effort: Annotated[
        Name | None,
        Meta(description="Variable of the template, with `enable_thinking`, which is false if it is `none`."),
    ] = None

    tools: Annotated[Raw, Meta(description="Functions that the model may call, see [tools.md](tools.md).")] = field(
        default_factory=Raw
    )
    tool_choice: Annotated[
        Raw, Meta(description="`auto`, `none`, `required`, or the function that must be called; default `auto`.")
    ] = field(default_factory=Raw)
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="false: at most one call per answer; default true.")
    ] = None
    include_reasoning: Annotated[bool | None, Meta(description="false: reasoning is left out; default true.")] = None
    separate_reasoning: Annotated[
        bool | None, Meta(description="false: reasoning stays in the text with its tags; default true.")
    ] = None

    # Without effect, see IGNORED_BY_CHATS.
    stream_reasoning: bool | None = None

    num_prompts: ClassVar[int] = 1

    def drafts(self, request_id: str, arrived_at: float, terms: Terms) -> list[Draft]:
        """The one draft."""
        self.check(_REFUSED_FIELDS_OF_CHATS)
        check_continuation(self)
        tools = read_tools(self.tools)
        choice = read_tool_choice(self.tool_choice, tools)
        prompt = chat_prompt(
            self.messages,
            tools=tools if choice.may_call else [],
            num_tool_chars=len(bytes(self.tools)),
            add_generation_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=self.add_special_tokens is True,
            template_variables=self._template_variables(),
        )
        given = self.parameters(self._num_logprobs())
        if choice.must_call:
            given[STRUCTURED] = constraint_of_calls(
                tools,
                choice,
                is_single=self.parallel_tool_calls is False,
                rival=self.constraint_name if STRUCTURED in given else "",
            )
        max_tokens, seed = given.pop("max_tokens", None), given.pop("seed", None)
        limit_name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return [
            Draft(
                request_id=request_id,
                model=self.model,
                prompt=prompt,
                prompt_param="messages",
                sampling=given,
                max_tokens=max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                default_max_tokens=None,
                seed=seed,
                stops=self.stops,
                cache_salt=self.cache_salt or "",
                priority=self.priority or 0,
                kv_failure_policy=self.kv_failure_policy,
                terms=self.with_session(terms),
                names={
                    "num_logprobs": "top_logprobs",
                    "max_tokens": limit_name,
                    STRUCTURED: "tools" if choice.must_call else self.constraint_name,
                },
                arrived_at=arrived_at,
            )
        ]

    def reply_options(self, prompt: Prompt) -> ReplyOptions:
        """How answers to the prompt of its draft are parsed."""
        assert isinstance(prompt, ChatPrompt)
        choice = read_tool_choice(self.tool_choice, prompt.tools) if prompt.tools else ToolChoice()
        return reply_options_of(
            prompt,
            choice,
            is_constrained=_is_sent(self.structured_outputs) or _is_sent(self.response_format),
            is_single=self.parallel_tool_calls is False,
            separates_reasoning=self.separate_reasoning is not False,
            shows_reasoning=self.include_reasoning is not False,
        )

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None

    def _template_variables(self) -> dict[str, Any]:
        """What the template may know beside the messages; chat_template_kwargs win."""
        variables: dict[str, Any] = {}
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        return variables | decode_variables(self.chat_template_kwargs)


class _AnyBody(msgspec.Struct):
    """What tells the two bodies apart."""

    messages: Raw = field(default_factory=Raw)


_any_decoder = msgspec.json.Decoder(_AnyBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)


def parse_completion(body: bytes) -> CompletionBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=CompletionBody):
        return _completion_decoder.decode(body)


def parse_any(body: bytes) -> CompletionBody | ChatBody:
    """A chat if it has messages, else a completion. Raises InvalidRequestError."""
    return parse_chat(body) if has_messages(body) else parse_completion(body)


def has_messages(body: bytes) -> bool:
    """Whether it is a chat. Builds nothing of other fields, of which there may be very many. Raises
    InvalidRequestError."""
    with request_errors():
        return bool(bytes(_any_decoder.decode(body).messages))


def parse_chat(body: bytes) -> ChatBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=ChatBody):
        return _chat_decoder.decode(body)
