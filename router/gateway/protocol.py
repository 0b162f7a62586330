"""Bodies of the OpenAI-style requests, and what becomes of them: Drafts.

Fields beyond OpenAI's are those that clients of vLLM and SGLang use. A field that Baton cannot honour is refused by
name rather than ignored, unless its value asks for nothing, see `router.gateway.fields`.

Every field is bounded, see `router.requests.bounds`. Parsing holds the event loop, so how many JSON values a body may
have is checked before; fields of any type are kept as they were sent.
"""

from __future__ import annotations

import difflib
import enum
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError, PayloadTooLargeError, quoted
from common.types import Constraint, SamplingParams
from common.types.parameters import TEXTS, TOKEN_IDS, ParameterField, Range, parameters_of
from router.gateway.beams import BeamOptions
from router.gateway.fields import (
    REFUSED_BY_BOTH,
    REFUSED_BY_CHATS,
    REFUSED_BY_COMPLETIONS,
    RefusedFields,
    with_fields,
)
from router.gateway.messages import Message, Name
from router.gateway.reply import ReplyOptions
from router.gateway.structured import (
    FORMAT,
    STRUCTURED,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
    constraint_of_format,
    constraint_of_structured,
)
from router.gateway.tools.forced import forced_calls
from router.gateway.tools.request import Tool, ToolChoice, name_of, read_tool_choice, read_tools
from router.requests.bounds import (
    MAX_BEAMS,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_MODEL_CHARS,
    MAX_SALT_CHARS,
    MAX_SESSION_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPLATE_BYTES,
)
from router.requests.request import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from router.requests.terms import Terms

_DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy API has it
_ALL_TOKENS = -1  # top_k, as vLLM has it; 0 is the same
_ANY_SEED = -1  # as vLLM has it: no seed; other negative ones are seeds
_LENGTH_PENALTIES = Range(-10, 10)
_NOT_WITH_BEAMS = (
    "stream",
    "echo",
    "logprobs",
    "stop",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "vllm_xargs",
    "tools",
)
_SEPARATORS = b",[{"  # each begins another JSON value

ModelName = Annotated[str, Meta(max_length=MAX_MODEL_CHARS)]
_Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
_Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
_Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
_Tag = Annotated[str, Meta(max_length=MAX_METADATA_CHARS)]
Metadata = Annotated[dict[_Tag, _Tag], Meta(max_length=MAX_METADATA)]


class UsageReports(enum.Enum):
    """Which chunks of a stream carry token counts."""

    NONE = enum.auto()
    LAST_CHUNK = enum.auto()
    EVERY_CHUNK = enum.auto()


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: Annotated[bool | None, Meta(description="A last chunk with token counts.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With include_usage: token counts so far in every chunk.")
    ] = None
    include_event_ids: Annotated[
        bool | None, Meta(description="Events have ids, as with the header `x-baton-resumable: 1`.")
    ] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Of no effect: nothing is obfuscated.")] = None

    @property
    def is_idle(self) -> bool:
        """True if no option is given."""
        return all(getattr(self, name) is None for name in self.__struct_fields__)


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
        int | None, Meta(description="Beams that are followed, of which n are the answer; else it must equal n.")
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

    def _check_no_beams(self) -> None:
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequestError("best_of must equal n: other answers are not ranked", param="best_of")
        if self.length_penalty not in (None, 1.0, 0) or self.early_stopping not in (None, False):
            name = "early_stopping" if self.length_penalty in (None, 1.0, 0) else "length_penalty"
            raise InvalidRequestError(f"{name} needs use_beam_search to be true", param=name)

    def beams(self) -> BeamOptions | None:
        """How to search; None: answers are sampled. Raises InvalidRequestError for what cannot be searched for."""
        if not self.use_beam_search:
            return None
        for name in _NOT_WITH_BEAMS:
            if _asks(name, getattr(self, name, None)):
                raise _not_with_beams(name)
        if self._constraint() is not None:
            raise _not_with_beams(self.constraint_name)
        n = 1 if self.n is None else self.n
        width = n if self.best_of is None else self.best_of
        if not n <= width <= MAX_BEAMS:
            raise InvalidRequestError(f"best_of must be in [n, {MAX_BEAMS}], got {width}", param="best_of")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        if penalty not in _LENGTH_PENALTIES:
            problem = f"length_penalty must be {_LENGTH_PENALTIES}, got {quoted(penalty)}"
            raise InvalidRequestError(problem, param="length_penalty")
        if self.early_stopping not in (None, True, False, "never"):
            raise InvalidRequestError("early_stopping must be true, false or never", param="early_stopping")
        return BeamOptions(width, penalty, "never" if self.early_stopping == "never" else bool(self.early_stopping))

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


def _not_with_beams(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} cannot be used with use_beam_search", param=name)


def _asks(name: str, value: object) -> bool:
    """Whether the value of a field asks for something."""
    if value is None or value is False:
        return False
    if isinstance(value, Raw):
        return bytes(value) not in (b"", b"null", b"[]")
    if name in {"logprobs", "prompt_logprobs"}:
        return True
    return value != 1.0 if name == "repetition_penalty" else bool(value)


if TYPE_CHECKING:
    _CompletionFields = _GenerationBody
else:
    _CompletionFields = with_fields(_GenerationBody, REFUSED_BY_COMPLETIONS)

_REFUSED_FIELDS = RefusedFields(REFUSED_BY_BOTH + REFUSED_BY_COMPLETIONS)


class CompletionBody(_CompletionFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

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
    prompt_field: ClassVar[str] = "messages"  # what the client calls it, for errors
    limit_field: ClassVar[str] = "max_tokens"

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
        limit_name = self.limit_field if self.max_completion_tokens is None else "max_completion_tokens"
        return [
            Draft(
                request_id=request_id,
                model=self.model,
                prompt=prompt,
                prompt_param=self.prompt_field,
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


class Continuing(Protocol):
    """A chat that may go on with its last message."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None


def check_continuation(body: Continuing) -> None:
    """Raises InvalidRequestError if a chat both opens a turn and goes on with one."""
    if body.continue_final_message and body.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt cannot both be true"
        raise InvalidRequestError(problem, param="continue_final_message")


def chat_prompt(
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    num_tool_chars: int = 0,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
    template_variables: Mapping[str, Any],
) -> ChatPrompt:
    """The conversation for the template. Raises InvalidRequestError."""
    if not messages:
        raise InvalidRequestError("messages is empty", param="messages")
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if num_parts > MAX_CONTENT_PARTS:
        problem = f"messages must have at most {MAX_CONTENT_PARTS} content parts, got {num_parts}"
        raise InvalidRequestError(problem, param="messages")
    return ChatPrompt(
        [message.as_template_input(index) for index, message in enumerate(messages)],
        tools=tools,
        num_chars=sum(message.size for message in messages) + num_tool_chars,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
        template_variables=template_variables,
    )


def constraint_of_calls(tools: Sequence[Tool], choice: ToolChoice, *, is_single: bool, rival: str) -> Constraint:
    """Of an answer that must call tools. `rival`: the field that constrains it as well, if one does. Raises
    InvalidRequestError."""
    if rival:
        raise InvalidRequestError(f"give {rival} or force calls, not both", param="tool_choice")
    return forced_calls(tools, choice, is_single=is_single)


def reply_options_of(
    prompt: ChatPrompt,
    choice: ToolChoice,
    *,
    is_constrained: bool,
    is_single: bool,
    separates_reasoning: bool,
    shows_reasoning: bool,
) -> ReplyOptions:
    """How answers to a chat are parsed. `is_constrained`: by what the client gave, not by calls that are forced."""
    return ReplyOptions(
        tools=frozenset(map(name_of, prompt.tools)),
        must_call=choice.must_call,
        max_calls=1 if is_single else None,
        # A grammar begins with the first token, so there is no reasoning before it.
        separates_reasoning=separates_reasoning and not (choice.must_call or is_constrained),
        shows_reasoning=shows_reasoning,
    )


def decode_variables(value: Raw) -> dict[str, Any]:
    """`chat_template_kwargs` as sent. Raises InvalidRequestError."""
    num_bytes = len(bytes(value))
    if not num_bytes:
        return {}
    if num_bytes > MAX_TEMPLATE_BYTES:
        problem = f"chat_template_kwargs must have at most {MAX_TEMPLATE_BYTES} bytes of JSON, got {num_bytes}"
        raise InvalidRequestError(problem, param="chat_template_kwargs")
    with request_errors("chat_template_kwargs"):
        return _variables_decoder.decode(value) or {}


def check_num_values(body: bytes, limit: int) -> None:
    """Raises PayloadTooLargeError if the JSON holds more than `limit` values, which would take long to parse. Commas
    and brackets within texts count as well."""
    if len(body) > limit and len(body) - len(body.translate(None, _SEPARATORS)) > limit:
        raise PayloadTooLargeError(f"the body holds more JSON values than the limit of {limit} (max_body_values)")


_AT = re.compile(r" - at (`key` in )?`(key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


class _AnyBody(msgspec.Struct):
    """What tells the two bodies apart."""

    messages: Raw = field(default_factory=Raw)


_any_decoder = msgspec.json.Decoder(_AnyBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
_variables_decoder = msgspec.json.Decoder(dict[str, Any] | None)
_NESTED: dict[str, type[msgspec.Struct] | None] = {
    "stream_options": StreamOptions,
    FORMAT: ResponseFormat,
    f"{FORMAT}.json_schema": JsonSchemaFormat,
    STRUCTURED: StructuredOutputs,
}
_MAX_GUESSED_CHARS = 64  # of an unknown field's name; comparing takes as long as both are


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


class request_errors:  # noqa: N801  used as a context manager
    """Turns msgspec's errors into ours."""

    def __init__(self, field: str = "", *, struct: type[msgspec.Struct] | None = None) -> None:
        """`field`: that is decoded; empty: the whole body, which is a `struct`."""
        self._field = field
        self._struct = struct

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, msgspec.ValidationError):
            raise _validation_error(str(error), self._field, self._struct) from None
        if isinstance(error, msgspec.DecodeError | UnicodeDecodeError | RecursionError):
            detail = str(error).removeprefix("JSON is malformed: ")
            raise InvalidRequestError(f"the body is not valid JSON: {detail}") from None


def _validation_error(message: str, field: str, struct: type[msgspec.Struct] | None) -> InvalidRequestError:
    """ "Expected `int`, got `str` - at `$.max_tokens`" -> "max_tokens: expected `int`, got `str`"."""
    where = _AT.search(message)
    path = ".".join(filter(None, (field, where["path"] if where else "")))
    problem = message[: where.start()] if where else message
    if unknown := _UNKNOWN.match(problem):
        name = unknown["name"]
        param = f"{path}.{name}".lstrip(".")
        return InvalidRequestError(f"unknown field {quoted(param)}{_hint(name, path, struct)}", param=param)
    if missing := _MISSING.match(problem):
        param = f"{path}.{missing['name']}".lstrip(".")
        return InvalidRequestError(f"{param} is required", param=param)
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {problem[0].lower()}{problem[1:]}")
    return InvalidRequestError(f"{path}: {problem[0].lower()}{problem[1:]}", param=path)


def _hint(name: str, path: str, struct: type[msgspec.Struct] | None) -> str:
    """What was probably meant by the field of that name; may be empty."""
    known = {"": struct, **_NESTED}.get(path)
    if known is None or len(name) > _MAX_GUESSED_CHARS:
        return ""
    if known in (CompletionBody, ChatBody) and name in {"prompt", "messages"}:
        return f"; it is a field of {'/v1/completions' if name == 'prompt' else '/v1/chat/completions'}"
    close = difflib.get_close_matches(name, known.__struct_fields__, n=1)
    return f"; did you mean {close[0]}?" if close else ""
