"""A model's chat template: messages in, prompt text out.

Templates differ in what they take as a message's content: one text, or a list of parts, over which they loop. Each
gets what it takes, as with vLLM: texts are joined by line feeds, or a text becomes the only part. Arguments of tool
calls, which clients send as text, are objects to the template. One that reads a message's `thinking`, such as that of
gpt-oss, gets the reasoning before calls under that name, too.

The environment offers what templates on the hub expect of `transformers` (loop controls, `raise_exception`,
`strftime_now`, an unescaped `tojson`, `{% generation %}` blocks). It is jinja2's immutable sandbox, since a template
is third-party code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequestError, json_problem

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # what is trimmed of it shows what the template trims
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip


class ChatTemplate:
    """A compiled chat template. Raises ConfigError if `source` is not a valid template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the variables a template may use, such as bos_token."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            self.takes_parts = _loops_over_content(parsed)
            self._reads_thinking = _reads(parsed, "thinking")
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid: {error} (line {error.lineno})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Renders the prompt for a conversation, oldest message first; `variables`: further variables of the template.
        `continue_final_message`: the prompt ends with the text of the last message.

        A message's content is a text, or a list of texts or of {"type": "text", "text": ...}. Raises
        InvalidRequestError if the template rejects the messages, for example an unknown role.
        """
        taken = [self._take(message, f"messages[{index}]") for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(taken[-1])
        fixed = {"messages": taken, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(
                {"tools": None, "documents": None, **self._special_tokens, **variables, **fixed}
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequestError(
                f"the model's chat template rejects these messages: {json_problem(error)}", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _take(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The message as the template takes it."""
        texts = _texts_of(message.get("content"))
        parts = [{"type": "text", "text": text} for text in texts]
        taken = {**message, "content": parts if self.takes_parts else "\n".join(texts)}
        if not (calls := taken.pop("tool_calls", None)):
            return _with_reasoning(taken)
        if not isinstance(calls, list):
            raise InvalidRequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        taken["tool_calls"] = [_take_call(call, f"{where}.tool_calls") for call in calls]
        taken = _with_reasoning(taken)
        if self._reads_thinking and taken.get("reasoning") and not taken["content"]:  # that of gpt-oss refuses both
            taken["thinking"] = taken["reasoning"]
        return taken


def _mark_end(message: dict[str, Any]) -> None:
    """Appends the mark to the message's text, as `transformers` does. Raises InvalidRequestError if it has none."""
    content = message["content"]
    if not content:
        raise InvalidRequestError(
            "continue_final_message needs a last message with a text", param="continue_final_message"
        )
    if isinstance(content, str):
        message["content"] = content + _END_MARK
    else:
        content[-1]["text"] += _END_MARK


def _cut_at_mark(text: str) -> str:
    """Returns the text before the mark. A template that trims contents has trimmed the mark, too, and what stood before
    it is trimmed here."""
    before, found, _ = text.rpartition(_END_MARK)
    if found:
        return before
    before, found, _ = text.rpartition(_END_MARK.strip())
    if not found:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template leaves the last message out",
            param="continue_final_message",
        )
    return before.rstrip()


def _texts_of(content: str | Sequence[str | Mapping[str, Any]] | None) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, str) else str(part["text"]) for part in content]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under both of its names: servers and templates use either."""
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    return message if reasoning is None else {**message, "reasoning": reasoning, "reasoning_content": reasoning}


def _take_call(call: Any, where: str) -> Any:
    """A tool call with its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where} has an entry without a function", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            problem = f"{where} has arguments that are not valid JSON: {json_problem(error)}"
            raise InvalidRequestError(problem, param=where) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _loops_over_content(template: nodes.Template) -> bool:
    """Whether it has a loop over `message.content`, or over a variable `content` or one that was set to either."""
    names = {"content"}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _reads(template: nodes.Template, name: str) -> bool:
    """Whether it has an attribute or an item of this name."""
    return any(node.attr == name for node in template.find_all(nodes.Getattr)) or any(
        isinstance(node.arg, nodes.Const) and node.arg.value == name for node in template.find_all(nodes.Getitem)
    )


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Filter():
            return _is_content(node.node, names)
        case _:
            return False


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts `{% generation %}` ... `{% endgeneration %}`, which marks text for training only."""

    tags = {"generation"}  # noqa: RUF012  declared by the base class as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().astimezone().strftime(fmt)
