"""Body of POST /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError, json_problem, quoted
from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.field_names import RESPONSES_NAMES, FieldNames
from router.gateway.bodies.fields import REFUSED_BY_RESPONSES, RefusedFields, with_fields
from router.gateway.bodies.generation_body import Metadata, ModelName
from router.gateway.bodies.messages import ContentPart, Message, Name, text_of
from router.gateway.bodies.stream_options import StreamOptions
from router.gateway.bodies.tools import object_or_empty
from router.gateway.openai.chat_bodies import ChatBody
from router.requests.bounds import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_SESSION_CHARS, MAX_TOOLS

_CHOICES = ("auto", "none", "required")


class Item(msgspec.Struct, kw_only=True):
    """A message, a call, a call's result or reasoning. Other fields, such as `status`, are dropped."""

    type: str = "message"
    role: Name | None = None
    content: str | list[ContentPart] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None  # result of a tool call
    summary: list[ContentPart] | None = None  # summary of reasoning


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Raw = field(default_factory=Raw)
    strict: bool | None = None


class ResponsesReasoning(msgspec.Struct, kw_only=True):
    """How much the model is to reason. Reasoning is never summarised."""

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: Raw = field(default_factory=Raw)
    verbosity: Name | None = None


class _TextFormat(msgspec.Struct, kw_only=True, rename={"schema_": "schema"}):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Raw = field(default_factory=Raw)
    strict: bool | None = None


class ResponsesChat(ChatBody, kw_only=True):
    """A chat whose answer repeats fields of the request."""

    repeated: dict[str, Any]

    @property
    def echoed(self) -> Mapping[str, Any]:
        """See GenerationBody."""
        return self.repeated


if TYPE_CHECKING:
    _Fields = msgspec.Struct
else:
    _Fields = with_fields(
        msgspec.defstruct("_Responses", [], kw_only=True, forbid_unknown_fields=True), REFUSED_BY_RESPONSES
    )

_REFUSED_FIELDS = RefusedFields(REFUSED_BY_RESPONSES)


class ResponsesBody(_Fields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses."""

    NAMES: ClassVar[FieldNames] = RESPONSES_NAMES

    input: Annotated[
        str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES)],
        Meta(description="The user's text, or the conversation: messages, calls, their results, reasoning."),
    ]
    instructions: Annotated[str | None, Meta(description="A system message before the conversation.")] = None
    model: Annotated[ModelName | None, Meta(description="A served model's name; default: the only one's.")] = None
    max_output_tokens: Annotated[int | None, Meta(description="Most output tokens.")] = None
    temperature: Annotated[float | None, Meta(description="As of a chat.")] = None
    top_p: Annotated[float | None, Meta(description="As of a chat.")] = None
    tools: Annotated[
        Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[Raw, Meta(description="As of a chat; a function is `{type, name}`.")] = field(
        default_factory=Raw
    )
    parallel_tool_calls: Annotated[bool | None, Meta(description="As of a chat.")] = None
    reasoning: Annotated[
        ResponsesReasoning | None, Meta(description="`effort`: the template's `reasoning_effort`.")
    ] = None
    text: Annotated[
        TextConfig | None, Meta(description="`format`: `text`, `json_object`, or `json_schema` with a `schema`.")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer in typed events.")] = None
    prompt_cache_key: Annotated[
        Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] | None,
        Meta(description="Names the session if `x-session-id` does not."),
    ] = None

    # Without effect, see IGNORED_BY_RESPONSES.
    store: bool | None = None
    include: Raw = field(default_factory=Raw)
    max_tool_calls: int | None = None
    stream_options: Raw = field(default_factory=Raw)
    metadata: Metadata | None = None
    user: Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] | None = None
    safety_identifier: Name | None = None
    service_tier: Name | None = None
    prompt_cache_retention: Name | None = None
    context_management: Raw = field(default_factory=Raw)

    def as_chat(self) -> ResponsesChat:
        """The chat that it asks for. Raises InvalidRequestError."""
        _REFUSED_FIELDS.check(self)
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        elif self.input:
            messages += _messages_of(self.input)
        else:
            raise InvalidRequestError("input is empty", param="input")
        chat = ResponsesChat(
            model=self.model,
            messages=messages,
            tools=_tools_of(self.tools or []),
            tool_choice=_choice_of(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            prompt_cache_key=self.prompt_cache_key,
            response_format=self._response_format(),
            stream=self.stream,
            stream_options=StreamOptions(include_usage=True) if self.stream else None,
            repeated=self._repeated(),
        )
        chat.give(max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p)
        return chat

    def _response_format(self) -> Raw:
        """Returns the `response_format` of a chat."""
        if self.text is None or not _is_given(self.text.format):
            return Raw()
        with request_errors("text.format"):
            wanted = _format_decoder.decode(self.text.format)
        if wanted.type != "json_schema":
            return Raw(msgspec.json.encode({"type": wanted.type}))
        if not _is_given(wanted.schema_):
            raise InvalidRequestError("text.format.schema is required", param="text.format.schema")
        schema = {"schema": wanted.schema_, "name": wanted.name}
        return Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))

    def _repeated(self) -> dict[str, Any]:
        plain = self.text is None or not _is_given(self.text.format)
        tools = [
            msgspec.structs.replace(tool, parameters=object_or_empty(tool.parameters)) for tool in self.tools or []
        ]
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"} if plain or self.text is None else self.text.format},
            "tool_choice": self.tool_choice if _is_given(self.tool_choice) else "auto",
            "tools": tools,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


_decoder = msgspec.json.Decoder(ResponsesBody)
_format_decoder = msgspec.json.Decoder(_TextFormat)
_any_decoder = msgspec.json.Decoder()


def parse_responses(body: bytes) -> ChatBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=ResponsesBody):
        return _decoder.decode(body).as_chat()


class _Turn:
    """A message of the assistant in the making: items of it follow each other."""

    def __init__(self) -> None:
        self.texts: list[ContentPart | str] = []
        self.calls: list[dict[str, Any]] = []
        self.thoughts: list[str] = []

    def take(self) -> Iterator[Message]:
        """The message, if there is anything in it."""
        if self.texts or self.calls or self.thoughts:
            yield Message(
                role="assistant",
                content=self.texts,
                tool_calls=Raw(msgspec.json.encode(self.calls)) if self.calls else Raw(),
                reasoning="\n".join(self.thoughts) if self.thoughts else None,
            )
        self.texts, self.calls, self.thoughts = [], [], []


def _messages_of(items: Sequence[Item]) -> Iterator[Message]:
    contents = [content for item in items for content in (item.content, item.output, item.summary)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_CONTENT_PARTS:
        problem = f"input must have at most {MAX_CONTENT_PARTS} content parts, got {num_parts}"
        raise InvalidRequestError(problem, param="input")
    turn = _Turn()
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.type:
            case "message" if item.role == "assistant":
                if turn.calls:
                    yield from turn.take()
                turn.texts += _texts(item.content, f"{where}.content")
            case "message":
                yield from turn.take()
                yield Message(role=item.role or "user", content=_texts(item.content, f"{where}.content"))
            case "function_call":
                turn.calls.append(_call_of(item, where))
            case "function_call_output":
                yield from turn.take()
                texts = _texts(item.output, f"{where}.output")
                yield Message(role="tool", content=texts, tool_call_id=item.call_id)
            case "reasoning":
                if turn.calls or turn.texts:
                    yield from turn.take()
                turn.thoughts += [_thought(part) for part in (*_given(item.content), *_given(item.summary))]
            case other:
                problem = f"{where}: items of type {quoted(other)} are not supported"
                raise InvalidRequestError(problem, param=f"{where}.type")
    yield from turn.take()


def _texts(content: str | list[ContentPart] | None, where: str) -> list[ContentPart | str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    return [text_of(part, where) for part in content]


def _given(content: str | list[ContentPart] | None) -> list[ContentPart | str]:
    return [content] if isinstance(content, str) else list(content or [])


def _thought(part: ContentPart | str) -> str:
    return part if isinstance(part, str) else part.text or ""


def _call_of(item: Item, where: str) -> dict[str, Any]:
    if not item.name:
        raise InvalidRequestError(f"{where}.name is required", param=f"{where}.name")
    try:
        _any_decoder.decode(item.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        param = f"{where}.arguments"
        raise InvalidRequestError(f"{param} is not valid JSON: {json_problem(error)}", param=param) from error
    return {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments or "{}"},
    }


def _tools_of(tools: Sequence[ResponsesTool]) -> Raw:
    """Returns the `tools` of a chat."""
    for index, tool in enumerate(tools):
        if tool.type != "function":
            param = f"tools[{index}].type"
            raise InvalidRequestError(f"{param}: {quoted(tool.type)} is not supported; use function", param=param)
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": object_or_empty(tool.parameters)}
        for tool in tools
    ]
    return Raw(msgspec.json.encode([{"type": "function", "function": function} for function in functions]))


def _choice_of(choice: Raw) -> Raw:
    """Returns the `tool_choice` of a chat."""
    if not _is_given(choice):
        return Raw()
    value = _any_decoder.decode(choice)
    if value in _CHOICES:
        return choice
    match value:
        case {"type": "function", "name": str(name)}:
            return Raw(msgspec.json.encode({"type": "function", "function": {"name": name}}))
        case _:
            forms = '"auto", "none", "required" or {"type": "function", "name": ...}'
            raise InvalidRequestError(f"tool_choice must be {forms}", param="tool_choice")


def _is_given(value: Raw) -> bool:
    return bytes(value) not in (b"", b"null")
