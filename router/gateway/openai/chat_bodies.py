"""Body of POST /v1/chat/completions, and what becomes of it: a Draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError
from router.gateway.bodies.chat_prompts import (
    Documents,
    chat_prompt,
    check_continuation,
    constraint_of_calls,
    decode_documents,
    decode_variables,
    reply_options_of,
)
from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.fields import REFUSED_BY_BOTH, REFUSED_BY_CHATS, RefusedFields, with_fields
from router.gateway.bodies.generation_body import GenerationBody, is_sent
from router.gateway.bodies.messages import Message, Name
from router.gateway.bodies.tools import ToolChoice, read_tool_choice, read_tools
from router.gateway.openai.completion_bodies import CompletionBody, parse_completion
from router.replies.reply import ReplyOptions
from router.requests.bounds import MAX_MESSAGES
from router.requests.request import STRUCTURED, ChatPrompt, Draft, Prompt
from router.requests.terms import Terms

if TYPE_CHECKING:
    _ChatFields = GenerationBody
else:
    _ChatFields = with_fields(GenerationBody, REFUSED_BY_CHATS)

_REFUSED_FIELDS = RefusedFields(REFUSED_BY_BOTH + REFUSED_BY_CHATS)


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
    documents: Documents = field(default_factory=Raw)
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
    BUDGET_NEEDS_REASONING: ClassVar[bool] = True  # of the model; see ReplyOptions

    def drafts(self, request_id: str, arrived_at: float, terms: Terms) -> list[Draft]:
        """The one draft."""
        self.check(_REFUSED_FIELDS)
        check_continuation(self)
        tools = read_tools(self.tools)
        choice = read_tool_choice(self.tool_choice, tools)
        prompt = chat_prompt(
            self.messages,
            tools=tools if choice.may_call else [],
            num_more_chars=sum(len(bytes(each)) for each in (self.tools, self.documents, self.chat_template_kwargs)),
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
            is_constrained=is_sent(self.structured_outputs) or is_sent(self.response_format),
            is_single=self.parallel_tool_calls is False,
            separates_reasoning=self.separate_reasoning is not False,
            shows_reasoning=self.include_reasoning is not False,
            budget_needs_reasoning=self.BUDGET_NEEDS_REASONING,
        )

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None

    def _template_variables(self) -> dict[str, Any]:
        """Returns the template's variables beside the messages; chat_template_kwargs win."""
        variables: dict[str, Any] = {}
        if (documents := decode_documents(self.documents)) is not None:
            variables["documents"] = documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        return variables | decode_variables(self.chat_template_kwargs)


class _AnyBody(msgspec.Struct):
    """The field that tells the two bodies apart."""

    messages: Raw = field(default_factory=Raw)


_decoder = msgspec.json.Decoder(ChatBody)
_any_decoder = msgspec.json.Decoder(_AnyBody)


def parse_chat(body: bytes) -> ChatBody:
    """Raises InvalidRequestError that names the field, or says where the JSON is broken."""
    with request_errors(struct=ChatBody):
        return _decoder.decode(body)


def parse_any(body: bytes) -> CompletionBody | ChatBody:
    """A chat if it has messages, else a completion. Raises InvalidRequestError."""
    return parse_chat(body) if has_messages(body) else parse_completion(body)


def has_messages(body: bytes) -> bool:
    """Whether it is a chat. Builds nothing of other fields, of which there may be very many. Raises
    InvalidRequestError."""
    with request_errors():
        return bool(bytes(_any_decoder.decode(body).messages))
