"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and the chats that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError, quoted
from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.field_names import MESSAGES_NAMES, FieldNames
from router.gateway.bodies.fields import REFUSED_BY_MESSAGES, RefusedFields, with_fields
from router.gateway.bodies.generation_body import ModelName
from router.gateway.bodies.messages import ContentPart, Message, Name
from router.gateway.bodies.stream_options import StreamOptions
from router.gateway.bodies.tools import object_or_empty
from router.gateway.openai.chat_bodies import ChatBody
from router.requests.bounds import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_TOOLS

_DROPPED = "redacted_thinking"  # only the server that made it can read it
_BUDGET = "thinking.budget_tokens"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Block(msgspec.Struct, kw_only=True):
    """A part of a message. Other fields, such as `cache_control`, are dropped."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None  # id of a tool call
    name: Name | None = None
    input: Raw = field(default_factory=Raw)
    tool_use_id: Name | None = None
    content: str | list[Block] | None = None  # content of a tool call's result


class Turn(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Raw = field(default_factory=Raw)


class AnthropicToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model is to reason, and for how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None

    def budget(self, max_tokens: int) -> int | None:
        """Most tokens of reasoning; None: no bound. Raises InvalidRequestError unless they leave room in `max_tokens`.
        Anthropic's minimum of 1024 does not apply: answers of small models are short."""
        budget = self.budget_tokens
        if budget is None:
            return None
        if self.type != "enabled":
            raise InvalidRequestError(f'{_BUDGET} needs thinking.type to be "enabled"', param=_BUDGET)
        if budget < 1:
            raise InvalidRequestError(f"{_BUDGET} must be an integer of at least 1, got {budget}", param=_BUDGET)
        if budget >= max_tokens:
            problem = f"{_BUDGET} must be less than max_tokens ({max_tokens}), got {budget}"
            raise InvalidRequestError(problem, param=_BUDGET)
        return budget


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """The form that the answer must have."""

    type: Literal["json_schema"]
    schema_: Raw


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much the model is to reason, and what its answer must be."""

    effort: Name | None = None
    format: OutputFormat | None = None


if TYPE_CHECKING:
    _Fields = msgspec.Struct
else:
    _Fields = with_fields(
        msgspec.defstruct("_Messages", [], kw_only=True, forbid_unknown_fields=True), REFUSED_BY_MESSAGES
    )

_REFUSED_FIELDS = RefusedFields(REFUSED_BY_MESSAGES)


class _Chat(ChatBody, kw_only=True, forbid_unknown_fields=True):
    """A chat of a client that asks every model to think, whether it can or not."""

    BUDGET_NEEDS_REASONING: ClassVar[bool] = False


class CountBody(_Fields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    NAMES: ClassVar[FieldNames] = MESSAGES_NAMES

    messages: Annotated[
        Annotated[list[Turn], Meta(max_length=MAX_MESSAGES)],
        Meta(description="The conversation: texts, calls, their results, thinking. The last one is the user's."),
    ]
    model: Annotated[ModelName | None, Meta(description="A served model's name; default: the only one's.")] = None
    system: Annotated[str | list[Block] | None, Meta(description="What the model is told beforehand.")] = None
    tools: Annotated[
        Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        AnthropicToolChoice | None, Meta(description="`auto`, `any`, `none`, or the `tool` that must be called.")
    ] = None
    thinking: Annotated[
        Thinking | None,
        Meta(
            description="`type` sets the template's `enable_thinking`; default: the template's. `budget_tokens`, less "
            "than `max_tokens`, is the `thinking_token_budget` of a chat; a model without reasoning keeps any."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        Meta(description="`effort`: the template's `reasoning_effort`; `format`: `json_schema` with a `schema`."),
    ] = None

    # Without effect, see IGNORED_BY_MESSAGES.
    cache_control: Raw = field(default_factory=Raw)
    context_management: Raw = field(default_factory=Raw)
    metadata: Raw = field(default_factory=Raw)
    service_tier: Name | None = None
    inference_geo: Name | None = None

    def as_chat(self) -> ChatBody:
        """The chat that it asks for. Raises InvalidRequestError."""
        _REFUSED_FIELDS.check(self)
        if self.messages and self.messages[-1].role == "assistant":
            problem = "the last message must be the user's: an answer begins a new turn"
            raise InvalidRequestError(f"messages: {problem}", param="messages")
        self._check_num_blocks()
        messages = [] if self.system is None else [_message("system", self.system, "system")]
        for index, turn in enumerate(self.messages):
            messages += _messages_of(turn, f"messages[{index}].content")
        choice = self.tool_choice
        return _Chat(
            model=self.model,
            messages=messages,
            tools=_tools_of(self.tools or []),
            tool_choice=Raw() if choice is None else _choice_of(choice),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            response_format=_response_format(self.output_config),
            chat_template_kwargs=_template_variables(self.thinking),
        )

    def _check_num_blocks(self) -> None:
        contents = [self.system, *(turn.content for turn in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        num_blocks = len(blocks) + sum(len(block.content) for block in blocks if isinstance(block.content, list))
        if num_blocks > MAX_CONTENT_PARTS:
            problem = f"messages must have at most {MAX_CONTENT_PARTS} blocks, got {num_blocks}"
            raise InvalidRequestError(problem, param="messages")


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(description="Most output tokens.")]
    stop_sequences: Annotated[
        Annotated[list[Annotated[str, Meta(max_length=MAX_STOP_CHARS)]], Meta(max_length=MAX_STOPS)] | None,
        Meta(description="Texts that end the answer and are not part of it."),
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer in server-sent events.")] = None
    temperature: Annotated[float | None, Meta(description="As of a chat.")] = None
    top_p: Annotated[float | None, Meta(description="As of a chat.")] = None
    top_k: Annotated[int | None, Meta(description="As of a chat.")] = None

    def as_chat(self) -> ChatBody:
        """See CountBody."""
        chat = super().as_chat()
        chat.give(max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        if self.thinking is not None:
            chat.give(thinking_token_budget=self.thinking.budget(self.max_tokens))
        chat.stop = self.stop_sequences
        chat.stream = self.stream
        if self.stream:
            chat.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        return chat


_messages_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)


def parse_messages(body: bytes) -> ChatBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=MessagesBody):
        return _messages_decoder.decode(body).as_chat()


def parse_count(body: bytes) -> ChatBody:
    """Raises as parse_messages does."""
    with request_errors(struct=CountBody):
        return _count_decoder.decode(body).as_chat()


def _messages_of(turn: Turn, where: str) -> Iterator[Message]:
    """The results of calls are messages of their own, before the rest."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    rest: list[Block] = []
    for block in turn.content:
        if block.type == "tool_result":
            yield _message("tool", block.content or "", where, tool_call_id=block.tool_use_id)
        else:
            rest.append(block)
    calls = [_call_of(block, where) for block in rest if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in rest if block.type == "thinking"]
    texts = [block for block in rest if block.type not in ("tool_use", "thinking", _DROPPED)]
    if texts or calls or thoughts:
        yield _message(
            turn.role,
            texts,
            where,
            tool_calls=Raw(msgspec.json.encode(calls)) if calls else Raw(),
            reasoning="\n".join(thoughts) if thoughts else None,
        )


def _message(role: str, content: str | Sequence[Block], where: str, **fields: Any) -> Message:
    if isinstance(content, str):
        return Message(role=role, content=content, **fields)
    return Message(role=role, content=[_text_part(block, where) for block in content], **fields)


def _text_part(block: Block, where: str) -> ContentPart | str:
    if block.type != "text":
        problem = f"{where} has a block of type {quoted(block.type)}; only text, calls and thinking are supported"
        raise InvalidRequestError(problem, param=where)
    if block.text is None:
        raise InvalidRequestError(f"{where} has a block without text", param=where)
    return ContentPart(type="text", text=block.text)


def _call_of(block: Block, where: str) -> dict[str, Any]:
    arguments = bytes(block.input) or b"{}"
    if not (block.name and arguments.startswith(b"{")):
        raise InvalidRequestError(f"{where} has a call without a name, or whose input is no object", param=where)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": Raw(arguments)}}


def _tools_of(tools: Sequence[AnthropicTool]) -> Raw:
    """In OpenAI's form."""
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            param = f"tools[{index}].type"
            raise InvalidRequestError(f"{param}: {quoted(tool.type)} is not supported; use custom", param=param)
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": object_or_empty(tool.input_schema)}
        for tool in tools
    ]
    return Raw(msgspec.json.encode([{"type": "function", "function": function} for function in functions]))


def _choice_of(choice: AnthropicToolChoice) -> Raw:
    """In OpenAI's form."""
    if choice.type != "tool":
        return Raw(msgspec.json.encode(_CHOICES[choice.type]))
    return Raw(msgspec.json.encode({"type": "function", "function": {"name": choice.name or ""}}))


def _response_format(config: OutputConfig | None) -> Raw:
    """Returns the `response_format` of a chat."""
    if config is None or config.format is None:
        return Raw()
    return Raw(msgspec.json.encode({"type": "json_schema", "json_schema": {"schema": config.format.schema_}}))


def _template_variables(thinking: Thinking | None) -> Raw:
    if thinking is None:
        return Raw()
    return Raw(msgspec.json.encode({"enable_thinking": thinking.type != "disabled"}))
