"""Bodies of the OpenAI-style requests, and what becomes of them: Drafts.

Fields beyond OpenAI's are those that vLLM clients use. A field that Baton cannot honour is refused by name rather than
ignored, unless its value asks for nothing.

Every field is bounded, see `router.requests.bounds`. Parsing holds the event loop, so how many JSON values a body may
have is checked before; fields of any type are kept as they were sent.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError, PayloadTooLargeError, quoted
from common.types import SamplingParams
from common.types.validation import MAX_STOP_TOKEN_IDS
from router.requests.bounds import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_MODEL_CHARS,
    MAX_NAME_CHARS,
    MAX_SALT_CHARS,
    MAX_SESSION_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPLATE_BYTES,
)
from router.requests.request import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from router.requests.terms import Terms

_DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's legacy API has it
_MAX_IDLE_BYTES = 64  # of a value that asks for nothing
_SEPARATORS = b",[{"  # each begins another JSON value

_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_ModelName = Annotated[str, Meta(max_length=MAX_MODEL_CHARS)]
_Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
_Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
_Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
_Tag = Annotated[str, Meta(max_length=MAX_METADATA_CHARS)]

# Fields of OpenAI's API that are not offered, with the values that ask for nothing.
_NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: bool | None = None  # a last chunk with token counts
    include_obfuscation: bool | None = None  # accepted; nothing is obfuscated


class _GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completion have."""

    model: _ModelName | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Beyond OpenAI's API, with the names that vLLM gave them.
    top_k: int | None = None  # -1 and 0: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    request_id: _Name | None = None
    priority: int | None = None
    cache_salt: _Salt | None = None

    # Baton's own.
    kv_failure_policy: _Name | None = None  # "recompute" or "fail"; absent: the router's setting
    session_id: _Session | None = None  # requests of one session go to the same pods where the policy says so
    dry_run: bool | None = None  # answer with the route that the request would take

    # They name a session if session_id does not.
    prompt_cache_key: _Session | None = None
    user: _Session | None = None

    # Accepted and of no effect: they say who asks, not what.
    metadata: Annotated[dict[_Tag, _Tag], Meta(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    service_tier: _Name | None = None
    safety_identifier: _Name | None = None
    prompt_cache_retention: _Name | None = None

    # Refused by `check_offered` unless they ask for nothing.
    logit_bias: Raw = field(default_factory=Raw)
    response_format: Raw = field(default_factory=Raw)

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def with_session(self, terms: Terms) -> Terms:
        """The terms of the headers, with the session that the body names, if any does."""
        return replace(terms, session=self.session_id or terms.session or self.prompt_cache_key or self.user or "")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, num_logprobs: int | None) -> SamplingParams:
        """The parameters given, the defaults for the rest. Ranges are not checked here."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "num_logprobs": num_logprobs,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class CompletionBody(_GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    suffix: Raw = field(default_factory=Raw)

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
        check_offered(self)
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequestError("best_of must equal n: other answers are not ranked", param="best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("logprobs of the prompt are not computed; use echo or logprobs", param="logprobs")
        prompts = self.prompts()
        sampling = self.sampling(self.logprobs)
        return [
            Draft(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-p{index}",
                model=self.model,
                prompt=prompt,
                prompt_param="prompt" if len(prompts) == 1 else f"prompt[{index}]",
                sampling=sampling,
                max_tokens=self.max_tokens,
                default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
                seed=self.seed,
                stops=self.stops,
                cache_salt=self.cache_salt or "",
                priority=self.priority or 0,
                kv_failure_policy=self.kv_failure_policy,
                terms=self.with_session(terms),
                skip_special_tokens=self.skip_special_tokens is not False,
                names={"num_logprobs": "logprobs"},
                arrived_at=arrived_at,
            )
            for index, prompt in enumerate(prompts)
        ]


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation. Fields that some other server put into an answer may come back; they are dropped."""

    role: _Name
    content: str | list[ContentPart] | None = None
    name: _Name | None = None
    tool_calls: Raw = field(default_factory=Raw)
    tool_call_id: _Name | None = None

    def as_template_input(self, index: int) -> dict[str, Any]:
        """What the chat template sees. Raises InvalidRequestError for what is not text."""
        where = f"messages[{index}]"
        if not _is_idle(self.tool_calls, (None, [])) or self.tool_call_id is not None:
            raise InvalidRequestError(f"{where}: tool calls are not supported", param=where)
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    problem = f"{where}.content has a part of type {quoted(part.type)}; only text is supported"
                    raise InvalidRequestError(problem, param=f"{where}.content")
                if part.text is None:
                    raise InvalidRequestError(f"{where}.content has a part without text", param=f"{where}.content")
            content = "".join(part.text or "" for part in self.content)
        else:
            content = self.content or ""
        message = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatBody(_GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Raw = field(default_factory=Raw)

    parallel_tool_calls: bool | None = None  # of no effect without tools
    tools: Raw = field(default_factory=Raw)
    tool_choice: Raw = field(default_factory=Raw)
    functions: Raw = field(default_factory=Raw)
    function_call: Raw = field(default_factory=Raw)
    modalities: Raw = field(default_factory=Raw)
    audio: Raw = field(default_factory=Raw)
    prediction: Raw = field(default_factory=Raw)
    reasoning_effort: Raw = field(default_factory=Raw)
    verbosity: Raw = field(default_factory=Raw)
    web_search_options: Raw = field(default_factory=Raw)

    num_prompts: ClassVar[int] = 1

    def drafts(self, request_id: str, arrived_at: float, terms: Terms) -> list[Draft]:
        """The one draft."""
        check_offered(self)
        if not self.messages:
            raise InvalidRequestError("messages is empty", param="messages")
        num_parts = sum(len(message.content) for message in self.messages if isinstance(message.content, list))
        if num_parts > MAX_CONTENT_PARTS:
            problem = f"messages must have at most {MAX_CONTENT_PARTS} content parts, got {num_parts}"
            raise InvalidRequestError(problem, param="messages")
        prompt = ChatPrompt(
            [message.as_template_input(index) for index, message in enumerate(self.messages)],
            add_generation_prompt=self.add_generation_prompt is not False,
            template_variables=_template_variables(self.chat_template_kwargs),
        )
        limit_name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return [
            Draft(
                request_id=request_id,
                model=self.model,
                prompt=prompt,
                prompt_param="messages",
                sampling=self.sampling(self._num_logprobs()),
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                default_max_tokens=None,
                seed=self.seed,
                stops=self.stops,
                cache_salt=self.cache_salt or "",
                priority=self.priority or 0,
                kv_failure_policy=self.kv_failure_policy,
                terms=self.with_session(terms),
                skip_special_tokens=self.skip_special_tokens is not False,
                names={"num_logprobs": "top_logprobs", "max_tokens": limit_name},
                arrived_at=arrived_at,
            )
        ]

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None


def check_offered(body: CompletionBody | ChatBody) -> None:
    """Raises InvalidRequestError for a field that asks for what Baton does not do."""
    for name, idle in _NOT_OFFERED.items():
        if not _is_idle(getattr(body, name, Raw()), idle):
            raise InvalidRequestError(f"{name} is not supported", param=name)


def _is_idle(value: Raw, idle: tuple[object, ...]) -> bool:
    """Whether a field asks for nothing; whatever is long asks for something."""
    num_bytes = len(bytes(value))
    return not num_bytes or (num_bytes <= _MAX_IDLE_BYTES and msgspec.json.decode(value) in idle)


def _template_variables(value: Raw) -> dict[str, Any]:
    num_bytes = len(bytes(value))
    if not num_bytes:
        return {}
    if num_bytes > MAX_TEMPLATE_BYTES:
        problem = f"chat_template_kwargs must have at most {MAX_TEMPLATE_BYTES} bytes of JSON, got {num_bytes}"
        raise InvalidRequestError(problem, param="chat_template_kwargs")
    with _request_errors("chat_template_kwargs"):
        return _variables_decoder.decode(value) or {}


def check_num_values(body: bytes, limit: int) -> None:
    """Raises PayloadTooLargeError if the JSON holds more than `limit` values, which would take long to parse. Commas
    and brackets within texts count as well."""
    if len(body) > limit and len(body) - len(body.translate(None, _SEPARATORS)) > limit:
        raise PayloadTooLargeError(f"the body holds more JSON values than the limit of {limit} (max_body_values)")


_AT = re.compile(r" - at `(?P<key>key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


class _AnyBody(msgspec.Struct):
    """What tells the two bodies apart."""

    messages: Raw = field(default_factory=Raw)


_any_decoder = msgspec.json.Decoder(_AnyBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
_variables_decoder = msgspec.json.Decoder(dict[str, Any] | None)


def parse_completion(body: bytes) -> CompletionBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with _request_errors():
        return _completion_decoder.decode(body)


def parse_any(body: bytes) -> CompletionBody | ChatBody:
    """A chat if it has messages, else a completion. Raises InvalidRequestError."""
    with _request_errors():
        has_messages = bool(bytes(_any_decoder.decode(body).messages))
    return parse_chat(body) if has_messages else parse_completion(body)


def parse_chat(body: bytes) -> ChatBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with _request_errors():
        return _chat_decoder.decode(body)


class _request_errors:  # noqa: N801  used as a context manager
    """Turns msgspec's errors into ours."""

    def __init__(self, field: str = "") -> None:
        """`field`: that is decoded; empty: the whole body."""
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, msgspec.ValidationError):
            raise _validation_error(str(error), self._field) from None
        if isinstance(error, msgspec.DecodeError | UnicodeDecodeError | RecursionError):
            detail = str(error).removeprefix("JSON is malformed: ")
            raise InvalidRequestError(f"the body is not valid JSON: {detail}") from None


def _validation_error(message: str, field: str) -> InvalidRequestError:
    """ "Expected `int`, got `str` - at `$.max_tokens`" -> "max_tokens: expected `int`, got `str`"."""
    where = _AT.search(message)
    path = ".".join(filter(None, (field, where["path"] if where else "")))
    problem = message[: where.start()] if where else message
    if unknown := _UNKNOWN.match(problem):
        param = f"{path}.{unknown['name']}".lstrip(".")
        return InvalidRequestError(f"unknown field {quoted(param)}", param=param)
    if missing := _MISSING.match(problem):
        param = f"{path}.{missing['name']}".lstrip(".")
        return InvalidRequestError(f"{param} is required", param=param)
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {problem[0].lower()}{problem[1:]}")
    return InvalidRequestError(f"{path}: {problem[0].lower()}{problem[1:]}", param=path)
