"""Messages of a chat, as clients send them and as the model's template takes them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError, quoted
from router.gateway.bodies.decoding import check_field_values
from router.requests.bounds import MAX_NAME_CHARS

_TEXT_TYPES = ("text", "input_text", "output_text")  # the latter two of OpenAI's other API
_REFUSAL = "refusal"

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation. Other fields, which a server may have put into an answer, are dropped."""

    role: Name
    content: str | list[ContentPart | str] | None = None
    name: Name | None = None
    tool_calls: Raw = field(default_factory=Raw)
    tool_call_id: Name | None = None
    function_call: Raw = field(default_factory=Raw)
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def size(self) -> int:
        """Characters, roughly."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part if isinstance(part, str) else part.text or "" for part in content)
        others = (self.reasoning or "", self.reasoning_content or "", bytes(self.tool_calls), bytes(self.function_call))
        return len(content) + sum(map(len, others))

    def as_template_input(self, index: int) -> dict[str, Any]:
        """Returns the message for the chat template, see `common.tokenization.chat`, with calls as they were sent: they
        are decoded where the chat is rendered. Raises InvalidRequestError for content that is not text, and for calls
        that hold too much."""
        where = f"messages[{index}]"
        message: dict[str, Any] = {"role": self.role, "content": self._content(f"{where}.content")}
        for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        for name in ("tool_calls", "function_call"):
            if bytes(value := getattr(self, name)):
                check_field_values(value, f"{where}.{name}")
                message[name] = value
        return message

    def _content(self, where: str) -> str | list[dict[str, str]] | None:
        if self.content is None or isinstance(self.content, str):
            return self.content
        return [{"type": "text", "text": text_of(part, where)} for part in self.content]


def text_of(part: ContentPart | str, where: str) -> str:
    """The part's text. Raises InvalidRequestError for what is not text; `where` names the content."""
    if isinstance(part, str):
        return part
    if part.type not in (*_TEXT_TYPES, _REFUSAL):
        problem = f"{where} has a part of type {quoted(part.type)}; only text is supported"
        raise InvalidRequestError(problem, param=where)
    text = part.refusal if part.type == _REFUSAL else part.text
    if text is None:
        raise InvalidRequestError(f"{where} has a part without text", param=where)
    return text
